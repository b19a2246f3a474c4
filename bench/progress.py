"""How far a run is: counters that the requests write and the view reads."""

from __future__ import annotations

import time
from collections import deque

RECENT = 200


class Progress:
    """Counts of the run so far. `recent_ttft_s` holds the latest ones only."""

    def __init__(self) -> None:
        self.started_at = time.perf_counter()
        self.num_running = 0
        self.num_ok = 0
        self.num_failed = 0
        self.num_chunks = 0
        self.recent_ttft_s: deque[float] = deque(maxlen=RECENT)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run's start."""
        return time.perf_counter() - self.started_at
