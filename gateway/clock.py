"""Time, as something that is handed in, so that what depends on it can be tested without waiting."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where limits, overrides, observations and the usage book take the time from."""

    def monotonic(self) -> float:
        """Seconds that never go back, from an arbitrary moment on."""

    def time(self) -> float:
        """Unix time in seconds."""


class SystemClock:
    """The machine's."""

    def monotonic(self) -> float:
        """As `time.monotonic`."""
        return time.monotonic()

    def time(self) -> float:
        """As `time.time`."""
        return time.time()


class FakeClock:
    """Stands still until it is moved."""

    def __init__(self, now_s: float = 1_700_000_000.0) -> None:
        self._now_s = now_s

    def advance(self, seconds: float) -> None:
        """Let so much time pass."""
        self._now_s += seconds

    def monotonic(self) -> float:
        """The same as `time`."""
        return self._now_s

    def time(self) -> float:
        """What it was set to, and all that passed since."""
        return self._now_s
