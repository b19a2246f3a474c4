"""Which priorities came in lately: what may come at any time needs room kept for it."""

from __future__ import annotations

import math

from msgspec import Struct

from .sequence import Sequence

MEMORY_S = 300.0
"""For so long after its last sequence a priority is expected to come again."""

NO_PRIORITY = -math.inf


class _Sight(Struct, frozen=True):
    at_s: float
    ttft_target_s: float


class Seen:
    """The last sequence of each priority, and the TTFT target that it had."""

    def __init__(self) -> None:
        self._sights: dict[int, _Sight] = {}

    def observe(self, sequence: Sequence, now_s: float) -> None:
        """A sequence came in."""
        target_s = sequence.request.message.ttft_target_s
        self._sights[sequence.priority] = _Sight(now_s, math.inf if target_s is None else target_s)

    def highest(self, now_s: float) -> float:
        """The highest priority seen lately, `NO_PRIORITY` if there was none."""
        return max((priority for priority in self._lately(now_s)), default=NO_PRIORITY)

    def tightest_ttft_s(self, priority: int, now_s: float) -> float:
        """The tightest TTFT target seen lately above this priority; infinity for none."""
        sights = self._lately(now_s).items()
        return min((sight.ttft_target_s for each, sight in sights if each > priority), default=math.inf)

    def _lately(self, now_s: float) -> dict[int, _Sight]:
        return {each: sight for each, sight in self._sights.items() if now_s - sight.at_s < MEMORY_S}
