"""What was promised to a sequence, as moments on the engine's clock."""

from __future__ import annotations

import math

from .sequence import Sequence

PATIENCE_S = 60.0
"""A sequence without a promise is ordered as if it had to start this long after its arrival."""


def first_token_due_s(sequence: Sequence) -> float:
    """When the first token is due, or the whole answer if that is sooner; infinity for no promise."""
    request = sequence.request
    target_s = request.message.ttft_target_s
    due_s = math.inf if target_s is None else request.arrived_s + target_s
    return min(due_s, request.deadline_s)


def latest_start_s(sequence: Sequence, work_s: float) -> float:
    """When a waiting sequence should start whose first token is `work_s` of work, for the order in a flow.

    Never infinite, and in the order of arrival where nothing was promised.
    """
    return min(first_token_due_s(sequence) - work_s, sequence.request.arrived_s + PATIENCE_S)


def next_token_due_s(sequence: Sequence) -> float:
    """When the next token of a decoding sequence is due; infinity for no promise."""
    target_s = sequence.request.message.tpot_target_s
    if target_s is None or sequence.pace is None:
        return math.inf
    return sequence.pace.since_s + target_s * (sequence.num_output_tokens - sequence.pace.num_tokens + 1)


def num_tokens_late(sequence: Sequence, at_s: float) -> int:
    """Tokens that a decoding sequence's TPOT target asks for by then, beside the next one."""
    target_s = sequence.request.message.tpot_target_s
    late_s = at_s - next_token_due_s(sequence)
    return 0 if target_s is None or late_s <= 0 else int(late_s / target_s)


def slack_s(sequence: Sequence, now_s: float) -> float | None:
    """Until the next promise is broken (below 0: is broken), None if nothing was promised."""
    due_s = first_token_due_s(sequence) if sequence.num_output_tokens == 0 else next_token_due_s(sequence)
    due_s = min(due_s, sequence.request.deadline_s)
    return None if due_s == math.inf else due_s - now_s
