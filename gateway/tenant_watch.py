"""Keeps the tenants as their files are: a thread that looks at the folder again and again, and at SIGHUP."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager

import structlog
from msgspec import Struct
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .tenant_files import Problem
from .tenant_folder import FolderState, TenantFolder
from .tenants import Tenants

MOST_NAMED = 10
"""A log event names so many tenants; a change of the defaults may touch thousands."""

LEAST_REST = 20
"""The watch rests so many times as long as a look takes: of a folder of 10,000 files that is 0.07 s."""


class ReloadStatus(Struct, frozen=True):
    """How the last look at the folder went. Times are Unix times."""

    num_reloads: int
    """Times that something changed for the better."""
    last_success_s: float
    """When all files were last found to be of use."""
    problems: tuple[Problem, ...] = ()


class TenantWatch:
    """Swaps the folder's tenants into `tenants` as they change. `period_s` 0 looks at SIGHUP only."""

    def __init__(
        self, folder: TenantFolder, tenants: Tenants, period_s: float, now: Callable[[], float] = time.time
    ) -> None:
        self._folder = folder
        self._tenants = tenants
        self._period_s = period_s
        self._now = now
        self._log = structlog.get_logger()
        self._wake = threading.Event()
        self._ends = False
        self.state: FolderState = folder.state
        self.status = ReloadStatus(0, now())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watch within the block."""
        thread = threading.Thread(target=self._watch, name="tenants", daemon=True)
        thread.start()
        is_main = threading.current_thread() is threading.main_thread()
        if is_main:  # Python lets no other thread handle signals.
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._wake.set)
        try:
            yield
        finally:
            if is_main:
                asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
            self._ends = True
            self._wake.set()
            await asyncio.to_thread(thread.join)

    def look(self) -> None:
        """Read what changed and put it in force. One thread at a time."""
        before, after = self.state, self._folder.reload()
        if after is not before:
            changes = _count_changes(before, after)
            if changes:
                self._tenants.replace(after.tenants)
                self._log.info("tenants.reloaded", num_tenants=len(after.loaded), **changes)
            self._tell(before.problems, after.problems)
            self.state = after
            self.status = ReloadStatus(
                self.status.num_reloads + bool(changes), self.status.last_success_s, after.problems
            )
        if not after.problems:
            self.status = ReloadStatus(self.status.num_reloads, self._now())

    def _watch(self) -> None:
        took_s = 0.0
        while True:
            self._wake.wait(max(self._period_s, took_s * LEAST_REST) if self._period_s else None)
            if self._ends:
                return
            self._wake.clear()
            begun = time.perf_counter()
            try:
                self.look()
            except Exception as error:
                # A fault of ours; the tenants stay as they are, and the next look may go better.
                self._log.error("tenants.crashed", exc_info=error)
            took_s = time.perf_counter() - begun

    def _tell(self, before: Collection[Problem], after: Collection[Problem]) -> None:
        for each in after:
            if each not in before:
                self._log.error("tenants.refused", file=each.file, line=each.line, reason=each.message)


class ReloadCollector(Collector):
    """Turns the watch's status into metrics at each scrape; without a folder all are 0."""

    def __init__(self, watch: TenantWatch | None) -> None:
        self._watch = watch

    def collect(self) -> Iterator[Metric]:
        """Three families without labels."""
        status = self._watch.status if self._watch else ReloadStatus(0, 0.0)
        yield GaugeMetricFamily(
            "surefoot_tenant_files_refused",
            "Tenant files that cannot be used as they are.",
            len(status.problems),
        )
        yield GaugeMetricFamily(
            "surefoot_tenants_last_success_timestamp_seconds",
            "When all tenant files were last of use.",
            status.last_success_s,
        )
        yield CounterMetricFamily(
            "surefoot_tenant_reloads", "Changes of tenant files put in force.", status.num_reloads
        )


def _count_changes(before: FolderState, after: FolderState) -> dict[str, object]:
    """How many tenants came, changed and went, and the first of their ids; empty if none did."""
    old, new = before.loaded, after.loaded
    added, removed = sorted(new.keys() - old.keys()), sorted(old.keys() - new.keys())
    changed = [
        each
        for each in new.keys() & old.keys()
        if new[each] is not old[each] and new[each].tenant != old[each].tenant
    ]
    named = [*added, *sorted(changed), *removed][:MOST_NAMED]
    counts = {"added": len(added), "changed": len(changed), "removed": len(removed)}
    return {**counts, "tenants": named} if named else {}
