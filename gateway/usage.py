"""The book of who used what: filled on the event loop, written by a thread of its own."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import TypeVar

import structlog

from .clock import Clock
from .record import RequestRecord
from .usage_store import UsageFilter, UsageRow, UsageStore

T = TypeVar("T")

WRITE_PERIOD_S = 0.5
"""A crash loses what ended since the last write: less than a second's worth, a slow disk aside."""


class UsageBook:
    """Counts requests as they end, and writes them in batches. Takes the store over, and closes it."""

    def __init__(self, store: UsageStore, clock: Clock, write_period_s: float = WRITE_PERIOD_S) -> None:
        self._store = store
        self._clock = clock
        self._write_period_s = write_period_s
        self._pending: dict[tuple[str, str, str, str], UsageRow] = {}
        self._writing = asyncio.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="surefoot-usage")
        self._log = structlog.get_logger()

    def observe(self, record: RequestRecord) -> None:
        """Count a request that is over, if it was taken or refused; cheap."""
        row = usage_row(record, datetime.fromtimestamp(self._clock.time(), UTC).date().isoformat())
        if row is not None:
            self.add(row)

    async def read(self, wanted: UsageFilter) -> list[UsageRow]:
        """All that was counted until now. Raises `sqlite3.Error`."""
        await self.write()
        return await self._in_thread(lambda: self._store.rows(wanted))

    async def write(self) -> None:
        """Write what is pending. What cannot be written stays pending, and is logged."""
        async with self._writing:
            batch, self._pending = self._pending, {}
            if not batch:
                return
            try:
                await self._in_thread(lambda: self._store.add(batch.values()))
            except sqlite3.Error as error:
                self._log.error("usage.write_failed", exc_info=error)
                for row in batch.values():
                    self.add(row)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write from time to time within the block, and all that is left at its end."""
        ended = asyncio.Event()
        writer = asyncio.create_task(self._write_until(ended))
        try:
            yield
        finally:
            # Not cancelled: a batch must not be lost between the loop and the thread.
            ended.set()
            await writer
            await self.write()
            await self._in_thread(self._store.close)
            self._thread.shutdown()

    async def _write_until(self, ended: asyncio.Event) -> None:
        while not ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), self._write_period_s)
            await self.write()

    def add(self, row: UsageRow) -> None:
        """Count a row; cheap."""
        known = self._pending.get(row.key)
        self._pending[row.key] = row if known is None else known + row

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def usage_row(record: RequestRecord, day: str) -> UsageRow | None:
    """What a request that is over adds to a day; None for one that says nothing of its tenant's use."""
    if record.promise is None or record.tenant_id is None or record.model is None:
        return None
    if not record.started and record.refusal is None:
        return None
    return UsageRow(
        day=day,
        tenant=record.tenant_id,
        model=record.model,
        sla_class=record.promise.name,
        requests=int(record.started),
        prompt_tokens=record.num_prompt_tokens,
        cached_tokens=record.num_cached_tokens,
        output_tokens=record.num_output_tokens,
        aborted=int(record.started and (record.aborted or record.error is not None)),
        refused=int(not record.started),
    )
