"""Demotion with the real schedulers and a model that runs instantly: every token is where it should be, in
the format it should have, and no block is lost.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.backends.engine.cache_rule import (
    BOUNDARY_TOKENS,
    FULL_NAME,
    MIXED_NAME,
    PLAN_FORMATS,
    CacheRule,
)
from surefoot.backends.engine.first_come import FirstComeScheduler
from surefoot.backends.engine.scheduler import MakeScheduler
from surefoot.backends.engine.sequence import Sequence, SequenceStatus
from surefoot.backends.types import CachePlan
from surefoot.kernels.layout import BLOCK_TOKENS

from .cache_world import PRESSED, World, carry_out, demoter_of, runs, space_of
from .schedules import SCHEDULERS, abort, preempt

PLANS = tuple(
    CachePlan(format=name, sinks=2, recent=recent, demote=demote)  # type: ignore[arg-type]
    for name in PLAN_FORMATS
    for recent in (5, 40)
    for demote in ("eager", "pressure")
)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    make=st.sampled_from(SCHEDULERS),
    num_blocks=st.integers(6, 24),
    chunk=st.none() | st.integers(1, 60),
)
def test_no_storm_loses_a_token_or_a_block(
    data: st.DataObject, make: MakeScheduler, num_blocks: int, chunk: int | None
) -> None:
    """Plans, choices, hits, ends, aborts, preemptions and demotions at random in a small cache: every query
    sees each token once, in the format that rule and position say, an estimate of what demotion frees is
    exact, every step does something, and all blocks are free at last.
    """
    world = World(make, num_blocks, **({} if chunk is None else {"max_prefill_chunk": chunk}))

    def arrive() -> None:
        length = data.draw(st.integers(1, 25 * num_blocks))
        world.add(
            [(7 * at * at + at) % 251 for at in range(data.draw(st.sampled_from([0, 0, 5])), length)] or [1],
            data.draw(st.sampled_from(PLANS)),
            n=data.draw(st.sampled_from([1, 1, 3])),
            max_tokens=data.draw(st.integers(1, 100)),
            priority=data.draw(st.integers(0, 1)),
        )

    for _ in range(data.draw(st.integers(1, 4))):
        arrive()
    for _ in range(data.draw(st.integers(0, 80))):
        if world.scheduler.has_work:
            assert world.step(), "a step did nothing although there is work"
        running = world.scheduler.running
        match data.draw(st.integers(0, 20)):
            case 0:
                arrive()
            case 1 if running:
                abort(data.draw(st.sampled_from(running)).request, world.scheduler)
            case 2 if running and isinstance(world.scheduler, FirstComeScheduler):
                preempt(data.draw(st.sampled_from(running)), world.scheduler)
            case 3 if running:
                _demote_one(world, data.draw(st.sampled_from(running)))
    while world.scheduler.has_work:
        assert world.step(), "a step did nothing although there is work"
    assert world.pool.num_used == 0
    statuses = {sequence.status for request in world.requests for sequence in request.sequences}
    assert statuses <= {SequenceStatus.FINISHED}


def _demote_one(world: World, sequence: Sequence) -> None:
    """As the scheduler does between steps when blocks are short."""
    if not sequence.is_under_pressure:
        return
    demoter = world.scheduler._demoter  # type: ignore[attr-defined]
    said, before = demoter.gain(sequence), world.pool.num_free
    demoter.reclaim([sequence], world.pool.num_blocks)
    assert world.pool.num_free - before == max(0, said)
    for move in world.scheduler.take_moves():
        world._move(move)


@pytest.mark.parametrize(
    ("name", "n"),
    [("k8v8", 1), ("k8v4", 1), ("k8v4", 3), ("mixed", 1), ("mixed", 3), ("k4v4", 1), ("k4v4", 3)],
)
def test_demotion_takes_and_frees_what_was_said(name: str, n: int) -> None:
    """The first time, when blocks are shared and found by others, and again as the text grows: with one free
    block less than was said nothing is demoted, with just so many it is, and as many are free after it.
    """
    plan = CachePlan(format=name, sinks=2, recent=5, demote="pressure")
    world = World(FirstComeScheduler, num_blocks=150, max_batched_tokens=512)
    rule = world.space.rule(plan, 1)
    assert rule is not None
    # The last block that choices may share would have two tokens of an answer.
    world.add([1] * (280 // rule.capacity * rule.capacity), plan, n=n, max_tokens=300, priority=0)
    demoter, pool = demoter_of(world), world.pool
    seen = set()
    for _ in range(3):
        for _ in range(90):
            world.step()
        for sequence in world.scheduler.running:
            taken, demoted = demoter.num_taken(sequence), sequence.num_demoted
            hog = pool.allocate(pool.num_free - taken + 1) if taken else []
            demoter.reclaim([sequence], pool.num_blocks)
            assert (sequence.num_demoted == demoted) == (taken > 0)
            pool.free(hog[:1])
            said, before = demoter.gain(sequence), pool.num_free
            demoter.reclaim([sequence], pool.num_blocks)
            assert pool.num_free - before == max(0, said)
            seen.add((demoted > 0, said > 0))
            pool.free(hog[1:])
            carry_out(world)
    assert (False, True) in seen
    assert (True, True) in seen or n > 1, "what choices share counts for none of them"


def test_choices_share_no_more_than_both_demote() -> None:
    """One that started later has fewer tokens to demote than another has demoted of their prompt: it holds
    the full blocks of those, and one of its own.
    """
    plan = CachePlan(format="k4v4", sinks=2, recent=60, demote="pressure")
    world = World(FirstComeScheduler, num_blocks=150, max_sequences=2, max_batched_tokens=512)
    world.add([1] * 300, plan, n=3, max_tokens=200, priority=0)
    for _ in range(70):
        world.step()
    first, gone, late = world.requests[0].sequences
    world.scheduler.finish(gone)
    demoter_of(world).reclaim([first], world.pool.num_blocks)
    carry_out(world)
    for _ in range(10):
        world.step()
    demoter_of(world).reclaim([late], world.pool.num_blocks)
    carry_out(world)
    assert 56 * 4 < late.num_low < 56 * 5 < first.num_low
    assert len(late.low_table) == 5
    assert [mine == its for mine, its in zip(late.low_table, first.low_table, strict=False)] == [True] * 4 + [
        False
    ]
    while world.scheduler.has_work:
        assert world.step()


def test_the_lowest_priority_is_demoted_first_and_no_more_than_must() -> None:
    """Of one priority the one that started last; each only where blocks are still wanting."""
    world = World(FirstComeScheduler, num_blocks=150, max_batched_tokens=512)
    high, early, late = runs(world, (PRESSED, 200, 1), (PRESSED, 200, 0), (PRESSED, 200, 0))
    demoter = demoter_of(world)
    done: list[Sequence] = []
    for sequence in (late, early, high):
        num_free = world.pool.num_free + demoter.gain(sequence)
        demoter.reclaim(world.scheduler.running, num_free)
        done.append(sequence)
        assert [each for each in (late, early, high) if each.num_demoted] == done
        assert [each for each in (late, early, high) if each.was_reclaimed] == done
        assert world.pool.num_free == num_free


def test_who_would_free_nothing_is_left_alone() -> None:
    """It keeps its bits, and its answer is still one that repeats."""
    world = World(FirstComeScheduler, num_blocks=150)
    (sequence,) = runs(world, (PRESSED, 20, 0))
    demoter = demoter_of(world)
    assert sequence.cache_rule is not None
    assert sequence.cache_rule.demotable(sequence.num_committed) > 0
    assert demoter.gain(sequence) <= 0
    demoter.reclaim([sequence], world.pool.num_blocks)
    assert (sequence.num_demoted, sequence.was_reclaimed) == (0, False)


def rule_of(name: str, num_prompt: int, num_blocks: int = 1000) -> CacheRule:
    """What a format means for a prompt, with the usual protection."""
    rule = space_of(num_blocks).rule(CachePlan(format=name), num_prompt)
    assert rule is not None
    return rule


def test_of_a_mixed_plans_tokens_the_latest_quarter_has_more_bits() -> None:
    """At every number of demoted tokens; and with each more, neither format has fewer than before."""
    rule = rule_of(MIXED_NAME, 100)
    splits = [rule.split(number) for number in range(3000)]
    assert all(abs(split.high - 0.25 * number) <= 0.5 for number, split in enumerate(splits))
    assert all(split.total == number for number, split in enumerate(splits))
    assert all(0 <= after.high - before.high <= 1 for before, after in pairwise(splits))


@given(
    name=st.sampled_from([name for name in PLAN_FORMATS if name != FULL_NAME]),
    num_prompt=st.integers(1, 5000),
    length=st.integers(1, 200_000),
)
def test_what_is_held_grows_with_tokens_and_no_faster(name: str, num_prompt: int, length: int) -> None:
    """A token more takes its format's share of a block, at whatever length; beside that there is no more than
    is protected or waits for the next boundary, and a block of each list that is not full.
    """
    rule, length = rule_of(name, num_prompt, num_blocks=100_000), num_prompt + length
    num_demoted = rule.num_demoted(length)
    num_held = -(-(length - num_demoted) // BLOCK_TOKENS) + rule.demoted_blocks(num_demoted).total
    beside = num_held - length * rule.blocks_per_token
    assert 0 <= beside <= (rule.sinks + rule.recent + BOUNDARY_TOKENS) / BLOCK_TOKENS + 3


@pytest.mark.parametrize(("name", "times"), [("k8v8", 1.8), ("k8v4", 2.3), (MIXED_NAME, 2.8), ("k4v4", 3.2)])
def test_a_context_of_4096_takes_so_much_less(name: str, times: float) -> None:
    """Sinks, recent window, whole blocks and the wait for the next boundary included, on average."""
    rule = rule_of(name, 4096)
    in_full = held = 0
    for length in range(4096, 4096 + 64):
        num_demoted = rule.num_demoted(length)
        in_full += -(-length // BLOCK_TOKENS)
        held += -(-(length - num_demoted) // BLOCK_TOKENS) + rule.demoted_blocks(num_demoted).total
    assert in_full >= times * held


@pytest.mark.parametrize("num_prompt", [30, 100, 171, 300])
@pytest.mark.parametrize("name", [name for name in PLAN_FORMATS if name != FULL_NAME])
def test_a_cache_of_the_peak_holds_a_sequence_to_its_end(name: str, num_prompt: int) -> None:
    """With as many blocks as admission says that it takes, one sequence is never short of any, though its
    prompt's blocks may be found by others.
    """
    plan, num_tokens = CachePlan(format=name, sinks=2, recent=40), num_prompt + 150
    rule = space_of(1000).rule(plan, num_prompt)
    assert rule is not None
    world = World(FirstComeScheduler, rule.peak(num_tokens))
    world.add(list(range(num_prompt)), plan, n=1, max_tokens=150, priority=0)
    (request,) = world.requests
    while world.scheduler.has_work:
        assert world.step()
    assert request.sequences[0].num_preemptions == 0
    assert request.sequences[0].num_output_tokens == 150
