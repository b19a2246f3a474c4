"""The order of those that wait: priority, then fair shares between flows, then slack, then arrival."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.backends.engine.promise_scheduler import PromiseScheduler
from surefoot.backends.engine.scheduler_load import UnitCost, load_of, view_of

from .schedules import Driver


def one_at_a_time(**limits: Any) -> Driver:
    """A scheduler with one place."""
    return Driver(PromiseScheduler, max_sequences=1, **limits)


def starts(driver: Driver) -> list[int]:
    """The keys in the order in which they start, until all is done."""
    order: list[int] = []
    while driver.scheduler.has_work:
        order += [key for key in driver.shares() if key not in order]
    return order


def test_higher_priorities_start_first() -> None:
    """Whoever came first, and whatever else was promised."""
    driver = one_at_a_time()
    driver.add(0, 4, priority=0, ttft_target_s=0.1)
    driver.add(1, 4, priority=100)
    driver.add(2, 4, priority=200)
    assert starts(driver) == [2, 1, 0]


def test_least_slack_first_within_a_flow() -> None:
    """Targets, deadlines and the work before the first token decide; then arrival."""
    driver = one_at_a_time()
    driver.add(0, 4)
    driver.add(1, 4)
    driver.add(2, 4, ttft_target_s=30.0)
    driver.add(3, 4, deadline_s=20.0)
    driver.add(4, 50, ttft_target_s=20.0)
    assert starts(driver) == [4, 3, 2, 0, 1]


def served(driver: Driver, weights: dict[str, float], num_steps: int) -> Counter[str]:
    """Tokens of each flow in so many steps, while each has more waiting."""
    tokens: Counter[str] = Counter()
    for key in range(400):
        for number, (flow, weight) in enumerate(weights.items()):
            driver.add(1000 * number + key, 4 + 8 * number, flow=flow, weight=weight, max_tokens=6)
    for _ in range(num_steps):
        for chunk in driver.step():
            tokens[chunk.sequence.request.message.flow] += chunk.num_tokens
    return tokens


def test_flows_share_by_weight() -> None:
    """With weights of 1, 2 and 4 and requests of different sizes, tokens go as 1 to 2 to 4, within 10 %."""
    weights = {"a": 1.0, "b": 2.0, "c": 4.0}
    tokens = served(Driver(PromiseScheduler), weights, 600)
    total = sum(tokens.values())
    for flow, weight in weights.items():
        assert tokens[flow] / total == pytest.approx(weight / 7, rel=0.1)


def test_nothing_is_held_back_for_the_idle() -> None:
    """A flow that is alone gets everything, and a flow that comes back finds no credit and no debt."""
    driver = Driver(PromiseScheduler)
    for key in range(100):
        driver.add(key, 4, flow="early", max_tokens=6)
    for _ in range(60):
        assert len(driver.step()) == 4
    for key in range(100, 200):
        driver.add(key, 4, flow="late", max_tokens=6)
    tokens: Counter[str] = Counter()
    for _ in range(60):
        for chunk in driver.step():
            tokens[chunk.sequence.request.message.flow] += chunk.num_tokens
    assert tokens["late"] / sum(tokens.values()) == pytest.approx(0.5, abs=0.1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=6), st.data())
def test_shares_differ_by_a_bounded_amount(sizes: list[tuple[int, int]], data: st.DataObject) -> None:
    """Between flows that always wait, tokens per weight never differ by more than their largest requests.

    The bound is that of start-time fair queueing: one request of each flow, for every place; lengths that
    turn out as expected.
    """
    weights = [data.draw(st.sampled_from([1.0, 2.0, 5.0])) for _ in sizes]
    driver = Driver(PromiseScheduler, num_blocks=512, max_sequences=3)
    tokens = Counter[str]()
    key = 0

    def refill() -> None:
        nonlocal key
        for number, (num_prompt, num_output) in enumerate(sizes):
            waiting = [seq for seq in driver.scheduler.waiting if seq.request.message.flow == str(number)]
            if not waiting:
                driver.add(
                    key,
                    num_prompt,
                    num_output,
                    flow=str(number),
                    weight=weights[number],
                )
                key += 1

    for _ in range(150):
        refill()
        for chunk in driver.step():
            tokens[chunk.sequence.request.message.flow] += chunk.num_tokens
    shares = [tokens[str(number)] / weight for number, weight in enumerate(weights)]
    largest = [(sum(size) + 128) / weight for size, weight in zip(sizes, weights, strict=True)]
    # Places that one flow's requests hold at once, and the settling of what was charged at their start.
    assert max(shares) - min(shares) <= 2 * 3 * (max(largest) + sum(sorted(largest)[-2:]))


def test_a_preempted_sequence_settles_its_account() -> None:
    """What it was charged for and did not get is given back to its flow."""
    driver = Driver(PromiseScheduler, max_sequences=1)
    low = driver.add(0, 8, max_tokens=40, flow="a")
    driver.add(1, 8, max_tokens=40, flow="b")
    driver.step()
    driver.add(2, 4, priority=200, ttft_target_s=1.0)
    assert driver.shares() == {2: 4}
    assert low.num_preemptions == 1
    levels = {level.priority: level for level in driver.scheduler.waiting.levels}  # type: ignore[attr-defined]  # of this scheduler
    assert levels[0].flows["a"].virtual == 8


def test_a_view_says_who_waits_and_runs() -> None:
    """Running and waiting sequences with their numbers, slack until the next promise, and the backlog."""
    driver = one_at_a_time()
    driver.add(0, 20, max_tokens=10, priority=200, flow="a", tpot_target_s=0.1)
    driver.step()
    driver.add(1, 30, max_tokens=10, ttft_target_s=2.0)
    driver.clock.now_s += 0.5
    unit = UnitCost(prefill_s=0.01, output_s=0.1)
    view = view_of(driver.scheduler, load_of(driver.scheduler, unit, 1), driver.clock.now_s)
    (running,), (waiting,) = view.running, view.waiting
    assert (running.request_id, running.running, running.priority, running.flow) == ("0", True, 200, "a")
    assert (running.num_prompt_tokens, running.num_output_tokens, running.num_blocks) == (20, 1, 2)
    assert (waiting.request_id, waiting.running, waiting.num_blocks) == ("1", False, 0)
    assert waiting.age_s == 0.5
    assert waiting.slack_s == pytest.approx(1.5)
    assert view.backlog_s == pytest.approx(30 * 0.01 + 10 * 0.1)
