"""How long drafts get to be: the best lengths, learning, and never being worse than the best fixed one."""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.backends.engine.sequence import Sequence
from surefoot.backends.engine.speculation.acceptance import Acceptance
from surefoot.backends.engine.speculation.base import Draft, strength_of_match
from surefoot.backends.engine.speculation.controller import Controller, StepBounds
from surefoot.backends.engine.speculation.lengths import Candidate, choose_lengths
from surefoot.backends.engine.speculation.settings import SpeculationSettings

from .sequences import sequence


def draft_of(length: int, match: int = 4) -> Draft:
    """A draft of an n-gram's strengths."""
    return Draft("ngram", (0,) * length, tuple(strength_of_match(match + j) for j in range(length)))


def tokens_per_s(
    survivals: list[list[float]], lengths: tuple[int, ...], base: int, cost: list[float]
) -> float:
    """What lengths are expected to bring."""
    expected = base + sum(sum(each[:length]) for each, length in zip(survivals, lengths, strict=True))
    return expected / cost[sum(lengths)]


@given(
    chances=st.lists(st.lists(st.floats(0.05, 0.99), max_size=3), min_size=1, max_size=3),
    jumps=st.lists(st.floats(0.0, 0.5), min_size=10, max_size=10),
)
def test_lengths_are_the_best_there_are(chances: list[list[float]], jumps: list[float]) -> None:
    """No other lengths bring more tokens per second, whatever steps the cost has."""
    survivals = []
    for each in chances:
        together, survival = 1.0, []
        for chance in each:
            together *= chance
            survival.append(together)
        survivals.append(survival)
    cost = [1.0]
    for jump in jumps:
        cost.append(cost[-1] + jump)
    base = len(survivals)
    choice = choose_lengths([Candidate(each) for each in survivals], base, cost.__getitem__, max_rows=9)
    best = max(
        tokens_per_s(survivals, lengths, base, cost)
        for lengths in product(*(range(len(each) + 1) for each in survivals))
    )
    assert choice.tokens_per_s == pytest.approx(best)
    assert tokens_per_s(survivals, choice.lengths, base, cost) == pytest.approx(best)


def test_bounds_are_kept() -> None:
    """Rows and step time are bounded, however much more would pay."""
    candidates = [Candidate([0.99] * 8), Candidate([0.98] * 8)]
    by_rows = choose_lengths(candidates, 2, lambda count: 1.0, max_rows=5)
    assert sum(by_rows.lengths) == 5
    by_time = choose_lengths(candidates, 2, lambda count: 1.0 + 0.01 * count, max_rows=16, max_step_s=1.035)
    assert sum(by_time.lengths) == 3


def test_what_a_promise_needs_comes_first() -> None:
    """Rows that a sequence's own target needs go before likelier ones of others."""
    candidates = [Candidate([0.9] * 4), Candidate([0.5] * 4, needed=2)]
    assert choose_lengths(candidates, 2, lambda count: 1.0, max_rows=3).lengths == (1, 2)


def test_min_gain_holds_back() -> None:
    """A plan's min_gain asks for that much more than a bare gain."""
    cost = [1.0, 1.15, 9.0].__getitem__
    assert choose_lengths([Candidate([0.2])], 1, cost, max_rows=2).lengths == (1,)
    assert choose_lengths([Candidate([0.2], min_gain=0.5)], 1, cost, max_rows=2).lengths == (0,)


def test_a_full_window_says_at_least() -> None:
    """Windows accepted to their end never lower an estimate, be they of one token or of eight."""
    acceptance, seq = Acceptance(), sequence([1])
    for _ in range(200):
        acceptance.observe(seq, draft_of(1), 1)
    short = acceptance.survival(seq, draft_of(1))[0]
    assert short > 0.95
    for _ in range(200):
        acceptance.observe(seq, draft_of(8), 8)
    assert acceptance.survival(seq, draft_of(1))[0] >= short


def test_estimates_meet_the_truth() -> None:
    """A rate is learnt alike from windows of any length."""
    for length, rate in product((1, 3, 8), (0.2, 0.5, 0.9)):
        acceptance, seq, rng = Acceptance(), sequence([1]), random.Random(length)
        for _ in range(1500):
            accepted = next((j for j in range(length) if rng.random() > rate), length)
            acceptance.observe(seq, draft_of(length), accepted)
        fresh = sequence([2])
        assert acceptance.survival(fresh, draft_of(1))[0] == pytest.approx(rate, abs=0.1)


def test_flows_and_kinds_learn_apart() -> None:
    """What one tenant's drafts are worth says nothing of another's, nor of another kind of traffic."""
    acceptance = Acceptance()
    for _ in range(300):
        acceptance.observe(sequence([1], flow="a", kind="chat"), draft_of(2), 2)
    good, other_flow, other_kind = (
        acceptance.survival(sequence([1], flow=flow, kind=kind), draft_of(1))[0]
        for flow, kind in (("a", "chat"), ("b", "chat"), ("a", "edit"))
    )
    assert good > 0.9
    assert other_flow == other_kind == acceptance.survival(sequence([1], flow="c"), draft_of(1))[0] < 0.8


def step_cost(num_rows: int) -> float:
    """Seconds of a step on a machine where 8 rows cost less than twice what 1 does."""
    points = ((1, 9.7), (8, 16.3), (32, 42.5), (64, 78.0), (576, 700.0))
    for (low, below), (high, above) in pairwise(points):
        if num_rows <= high:
            return (below + (above - below) * (num_rows - low) / (high - low)) / 1000
    raise AssertionError("a step has at most 576 rows")


class Traffic:
    """Sequences whose draft tokens are each accepted with a given probability."""

    def __init__(self, batch: int, controller: Controller) -> None:
        self.controller = controller
        self.rng = random.Random(batch)
        self.sequences: list[Sequence] = [sequence([1]) for _ in range(batch)]

    def run(self, rate: float, num_steps: int) -> float:
        """Tokens per second over so many steps."""
        batch, tokens, seconds = len(self.sequences), 0, 0.0
        bounds = StepBounds(num_sampled=batch, max_rows=512)
        for _ in range(num_steps):
            drafts = [(seq, draft_of(self.controller.max_tokens(seq))) for seq in self.sequences]
            drafts = [(seq, draft) for seq, draft in drafts if len(draft)]
            choice = self.controller.choose(drafts, bounds, lambda count: step_cost(batch + count))
            tokens += batch
            seconds += step_cost(batch + sum(choice.lengths))
            for (seq, draft), length in zip(drafts, choice.lengths, strict=True):
                accepted = next((j for j in range(length) if self.rng.random() > rate), length)
                tokens += accepted
                if length:
                    self.controller.acceptance.observe(seq, draft.cut(length), accepted)
        return tokens / seconds


def best_fixed(rate: float, batch: int) -> float:
    """Tokens per second of the best of the fixed lengths, none included."""
    return max(
        batch * sum(rate**j for j in range(length + 1)) / step_cost(batch * (1 + length))
        for length in (0, 1, 2, 3, 4, 6, 8)
    )


@pytest.mark.parametrize("batch", [1, 4, 16, 32])
def test_never_much_below_the_best_fixed_length(batch: int) -> None:
    """At any acceptance and batch size the controller brings at least 0.95 of the best fixed length's tokens.

    The table over all batch sizes, with its means over many seeds, is the benchmark's.
    """
    for tenths in range(0, 11, 2):
        traffic = Traffic(batch, Controller(SpeculationSettings()))
        assert traffic.run(tenths / 10, 100 + 2000 // batch) >= 0.95 * best_fixed(tenths / 10, batch)


def test_acceptance_comes_back_after_a_ceiling() -> None:
    """When load forces drafts to none and lets go, tokens per second are back within noise."""
    controller = Controller(SpeculationSettings())
    traffic = Traffic(4, controller)
    before = traffic.run(0.9, 300)
    controller.ceiling = 0
    during = traffic.run(0.9, 300)
    assert during == pytest.approx(4 / step_cost(4))
    controller.ceiling = 8
    assert traffic.run(0.9, 300) >= 0.97 * before


def test_given_up_is_not_for_good() -> None:
    """After a long time of useless drafts, good ones are noticed and used again."""
    traffic = Traffic(8, Controller(SpeculationSettings()))
    traffic.run(0.0, 2000)
    traffic.run(0.95, 2500)
    assert traffic.run(0.95, 300) >= 0.95 * best_fixed(0.95, 8)


def test_probing_is_bounded() -> None:
    """Drafts that never pay cost no more than the share of time that probing may take."""
    traffic = Traffic(16, Controller(SpeculationSettings(probe_share=0.005)))
    traffic.run(0.0, 200)
    assert traffic.run(0.0, 2000) >= (1 - 0.006) * 16 / step_cost(16)


def test_a_draft_ends_before_the_last_token() -> None:
    """No draft is longer than what may follow it, the plan and the ceiling."""
    controller = Controller(SpeculationSettings(max_draft=6))
    assert controller.max_tokens(sequence([1], max_draft=4)) == 4
    assert controller.max_tokens(sequence([1], max_draft=9)) == 6
    assert controller.max_tokens(sequence([1], [2, 3], max_tokens=5)) == 2
    assert controller.max_tokens(sequence([1], [2, 3, 4, 5], max_tokens=5)) == 0
