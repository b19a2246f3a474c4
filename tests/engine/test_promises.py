"""The scheduler that keeps promises: what a step takes, who stands still, who is preempted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.backends.engine.cost_model import StepCost
from surefoot.backends.engine.promise_scheduler import (
    AGEING_S,
    MAX_PREEMPTIONS,
    PAUSE_S,
    RECENT_SHARE,
    STARVING_S,
    URGENT_S,
    PromiseScheduler,
)
from surefoot.backends.engine.step_plan import MIN_PREFILL_TOKENS, MOST_SHARE
from surefoot.kernels.layout import BLOCK_TOKENS

from .schedules import COST, Driver


def driver_of(num_blocks: int = 256, **limits: object) -> Driver:
    """A roomy machine: 10 ms a step and 1 ms a row."""
    return Driver(
        PromiseScheduler,
        num_blocks=num_blocks,
        **{"max_sequences": 16, "max_batched_tokens": 512, **limits},
    )


def step_s(driver: Driver) -> float:
    """How long the next step takes."""
    begun_s = driver.clock.now_s
    driver.step()
    return driver.clock.now_s - begun_s


def test_without_targets_a_step_is_filled() -> None:
    """Prefill takes all that decodes leave of the budget."""
    driver = driver_of(max_batched_tokens=100)
    driver.add(0, 10, max_tokens=20)
    driver.step()
    driver.add(1, 500)
    assert driver.shares() == {0: 1, 1: 99}


def test_a_running_target_sizes_the_prefill_beside_it() -> None:
    """A chunk takes what the TPOT target leaves: no step exceeds what its slack allows, none is much less."""
    driver = driver_of()
    driver.add(0, 10, max_tokens=400, tpot_target_s=0.1)
    driver.step()
    driver.add(1, 3000)
    steps = [step_s(driver) for _ in range(20)]
    assert max(steps) <= MOST_SHARE * 0.1
    assert sum(steps) / len(steps) == pytest.approx(0.1, rel=0.1)


def test_a_sequence_that_is_ahead_gives_more() -> None:
    """After fast steps a sequence is ahead of its target, and the next chunk is larger than its share."""
    driver = driver_of()
    driver.add(0, 10, max_tokens=400, tpot_target_s=0.1)
    for _ in range(30):
        driver.step()
    driver.add(1, 3000)
    assert step_s(driver) == pytest.approx(MOST_SHARE * 0.1, abs=0.002)


def test_prefill_is_never_starved_by_decodes() -> None:
    """Under a target that not even the decodes keep, a prefill still gets a block's worth of each step."""
    driver = driver_of()
    for key in range(4):
        driver.add(key, 4, max_tokens=100, tpot_target_s=0.012)
        driver.step()
        driver.clock.now_s += AGEING_S
    driver.add(9, 100, max_tokens=1)
    driver.step()
    while any(seq.request.key == 9 for seq in driver.scheduler.running):
        shares = driver.shares()
        assert 0 < shares[9] <= MIN_PREFILL_TOKENS
        assert shares.keys() == {0, 1, 2, 3, 9}


def test_lower_priorities_pause_for_a_tight_target() -> None:
    """Decodes of a lower priority that do not fit the step stand still, keep their blocks, and take turns."""
    driver = driver_of()
    low = [driver.add(key, 4, max_tokens=500) for key in range(10)]
    driver.step()
    driver.add(99, 4, max_tokens=100, priority=200, tpot_target_s=0.015)
    driver.step()
    blocks = [list(seq.block_table) for seq in low]
    for _ in range(40):
        shares = driver.shares()
        assert shares[99] == 1
        assert len(shares) < 11
    assert all(seq.block_table[: len(held)] == held for seq, held in zip(low, blocks, strict=True))
    lengths = [seq.num_output_tokens for seq in low]
    assert max(lengths) - min(lengths) <= 1
    assert driver.scheduler.take_preemptions() == 0


def test_a_pause_ends() -> None:
    """Beside a target that leaves no room at all, every sequence gets a token about every second."""
    driver = driver_of()
    low = [driver.add(key, 4, max_tokens=500) for key in range(5)]
    driver.step()
    driver.add(99, 4, max_tokens=2000, priority=200, tpot_target_s=0.01101)
    before = [seq.num_output_tokens for seq in low]
    begun_s = driver.clock.now_s
    while driver.clock.now_s < begun_s + 5 * PAUSE_S:
        driver.step()
    assert all(seq.num_output_tokens >= count + 4 for seq, count in zip(low, before, strict=True))


def test_nobody_stands_still_for_what_cannot_be_kept() -> None:
    """A target below what a step of its own takes holds nobody up: others start, decode and prefill."""
    driver = driver_of()
    for key in range(3):
        driver.add(key, 4, max_tokens=50, priority=200, tpot_target_s=0.001)
    driver.step()
    driver.add(9, 200, max_tokens=50)
    assert driver.shares() == {0: 1, 1: 1, 2: 1, 9: 200}
    assert driver.shares() == {0: 1, 1: 1, 2: 1, 9: 1}


def test_a_level_that_is_kept_out_starts_one_in_time() -> None:
    """While higher priorities never leave room, a lower one starts a sequence after `AGEING_S`."""
    driver = driver_of(max_sequences=4)
    low = driver.add(0, 40, max_tokens=3)
    key = 1
    while low.num_output_tokens < 3 and driver.clock.now_s < 60:
        while len(driver.scheduler.waiting) < 6:
            driver.add(key, 10, max_tokens=5, priority=200, tpot_target_s=0.0111)
            key += 1
        driver.step()
    assert low.num_output_tokens == 3
    assert low.request.max_tokens == 3


def test_lower_priorities_do_not_start_beyond_the_pace() -> None:
    """No more start than can decode beside a running target: 10 ms and 1 ms each leave 5 within 15 ms."""
    driver = driver_of()
    driver.add(99, 4, max_tokens=1000, priority=200, tpot_target_s=0.0155)
    driver.step()
    for key in range(10):
        driver.add(key, 4, max_tokens=1000)
    for _ in range(50):
        driver.step()
    assert len(driver.scheduler.running) == 5


def test_headroom_is_kept_for_those_that_may_come() -> None:
    """Once a higher priority was seen, lower ones leave it places and blocks; before that they take all."""
    driver = driver_of(max_sequences=10, headroom=0.2)
    for key in range(20):
        driver.add(key, 4, max_tokens=10)
    driver.step()
    assert len(driver.scheduler.running) == 10
    while driver.scheduler.has_work:
        driver.step()
    driver.add(99, 4, max_tokens=1, priority=200)
    driver.step()
    for key in range(20, 40):
        driver.add(key, 4, max_tokens=10)
    driver.step()
    assert len(driver.scheduler.running) == 8
    driver.add(100, 4, priority=200)
    assert 100 in driver.shares()


def test_steps_stay_short_for_those_that_may_come() -> None:
    """After a TTFT target was seen, no step below it takes longer than `RECENT_SHARE` of it."""
    driver = driver_of()
    driver.add(99, 4, max_tokens=1, priority=200, ttft_target_s=0.4)
    driver.step()
    driver.add(0, 2000)
    assert step_s(driver) == pytest.approx(RECENT_SHARE * 0.4, abs=0.002)


def test_a_promise_takes_a_place_by_preemption_at_last() -> None:
    """With every place taken a promised first token preempts the lowest priority's latest start, once."""
    driver = driver_of(max_sequences=3)
    first, _, third = (driver.add(key, 4, max_tokens=50, priority=key // 2) for key in range(3))
    driver.step()
    driver.step()
    driver.add(8, 4, priority=200)
    assert 8 not in driver.shares()
    driver.add(9, 4, max_tokens=50, priority=200, ttft_target_s=0.5)
    assert 9 in driver.shares()
    assert (first.num_preemptions, third.num_preemptions) == (0, 0)
    assert [seq.request.key for seq in driver.scheduler.waiting] == [8, 1]


def test_preemption_waits_until_a_first_token_is_nearly_due() -> None:
    """With time left a promised sequence waits for a place, and takes one only when its start is due."""
    driver = driver_of(max_sequences=1)
    low = driver.add(0, 4, max_tokens=500)
    driver.step()
    driver.add(9, 4, priority=200, ttft_target_s=3.0)
    begun_s = driver.clock.now_s
    while 9 not in driver.shares():
        assert driver.clock.now_s - begun_s < 3.0
    assert driver.clock.now_s - begun_s > 3.0 - URGENT_S
    assert low.num_preemptions == 1


def test_a_promise_leaves_headroom_to_higher_ones() -> None:
    """A middle priority that is due preempts a lower one rather than take what is kept for the highest."""
    driver = driver_of(max_sequences=10, headroom=0.2)
    driver.add(99, 4, max_tokens=1, priority=200)
    driver.step()
    for key in range(8):
        driver.add(key, 4, max_tokens=100)
    driver.step()
    driver.add(50, 4, max_tokens=100, priority=100, ttft_target_s=0.5)
    driver.step()
    assert len(driver.scheduler.running) == 8
    assert [seq.request.key for seq in driver.scheduler.waiting] == [7]


def test_nobody_is_preempted_for_ever() -> None:
    """A sequence that lost its place `MAX_PREEMPTIONS` times keeps it against any promise."""
    driver = driver_of(max_sequences=1)
    low = driver.add(0, 4, max_tokens=50)
    for key in range(1, 20):
        while low not in driver.scheduler.running:
            driver.step()
        driver.add(key, 4, max_tokens=2, priority=200, ttft_target_s=0.5)
        driver.step()
    assert low.num_preemptions == MAX_PREEMPTIONS


def test_growth_is_reserved_for_at_the_start() -> None:
    """A sequence starts only beside room for what is expected of it and of those that run."""
    driver = driver_of(num_blocks=10)
    for key in range(4):
        driver.add(key, 2 * BLOCK_TOKENS, max_tokens=2 * BLOCK_TOKENS)
    driver.step()
    assert len(driver.scheduler.running) == 2
    while driver.scheduler.has_work:
        driver.step()
    assert driver.scheduler.take_preemptions() == 0


def test_the_oldest_goes_on_in_a_full_cache() -> None:
    """Answers that outgrow what was expected fill the cache; the oldest never stands still, and all end."""
    driver = driver_of(num_blocks=6)
    for key in range(3):
        driver.add(key, 4, max_tokens=1)
    while driver.scheduler.has_work:
        driver.step()
    sequences = [driver.add(10 + key, 4, max_tokens=5 * BLOCK_TOKENS) for key in range(3)]
    oldest_done = 0
    while driver.scheduler.has_work:
        shares = driver.shares()
        if sequences[0] in driver.scheduler.running:
            assert 10 in shares
            oldest_done += 1
    assert oldest_done >= 5 * BLOCK_TOKENS - 1
    assert max(seq.num_preemptions for seq in sequences) <= MAX_PREEMPTIONS + 1


def test_a_starving_level_is_waited_for_at_last() -> None:
    """One that finds no blocks beside a stream of higher priorities gets them after `STARVING_S`."""
    driver = driver_of(num_blocks=10, max_sequences=4)
    low = driver.add(0, 120, max_tokens=2)
    key = 1
    while low.num_output_tokens < 2 and driver.clock.now_s < 2 * STARVING_S:
        while len(driver.scheduler.waiting) < 4:
            driver.add(key, 20, max_tokens=28, priority=200)
            key += 1
        driver.step()
    assert low.num_output_tokens == 2
    assert driver.clock.now_s > STARVING_S


def test_lower_priorities_take_no_blocks_that_a_higher_one_waits_for() -> None:
    """As long as a sequence waits for blocks nothing below it starts, though there is room for that."""
    driver = driver_of(num_blocks=10)
    driver.add(0, 6 * BLOCK_TOKENS - 8, max_tokens=6)
    driver.step()
    driver.add(1, 6 * BLOCK_TOKENS - 1, max_tokens=1, priority=200)
    driver.add(2, 4, max_tokens=1)
    for _ in range(5):
        assert driver.shares() == {0: 1}
    assert 1 in driver.shares()


def test_preemptions_for_blocks_are_bounded() -> None:
    """Where higher priorities outgrow the cache again and again, the lowest is preempted for them at most
    `MAX_PREEMPTIONS` times, and then goes before them.
    """
    driver = driver_of(num_blocks=12)
    low = driver.add(0, 3 * BLOCK_TOKENS, max_tokens=6 * BLOCK_TOKENS)
    key = 1
    while low.num_output_tokens < 6 * BLOCK_TOKENS and key < 5000:
        if not any(seq.priority for seq in (*driver.scheduler.running, *driver.scheduler.waiting)):
            # Most are short, so that a long answer is not expected.
            for _ in range(19):
                driver.add(key, 4, max_tokens=1, priority=200)
                key += 1
            driver.add(key, 7 * BLOCK_TOKENS - 4, max_tokens=40, priority=200)
            key += 1
        driver.step()
    assert low.num_output_tokens == 6 * BLOCK_TOKENS
    assert low.num_preemptions == MAX_PREEMPTIONS


@pytest.mark.parametrize("priority", [200, 300])
def test_a_promise_takes_no_place_from_its_equals_or_betters(priority: int) -> None:
    """However near a first token is due, only lower priorities are preempted for it."""
    driver = driver_of(max_sequences=1)
    running = driver.add(0, 4, max_tokens=50, priority=priority)
    driver.step()
    driver.add(1, 4, max_tokens=1, priority=200, ttft_target_s=0.5)
    for _ in range(20):
        assert driver.shares() == {0: 1}
    assert running.num_preemptions == 0


def test_a_preempted_flow_keeps_its_account() -> None:
    """A flow that was served alone and then preempted comes after one of its level that came meanwhile."""
    driver = driver_of(max_sequences=1)
    driver.add(0, 40, max_tokens=50, flow="served")
    driver.step()
    driver.add(1, 4, max_tokens=1, priority=200, ttft_target_s=0.5)
    driver.step()
    driver.add(2, 4, max_tokens=1, flow="new")
    assert set(driver.shares()) == {2}


def test_a_due_first_token_makes_those_below_stand_still() -> None:
    """A promised first token may take half of the time until it is due: decodes below it wait for that."""
    driver = driver_of()
    for key in range(12):
        driver.add(key, 4, max_tokens=50)
    driver.step()
    driver.add(99, 30, priority=200, ttft_target_s=0.4)
    driver.clock.now_s += 0.3
    shares = driver.shares()
    assert shares[99] == 30
    assert len(shares) == 1 + 10
    assert driver.scheduler.take_preemptions() == 0


def test_a_promise_does_not_cut_its_own_prompt() -> None:
    """What is kept for those of its priority that may come limits lower ones alone."""
    driver = driver_of()
    driver.add(0, 400, max_tokens=1, priority=200, ttft_target_s=0.5)
    assert driver.shares() == {0: 400}
    driver.add(1, 400, max_tokens=1, priority=200, ttft_target_s=0.5)
    assert driver.shares() == {1: 400}


def batch_arrivals(driver: Driver, count: int, gap_s: float) -> None:
    """Arrivals that an idle engine would have served one by one."""
    for key in range(count):
        driver.clock.now_s += gap_s
        driver.add(key, 4)


def test_a_burst_is_waited_for_as_long_as_a_step_costs() -> None:
    """An idle engine into which batch work pours waits for more, at most a step's fixed cost."""
    driver = driver_of()
    batch_arrivals(driver, 10, 0.0001)
    assert 0 < driver.scheduler.wait_s() <= COST.predict(1, 1, 1)
    assert driver.scheduler.schedule() == []
    driver.clock.now_s += driver.scheduler.wait_s()
    assert driver.scheduler.wait_s() == 0
    assert len(driver.scheduler.schedule()) == 10


def test_nothing_is_waited_for_at_low_load() -> None:
    """With arrivals further apart than a step's cost, or only few of them, nothing waits."""
    driver = driver_of()
    for key in range(30):
        driver.clock.now_s += 0.02
        driver.add(key, 4, max_tokens=1)
        assert driver.scheduler.wait_s() == 0
        driver.step()
    fresh = driver_of()
    batch_arrivals(fresh, 3, 0.0)
    assert fresh.scheduler.wait_s() == 0


@pytest.mark.parametrize("promised", [{"ttft_target_s": 1.0}, {"deadline_s": 1.0}])
def test_a_tighter_class_ends_the_wait(promised: dict[str, float]) -> None:
    """As soon as somebody with a near target waits too, nothing waits."""
    driver = driver_of()
    batch_arrivals(driver, 10, 0.0001)
    assert driver.scheduler.wait_s() > 0
    driver.add(99, 4, **promised)
    assert driver.scheduler.wait_s() == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=12),
    st.floats(0.02, 0.3),
    st.integers(1, 12),
)
def test_a_target_that_can_be_kept_is_kept(others: list[tuple[int, int]], target_s: float, room: int) -> None:
    """Whatever arrives beside it at lower priority, a sequence's mean TPOT stays within a target that its own
    steps and the least prefill leave room for, and no step exceeds the share that slack may give."""
    cost = StepCost(fixed_s=target_s / 4, row_s=target_s / 100, further_row_s=target_s / 100)
    driver = driver_of(cost=cost, max_sequences=room + 1)
    promised = driver.add(99, 4, max_tokens=60, priority=200, tpot_target_s=target_s)
    driver.step()
    begun_s = driver.clock.now_s
    for key, (num_prompt, max_tokens) in enumerate(others):
        driver.add(key, num_prompt, max_tokens)
    while promised in driver.scheduler.running:
        assert step_s(driver) <= MOST_SHARE * target_s * 1.001
    assert (driver.clock.now_s - begun_s) / 59 <= target_s
