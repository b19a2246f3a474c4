"""How many blocks a sequence will want: enough to start it without preempting it, or others, soon."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .output_lengths import OutputLengths
from .prefix_cache import PrefixCache
from .sequence import Sequence

EXPECTED_PART = 0.5
"""Of the output that is expected, what must find room at a start: others end before all of it has come."""


class BlockDemand:
    """Admission on expected length plus a reserve, over a pool."""

    def __init__(self, blocks: PrefixCache, lengths: OutputLengths) -> None:
        self._blocks = blocks
        self._pool = blocks.pool
        self._lengths = lengths

    def fits_now(self, sequence: Sequence) -> bool:
        """Whether all that a sequence has so far finds room."""
        return self._blocks.num_blocks_wanted(sequence) <= self._pool.num_free

    def fits(self, sequence: Sequence, running: Iterable[Sequence], num_reserved: int) -> bool:
        """Whether it finds room with a part of its output, beside what those that run will still want."""
        output = math.ceil(EXPECTED_PART * self._lengths.remaining(sequence))
        wanted = min(self._blocks.num_blocks_wanted(sequence, output), self._pool.num_blocks)
        return wanted + self._growth(running) + num_reserved <= self._pool.num_free

    def _growth(self, running: Iterable[Sequence]) -> int:
        """Blocks that those that run will want beyond what they have."""
        blocks = 0
        for sequence in running:
            output = EXPECTED_PART * self._lengths.remaining(sequence)
            blocks += max(sequence.blocks_missing(sequence.num_uncommitted + math.ceil(output)), 0)
        return blocks
