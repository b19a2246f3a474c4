"""A step while it is being planned: chunks so far, what they cost, and what the promises leave."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from .cost_model import StepCost, StepShape, context_tokens
from .promise import next_token_due_s
from .scheduler import ScheduledChunk
from .sequence import Sequence

BASE_SHARE = 0.7
"""Of its TPOT target, what a step may take of a sequence that is exactly on time."""
GIVEN_SHARE, PROMISED_GIVEN_SHARE = 0.2, 0.8
"""Of what it is ahead, what it gives to others, and to a prefill that was promised its first token.

Steps of exactly the target come about where a sequence is 1.5 targets ahead: that is the cushion.
"""
LEAST_SHARE, MOST_SHARE = 0.5, 2.0

MIN_PREFILL_TOKENS = 16
"""Prefill that a step has room for whatever its decodes were promised, so that they never starve it."""


def tpot_target_s(sequence: Sequence, cost: StepCost) -> float | None:
    """A sequence's TPOT target, None for no promise.

    One that not even a step of its own could keep counts as none: nobody should stand still for it in vain.
    """
    target_s = sequence.request.message.tpot_target_s
    if target_s is None or cost.predict(1, 1, len(sequence.token_ids)) > target_s:
        return None
    return target_s


def pace_limit_s(
    decoding: Iterable[Sequence], cost: StepCost, now_s: float, given_share: float = GIVEN_SHARE
) -> float:
    """How long a step may take for the tightest TPOT target of those that decode; infinity without one."""
    limit_s = math.inf
    for sequence in decoding:
        target_s = tpot_target_s(sequence, cost)
        if target_s is not None:
            ahead = (next_token_due_s(sequence) - now_s) / target_s - 1
            share = min(max(BASE_SHARE + given_share * ahead, LEAST_SHARE), MOST_SHARE)
            limit_s = min(limit_s, share * target_s)
    return limit_s


class StepPlan:
    """Chunks within a token budget (rows) and a limit on predicted seconds.

    Every decoding sequence has a row of the budget set aside until it is planned or passed over.
    """

    def __init__(self, cost: StepCost, max_tokens: int, decoding: Collection[Sequence], now_s: float) -> None:
        self._cost = cost
        self._max_tokens = max_tokens
        self._chunks: dict[Sequence, ScheduledChunk] = {}
        self._set_aside = set(decoding)
        self._shape = StepShape()
        self._num_prefill_tokens = 0
        self._limit_s = pace_limit_s(decoding, cost, now_s)
        self._promised_limit_s = pace_limit_s(decoding, cost, now_s, PROMISED_GIVEN_SHARE)
        """What the step may take, for prefills and for those that were promised their first token."""
        self._pause_limit_s = math.inf
        """What it may take for decodes: only promises to higher priorities make them stand still."""
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
        """What is left of the prefill that a step has room for whatever the limit.

        Nothing where the limit is the promise of a higher priority.
        """
        return max(0, MIN_PREFILL_TOKENS - self._num_prefill_tokens) if self._pause_limit_s == math.inf else 0

    def narrow(self, limit_s: float) -> None:
        """From here on the step's prefills may take no longer than this."""
        self._limit_s = min(self._limit_s, limit_s)
        self._promised_limit_s = min(self._promised_limit_s, limit_s)

    def bind(self, limit_s: float) -> None:
        """From here on the step may take no longer than this: it was promised to those planned so far."""
        self.narrow(limit_s)
        self._pause_limit_s = min(self._pause_limit_s, limit_s)

    def decode_fits(self, sequence: Sequence) -> bool:
        """Whether a decoding sequence leaves the promises of higher priorities alone."""
        return self._fits(1, sequence.num_committed, self._pause_limit_s)

    def has_time(self, sequence: Sequence) -> bool:
        """Whether there is time for any of a sequence's prefill."""
        return self.least_prefill > 0 or self.largest_prefill(sequence, 1) == 1

    def largest_prefill(self, sequence: Sequence, most: int) -> int:
        """The longest chunk of at most `most` tokens that keeps the step within its limit."""
        is_promised = sequence.request.message.ttft_target_s is not None
        limit_s = self._promised_limit_s if is_promised else self._limit_s
        if most <= 0 or self._fits(most, sequence.num_committed, limit_s):
            return max(most, 0)
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._fits(middle, sequence.num_committed, limit_s)
            low, high = (middle, high) if fits else (low, middle)
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

    def _fits(self, num_tokens: int, num_committed: int, limit_s: float) -> bool:
        if limit_s == math.inf:
            return True
        shape = self._shape
        return limit_s >= self._cost.predict(
            shape.num_rows + num_tokens,
            shape.num_sequences + 1,
            shape.num_context_tokens + context_tokens(num_tokens, num_committed),
        )
