"""How late a server's event loop is while it decodes: from outside by pings, and by its own histogram."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from .client import HttpClient
from .errors import RequestFailed
from .progress import Progress

PING_PATH = "/health/live"
PING_PERIOD_S = 0.02
LAG_METRIC = "surefoot_event_loop_lag_seconds"

Buckets = Mapping[float, float]
"""A histogram: observations up to each bound, as Prometheus counts them."""


class LagProbe:
    """Enter it like a view while the load runs: pings the server at a fixed pace, whatever it answers.

    `ping_s` has the time of each answered ping; `own_p99_s` what the server's histogram says of the same
    time, None where it has none.
    """

    def __init__(self, url: str) -> None:
        self.ping_s: list[float] = []
        self.num_lost = 0
        self.own_p99_s: float | None = None
        self._url = url

    @asynccontextmanager
    async def __call__(self, progress: Progress) -> AsyncIterator[None]:
        """Probe for as long as this is entered."""
        async with HttpClient(self._url) as client:
            before = await self._own_buckets(client)
            pinging = asyncio.create_task(self._ping_on(client))
            try:
                yield
            finally:
                pinging.cancel()
                await asyncio.gather(pinging, return_exceptions=True)
                after = await self._own_buckets(client)
                gained = {bound: count - before.get(bound, 0.0) for bound, count in after.items()}
                self.own_p99_s = quantile(gained, 0.99)

    async def _ping_on(self, client: HttpClient) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._ping(client))
                due += PING_PERIOD_S
                await asyncio.sleep(max(0.0, due - loop.time()))

    async def _ping(self, client: HttpClient) -> None:
        start = time.perf_counter()
        try:
            await client.get(PING_PATH)
        except RequestFailed:
            self.num_lost += 1
        else:
            self.ping_s.append(time.perf_counter() - start)

    async def _own_buckets(self, client: HttpClient) -> Buckets:
        try:
            head, body = await client.get("/metrics")
        except RequestFailed:
            return {}
        return read_buckets(body.decode(errors="replace"), LAG_METRIC) if head.status == 200 else {}


def read_buckets(text: str, name: str) -> Buckets:
    """The buckets of a histogram without labels, from Prometheus' text format; empty if not there."""
    prefix = f'{name}_bucket{{le="'
    buckets = {}
    for line in text.splitlines():
        if line.startswith(prefix):
            bound, _, count = line.removeprefix(prefix).partition('"}')
            buckets[float(bound)] = float(count)
    return buckets


def quantile(buckets: Buckets, share: float) -> float | None:
    """As Prometheus' `histogram_quantile`: linear within a bucket. None without observations."""
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if not total:
        return None
    low, below = 0.0, 0.0
    for bound in bounds[:-1]:
        if buckets[bound] >= share * total:
            return low + (bound - low) * (share * total - below) / (buckets[bound] - below)
        low, below = bound, buckets[bound]
    return low
