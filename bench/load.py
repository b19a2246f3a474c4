"""The load itself: a closed loop keeps N requests under way, an open loop sends them as they arrive."""

from __future__ import annotations

import asyncio

from .arrivals import Rate, arrivals
from .progress import Progress
from .records import RequestRecord
from .requester import Requester
from .settings import BenchSettings

REFUSED_PAUSE_S = 0.1
"""How long a closed loop's place rests when it gets no connection, so that a dead server is not hammered."""


class Load:
    """Runs one load. `records` fills as requests end, so an interrupted run has what there was."""

    def __init__(
        self, requester: Requester, settings: BenchSettings, progress: Progress, first_index: int = 0
    ) -> None:
        self.records: list[RequestRecord] = []
        self._requester = requester
        self._settings = settings
        self._progress = progress
        self._first_index = first_index
        self._num_sent = 0

    async def run(self) -> None:
        """Send everything and wait for the answers."""
        async with asyncio.TaskGroup() as group:
            if self._settings.rate is None:
                for _ in range(self._settings.concurrency):
                    group.create_task(self._keep_one_running())
            else:
                await self._send_arrivals(group, self._settings.rate)

    async def _keep_one_running(self) -> None:
        while not self._ended:
            self._num_sent += 1
            record = await self._send(self._first_index + self._num_sent - 1)
            if record.error == "connect":
                await asyncio.sleep(REFUSED_PAUSE_S)

    async def _send_arrivals(self, group: asyncio.TaskGroup, rate: Rate) -> None:
        settings = self._settings
        times = arrivals(rate, settings.seed, settings.num_requests, settings.duration_s)
        for index, at in enumerate(times, self._first_index):
            # A sleep of 0 too: many arrivals in a row must not keep the loop from reading.
            await asyncio.sleep(max(0.0, at - self._progress.elapsed_s))
            group.create_task(self._send(index, at))

    async def _send(self, index: int, scheduled_s: float | None = None) -> RequestRecord:
        record = await self._requester.send(index, scheduled_s)
        self.records.append(record)
        return record

    @property
    def _ended(self) -> bool:
        num_requests, duration_s = self._settings.num_requests, self._settings.duration_s
        sent_all = num_requests is not None and self._num_sent >= num_requests
        return sent_all or (duration_s is not None and self._progress.elapsed_s >= duration_s)
