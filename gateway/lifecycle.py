"""The backends' lives: made ready in the background, while `/health/live` answers, and ended in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import structlog

from surefoot.backends.base import Backend
from surefoot.backends.types import BackendState

LAG_PERIOD_S = 0.05
RELEASE_S = 10.0
"""What a backend may take, beyond the drain, to end what is left and release everything."""


class Lifecycle:
    """Starts and stops the backends of one server."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = backends
        self._log = structlog.get_logger()
        self._starting: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self.started = asyncio.Event()
        """Set when every backend is ready, or one cannot be."""
        self.failure: Exception | None = None
        """Why a backend could not be started."""

    @property
    def not_ready(self) -> str | None:
        """Why requests cannot be taken now; None if they can."""
        if self._stopping is not None:
            return "the server is shutting down"
        for backend in self._backends:
            if backend.status.state is not BackendState.READY:
                return backend.status.detail or f"a backend is {backend.status.state}"
        return None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start within the block; on leaving it, end at once whatever `stop` has not ended before."""
        self._starting = asyncio.create_task(self._start())
        try:
            yield
        finally:
            await self.stop(0)

    async def stop(self, drain_s: float) -> None:
        """Stop every backend. The first call decides how long requests may take; others wait for it."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(drain_s))
        await asyncio.shield(self._stopping)

    async def _start(self) -> None:
        try:
            for backend in self._backends:
                begun = time.perf_counter()
                await backend.start()
                models = [card.id for card in backend.models]
                self._log.info(
                    "backend.started", models=models, seconds=round(time.perf_counter() - begun, 3)
                )
        except Exception as error:
            self.failure = error
            self._log.error("backend.start_failed", reason=str(error), exc_info=error)
        self.started.set()

    async def _stop(self, drain_s: float) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        stops = [asyncio.wait_for(each.stop(drain_s), drain_s + RELEASE_S) for each in self._backends]
        for result in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(result, BaseException):
                self._log.error("backend.stop_failed", exc_info=result)


@asynccontextmanager
async def measured_lag(observe: Callable[[float], None]) -> AsyncIterator[None]:
    """Within the block, observe every `LAG_PERIOD_S` by how much the event loop is late."""

    async def measure() -> None:
        while True:
            due = time.perf_counter() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            observe(max(0.0, time.perf_counter() - due))

    task = asyncio.create_task(measure())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
