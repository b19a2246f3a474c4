"""How long each draft of a step should be: the lengths that bring the most tokens per second.

A step's cost depends on how many rows it has, not on whose they are, so for each total the best rows are
those most likely to be accepted. Within a draft the probabilities fall, so the likeliest rows of all drafts
are always beginnings of drafts, and one sorted list answers for every total; the best total is then the
global maximum over the list, not the first one at which the next row does not pay (costs have steps).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from msgspec import Struct

StepCost = Callable[[int], float]
"""Predicted seconds of a step in which so many draft rows are verified beside what runs anyway.

More rows take less by no more than a percent or two, where one size was measured and another one not.
"""


class Candidate(Struct, frozen=True):
    """A sequence's draft, in numbers.

    `survival[j]` is the probability that tokens 0 to j are all accepted. A row counts as `1 + min_gain` times
    less than that. The draft is cut to the length that the others' gains decide, but its first `needed`
    tokens go before them: its own promise asks for them.
    """

    survival: Sequence[float]
    needed: int = 0
    min_gain: float = 0.0


class Choice(Struct, frozen=True):
    """Draft lengths, one per candidate, and the tokens per second that they are expected to bring.

    `num_tokens` is how many the step is expected to give. `probe_s` is how much time the last rows of the
    drafts are expected to waste; 0 where all rows pay.
    """

    lengths: tuple[int, ...]
    num_tokens: float
    tokens_per_s: float
    probe_s: float = 0.0


def choose_lengths(
    candidates: Sequence[Candidate],
    num_sampled: int,
    cost: StepCost,
    *,
    max_rows: int,
    least_row_s: float = 0.0,
    max_step_s: float | None = None,
    probe_budget_s: float = 0.0,
) -> Choice:
    """The best lengths for a step in which `num_sampled` sequences get a token anyway.

    At most `max_rows` draft rows are chosen, and no step is made longer than `max_step_s` by them. Rows that
    promises need are chosen even if all together lose by them. More rows than pay are added (`_probe`) as far
    as no more than `probe_budget_s` seconds are expected to be lost by them. No row takes less than
    `least_row_s`: those that bring less than a step without drafts does in that time are not even looked at,
    but the first of each draft, which may be probed.
    """
    num_needed = _num_needed(candidates, cost)
    least = least_row_s * num_sampled / cost(0)
    rows = sorted(
        (num_needed == 0 or j >= candidate.needed, -probability / (1.0 + candidate.min_gain), i, j)
        for i, candidate in enumerate(candidates)
        for j, probability in enumerate(candidate.survival)
        if j <= candidate.needed or probability >= least
    )[:max_rows]
    expected = list(accumulate((-row[1] for row in rows), initial=float(num_sampled)))
    best, rate, limit_s = 0, 0.0, math.inf if max_step_s is None else max_step_s
    for count, tokens in enumerate(expected):
        cost_s = cost(count)
        if count and cost_s > limit_s:
            break
        if tokens / cost_s > rate or count <= num_needed:
            best, rate = count, tokens / cost_s
        elif expected[-1] / cost_s <= rate:  # not even all the tokens there are would pay for more time
            break
    best, probe_s = _probe(expected, best, rate, cost, limit_s, probe_budget_s)
    lengths = [0] * len(candidates)
    for _, _, i, _ in rows[:best]:
        lengths[i] += 1
    return Choice(tuple(lengths), expected[best], rate, probe_s)


def _probe(
    expected: Sequence[float], best: int, rate: float, cost: StepCost, limit_s: float, budget_s: float
) -> tuple[int, float]:
    """How many rows to verify to learn more than the `best` so many tell, and the seconds that are lost.

    One row more, or as many as have one rejection among them: where little is accepted a second one would
    tell nothing, and where all is, one row at a time would not tell soon what many are worth.
    """
    count, probe_s = best, 0.0
    for more in range(best + 1, len(expected)):
        cost_s = cost(more)
        loss_s = max(0.0, cost_s - expected[more] / rate)
        num_rejected = more - best - (expected[more] - expected[best])
        if cost_s > limit_s or loss_s > budget_s or (count > best and num_rejected > 1.0):
            break
        count, probe_s = more, loss_s
    return count, probe_s


def _num_needed(candidates: Sequence[Candidate], cost: StepCost) -> int:
    """Rows that promises need; 0 where they would make a longer step of which those who wait gain less."""
    needing = [candidate for candidate in candidates if candidate.needed and candidate.survival]
    if not needing:
        return 0
    count = sum(min(candidate.needed, len(candidate.survival)) for candidate in needing)
    least = min(1.0 + sum(candidate.survival[: candidate.needed]) for candidate in needing)
    return count if least * cost(0) > cost(count) else 0
