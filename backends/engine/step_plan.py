"""A step while it is being planned: chunks so far, what they cost, and what the promises leave."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .cost_model import StepCost, StepShape, context_tokens
from .scheduler import ScheduledChunk
from .sequence import Sequence

MIN_PREFILL_TOKENS = 16
"""Prefill that a step has room for whatever was promised, so that prefills are never starved by decodes."""


class StepPlan:
    """Chunks within a token budget (rows) and a limit on predicted seconds.

    Every decoding sequence has a row of the budget set aside until it is planned or passed over.
    """

    def __init__(self, cost: StepCost, max_tokens: int, limit_s: float, decoding: Iterable[Sequence]) -> None:
        self._cost = cost
        self._max_tokens = max_tokens
        self._chunks: dict[Sequence, ScheduledChunk] = {}
        self._set_aside = set(decoding)
        self._shape = StepShape()
        self._num_prefill_tokens = 0
        self.limit_s = limit_s
        self.starts_blocked = False
        """Whether no more sequences may start in this step."""

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._chunks

    @property
    def chunks(self) -> list[ScheduledChunk]:
        """In the order in which they were planned."""
        return list(self._chunks.values())

    @property
    def prefill_room(self) -> int:
        """Rows of the budget that nobody decodes with."""
        return self._max_tokens - self._shape.num_rows - len(self._set_aside)

    @property
    def least_prefill(self) -> int:
        """What is left of the prefill that every step has room for."""
        return max(0, MIN_PREFILL_TOKENS - self._num_prefill_tokens)

    def narrow(self, limit_s: float) -> None:
        """From here on the step may take no longer than this."""
        self.limit_s = min(self.limit_s, limit_s)

    def fits(self, num_tokens: int, num_committed: int) -> bool:
        """Whether a chunk would keep the step within its limit."""
        if self.limit_s == math.inf:
            return True
        shape = self._shape
        return self.limit_s >= self._cost.predict(
            shape.num_rows + num_tokens,
            shape.num_sequences + 1,
            shape.num_context_tokens + context_tokens(num_tokens, num_committed),
        )

    def largest_fit(self, most: int, num_committed: int) -> int:
        """The longest chunk of at most `most` tokens that `fits`."""
        if most <= 0 or self.fits(most, num_committed):
            return max(most, 0)
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle, num_committed) else (low, middle)
        return low

    def take(self, sequence: Sequence, num_tokens: int) -> None:
        """Plan a chunk."""
        if sequence.is_decoding:
            self._set_aside.discard(sequence)
        else:
            self._num_prefill_tokens += num_tokens
        self._chunks[sequence] = ScheduledChunk(sequence, num_tokens)
        self._shape.add(num_tokens, sequence.num_committed)

    def drop(self, sequence: Sequence) -> None:
        """A sequence loses its blocks: it is not in this step. Call before they are released."""
        self._set_aside.discard(sequence)
        if (chunk := self._chunks.pop(sequence, None)) is not None:
            self._shape.remove(chunk.num_tokens, sequence.num_committed)

    def pass_over(self, sequence: Sequence) -> None:
        """A decoding sequence stands still in this step."""
        self._set_aside.discard(sequence)
