"""How long each draft of a step should be: the lengths that bring the most tokens per second.

A step's cost depends on how many rows it has, not on whose they are, so for each total the best rows are
those most likely to be accepted. Within a draft the probabilities fall, so the likeliest rows of all drafts
are always beginnings of drafts, and one sorted list answers for every total; the best total is then the
global maximum over the list, not the first one at which the next row does not pay (costs have steps).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from msgspec import Struct

StepCost = Callable[[int], float]
"""Predicted seconds of a step in which so many draft rows are verified beside what runs anyway.

More rows never take less.
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

    `num_tokens` is how many the step is expected to give. `probe_s` is how much time the last row of the
    drafts is expected to waste; 0 where all rows pay.
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
    promises need are chosen even if all together lose by them. One row more than pays is added if no more
    than `probe_budget_s` seconds are expected to be lost by it. No row takes less than `least_row_s`: those
    that bring less than a step without drafts does in that time are not even looked at, but the first of each
    draft, which may be probed.
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
    costs: list[float] = []
    best, rate, probe_s = 0, 0.0, 0.0
    for count, tokens in enumerate(expected):
        cost_s = cost(count)
        if count and max_step_s is not None and cost_s > max_step_s:
            break
        costs.append(cost_s)
        if tokens / cost_s > rate or count <= num_needed:
            best, rate = count, tokens / cost_s
        elif expected[-1] / cost_s <= rate:  # not even all the tokens there are would pay for more time
            break
    if best + 1 < len(costs):
        loss_s = max(0.0, costs[best + 1] - expected[best + 1] / rate)
        if loss_s <= probe_budget_s:
            best, probe_s = best + 1, loss_s
    lengths = [0] * len(candidates)
    for _, _, i, _ in rows[:best]:
        lengths[i] += 1
    return Choice(tuple(lengths), expected[best], rate, probe_s)


def _num_needed(candidates: Sequence[Candidate], cost: StepCost) -> int:
    """Rows that promises need; 0 where they would make a longer step of which those who wait gain less."""
    needing = [candidate for candidate in candidates if candidate.needed and candidate.survival]
    if not needing:
        return 0
    count = sum(min(candidate.needed, len(candidate.survival)) for candidate in needing)
    least = min(1.0 + sum(candidate.survival[: candidate.needed]) for candidate in needing)
    return count if least * cost(0) > cost(count) else 0
