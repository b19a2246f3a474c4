"""Whether an idle engine had better wait a moment for more of what has just come in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .sequence import Sequence

FAR_TARGET_S = 10.0
"""A TTFT target from here on counts as none."""

NUM_ARRIVALS = 8


class BatchingWindow:
    """Waits for at most `window_s`, and only where that is expected to pay.

    An idle engine that starts at once makes the next arrival wait for a step of its own, whose fixed cost is
    all that waiting can save. So `window_s` is that cost, and nothing waits unless the last arrivals came
    closer together than that. At low load they do not, and no time is added.
    """

    def __init__(self) -> None:
        self._arrivals: deque[float] = deque(maxlen=NUM_ARRIVALS)

    def observe(self, sequence: Sequence, now_s: float) -> None:
        """A sequence came in; the choices of one request count as one."""
        if sequence.choice == 0:
            self._arrivals.append(now_s)

    def wait_s(self, waiting: Iterable[Sequence], window_s: float, now_s: float) -> float:
        """Seconds to wait for more than `waiting`, with nothing running."""
        is_rare = len(self._arrivals) < NUM_ARRIVALS or now_s - self._arrivals[0] > NUM_ARRIVALS * window_s
        if is_rare or any(_is_urgent(sequence) for sequence in waiting):
            return 0.0
        oldest_s = min(sequence.request.arrived_s for sequence in waiting)
        return max(0.0, oldest_s + window_s - now_s)


def _is_urgent(sequence: Sequence) -> bool:
    message = sequence.request.message
    target_s = min(message.ttft_target_s or FAR_TARGET_S, message.deadline_s or FAR_TARGET_S)
    return target_s < FAR_TARGET_S
