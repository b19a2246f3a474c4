"""What was promised to a sequence, as moments on the engine's clock."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .sequence import Sequence

PATIENCE_S = 60.0
"""A sequence without a promise is ordered as if its first token were due this long after its arrival."""


BASE_SHARE = 0.7
"""Of its TPOT target, what a step may take of a sequence that is exactly on time."""
GIVEN_SHARE, PROMISED_GIVEN_SHARE = 0.2, 0.8
"""Of what it is ahead, what it gives to others, and to a prefill that was promised its first token.

Steps of exactly the target come about where a sequence is 1.5 targets ahead: that is the cushion.
"""
LEAST_SHARE, MOST_SHARE = 0.5, 2.0


def first_token_due_s(sequence: Sequence) -> float:
    """When the first token is due, or the whole answer if that is sooner; infinity for no promise."""
    request = sequence.request
    target_s = request.message.ttft_target_s
    due_s = math.inf if target_s is None else request.arrived_s + target_s
    return min(due_s, request.deadline_s)


def order_due_s(sequence: Sequence) -> float:
    """When a waiting sequence should have its first token, for the order within a flow; never infinite."""
    return min(first_token_due_s(sequence), sequence.request.arrived_s + PATIENCE_S)


def next_token_due_s(sequence: Sequence) -> float:
    """When the next token of a decoding sequence is due; infinity for no promise."""
    target_s = sequence.request.message.tpot_target_s
    if target_s is None or sequence.pace is None:
        return math.inf
    return sequence.pace.since_s + target_s * (sequence.num_output_tokens - sequence.pace.num_tokens + 1)


def slack_s(sequence: Sequence, now_s: float) -> float | None:
    """Until the next promise is broken (below 0: is broken), None if nothing was promised."""
    due_s = first_token_due_s(sequence) if sequence.num_output_tokens == 0 else next_token_due_s(sequence)
    due_s = min(due_s, sequence.request.deadline_s)
    return None if due_s == math.inf else due_s - now_s


def pace_limit_s(decoding: Iterable[Sequence], now_s: float, given_share: float = GIVEN_SHARE) -> float:
    """How long a step may take for the tightest TPOT target of those that decode; infinity without one."""
    limit_s = math.inf
    for sequence in decoding:
        target_s = sequence.request.message.tpot_target_s
        if target_s is not None:
            ahead = (next_token_due_s(sequence) - now_s) / target_s - 1
            share = min(max(BASE_SHARE + given_share * ahead, LEAST_SHARE), MOST_SHARE)
            limit_s = min(limit_s, share * target_s)
    return limit_s
