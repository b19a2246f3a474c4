"""Notices an engine that hangs: a step that neither returns nor fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Watchdog:
    """Calls `on_hang`, from a thread of its own, when something guarded takes longer than `limit_s`."""

    def __init__(self, limit_s: float, on_hang: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._on_hang = on_hang
        self._begun_s: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="surefoot-watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """What is done inside must be over within the limit."""
        self._begun_s = time.monotonic()
        try:
            yield
        finally:
            self._begun_s = None

    def close(self) -> None:
        """Stop watching; returns when the thread has ended."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(self._limit_s / 10):
            begun_s = self._begun_s
            if begun_s is not None and time.monotonic() - begun_s > self._limit_s:
                self._on_hang()
                return
