"""How late a server's event loop is while it decodes, by pings and by its own word, and what it costs."""

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
CPU_METRIC = "surefoot_event_loop_cpu_seconds_total"

Buckets = Mapping[float, float]
"""A histogram: observations up to each bound, as Prometheus counts them."""


class LagProbe:
    """Enter it like a view while the load runs: pings the server at a fixed pace, whatever it answers.

    `ping_s` has the time of each answered ping. `own_p99_s` is what the server's histogram says of the same
    time, and `own_cpu_s` the CPU time of its event loop, pings included; None where it does not say.
    """

    def __init__(self, url: str) -> None:
        self.ping_s: list[float] = []
        self.num_lost = 0
        self.own_p99_s: float | None = None
        self.own_cpu_s: float | None = None
        self._url = url

    @asynccontextmanager
    async def __call__(self, progress: Progress) -> AsyncIterator[None]:
        """Probe for as long as this is entered."""
        async with HttpClient(self._url) as client:
            before = await self._scrape(client)
            pinging = asyncio.create_task(self._ping_on(client))
            try:
                yield
            finally:
                pinging.cancel()
                await asyncio.gather(pinging, return_exceptions=True)
                self._compare(before, await self._scrape(client))

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

    async def _scrape(self, client: HttpClient) -> str:
        try:
            head, body = await client.get("/metrics")
        except RequestFailed:
            return ""
        return body.decode(errors="replace") if head.status == 200 else ""

    def _compare(self, before: str, after: str) -> None:
        old = read_buckets(before, LAG_METRIC)
        gained = {
            bound: count - old.get(bound, 0.0) for bound, count in read_buckets(after, LAG_METRIC).items()
        }
        self.own_p99_s = quantile(gained, 0.99)
        begun, ended = read_value(before, CPU_METRIC), read_value(after, CPU_METRIC)
        self.own_cpu_s = None if begun is None or ended is None else ended - begun


def read_buckets(text: str, name: str) -> Buckets:
    """The buckets of a histogram without labels, from Prometheus' text format; empty if not there."""
    prefix = f'{name}_bucket{{le="'
    buckets = {}
    for line in text.splitlines():
        if line.startswith(prefix):
            bound, _, count = line.removeprefix(prefix).partition('"}')
            buckets[float(bound)] = float(count)
    return buckets


def read_value(text: str, name: str) -> float | None:
    """A metric without labels, from Prometheus' text format; None if not there."""
    return next(
        (float(line.split(" ")[1]) for line in text.splitlines() if line.startswith(name + " ")), None
    )


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
