"""Demotion with the real schedulers and a model that runs instantly: every token is where it should be, in
the format it should have, and no block is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from surefoot.backends.engine.block_pool import BlockPool
from surefoot.backends.engine.cache_rule import (
    BOUNDARY_TOKENS,
    FULL_NAME,
    MIXED_NAME,
    PLAN_FORMATS,
    CacheRule,
    CacheSpace,
)
from surefoot.backends.engine.cost_model import CostModel
from surefoot.backends.engine.demotion import Demoter, Move, Places
from surefoot.backends.engine.first_come import FirstComeScheduler
from surefoot.backends.engine.prefix_cache import PrefixCache
from surefoot.backends.engine.promise_scheduler import PromiseScheduler
from surefoot.backends.engine.scheduler import MakeScheduler, ScheduledChunk
from surefoot.backends.engine.sequence import Request, Sequence, SequenceStatus
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.engine.simulator import VirtualClock
from surefoot.backends.types import CachePlan, GenerateRequest, SamplingParams, ServingPlan, TokenPrompt
from surefoot.kernels.layout import BLOCK_TOKENS, FORMATS, FULL, BlockLayout, CacheFormat

from .schedules import SCHEDULERS, abort, advance, enter, preempt

LAYOUT = BlockLayout(num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
PLANS = tuple(
    CachePlan(format=name, sinks=2, recent=recent, demote=demote)  # type: ignore[arg-type]
    for name in PLAN_FORMATS
    for recent in (5, 40)
    for demote in ("eager", "pressure")
)

Content = tuple[int, object]
"""A token with all before it, and what its K and V depend on beside them: None for nothing."""


def space_of(num_blocks: int) -> CacheSpace:
    """A cache for contexts of any length that fits."""
    return CacheSpace(layout=LAYOUT, num_layers=1, num_blocks=num_blocks, max_context=4096)


class World:
    """Scheduler, demotion, pool and prefix cache as the engine joins them. A slot's content is its token."""

    def __init__(self, make: MakeScheduler, num_blocks: int, **limits: int) -> None:
        self.clock = VirtualClock()
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool, between_requests=True)
        self.space = space_of(num_blocks)
        limits = {"max_sequences": 5, "max_batched_tokens": 100, **limits}
        self.scheduler = make(EngineSettings(cache_bytes=1, **limits), self.cache, CostModel(), self.clock)
        self.requests: list[Request] = []
        self.slots: dict[tuple[int, int], tuple[CacheFormat, Content]] = {}
        self.made: dict[tuple[Sequence, int], list[object]] = {}
        """What each committed token depends on beside those before it, by the sequence's start."""
        self.chains: dict[Sequence, list[int]] = {}
        self.checked: dict[Sequence, tuple[int, int, int]] = {}
        """When each sequence was looked at last."""

    def add(self, prompt: list[int], plan: CachePlan, *, n: int, max_tokens: int, priority: int) -> None:
        """Queue a request, if it fits the whole cache."""
        if self.space.longest(plan, len(prompt)) < len(prompt) + max_tokens:
            return
        message = GenerateRequest(
            request_id="",
            model="",
            prompt=TokenPrompt(tuple(prompt)),
            params=SamplingParams(n=n),
            plan=ServingPlan(name="p", cache=plan),
            priority=priority,
        )
        request = Request(
            message, tuple(prompt), key=len(self.requests), max_tokens=max_tokens, seed=0, arrived_s=0.0
        )
        request.cache_rule = self.space.rule(plan, len(prompt))
        self.requests.append(request)
        enter(request, self.cache, self.scheduler)

    def step(self) -> int:
        """One step; returns how many tokens ran."""
        self.clock.now_s += self.scheduler.wait_s()
        chunks = self.scheduler.schedule()
        self.clock.now_s += 0.01
        for move in self.scheduler.take_moves():
            self._move(move)
        for chunk in chunks:
            self._check(chunk.sequence)
            self._write(chunk)
        for chunk in chunks:
            sequence = chunk.sequence
            advance(chunk, len(set(sequence.token_ids[-5:])) + sequence.choice, self.cache, self.scheduler)
        self.pool.check_integrity()
        self._check_holders()
        return sum(chunk.num_tokens for chunk in chunks)

    def _move(self, move: Move) -> None:
        read = [self.slots[place] for place in _places(move.source)]
        assert len(set(_places(move.target))) == len(read)
        for (cache_format, content), place in zip(read, _places(move.target), strict=True):
            assert cache_format == move.source.format
            assert FORMATS.index(move.target.format) >= FORMATS.index(cache_format), "bits came back"
            assert place[0] not in self.pool._keys, "a published block was written"
            self.slots[place] = move.target.format, content

    def _check(self, sequence: Sequence) -> None:
        """What its queries are about to see."""
        rule, made = sequence.cache_rule, self.made.setdefault((sequence, sequence.start_number), [])
        count = sequence.num_committed
        made += [None] * (count - len(made))
        moment = sequence.start_number, sequence.num_demoted, count // 32
        if self.checked.get(sequence) == moment:
            return
        self.checked[sequence], chain = moment, self._chain(sequence)
        shared = sequence.request.key if sequence.request.message.plan.cache.demote == "pressure" else None
        for position, (cache_format, place) in enumerate(_where(sequence)):
            found_format, (token, dependence) = self.slots[place]
            assert (found_format, token) == (cache_format, chain[position])
            # Choices of a prompt may share what one of them computed after it had demoted under pressure.
            assert dependence in (made[position], shared)
        if rule is not None and rule.eager:
            assert sequence.num_demoted == rule.num_demoted(count)
            assert all(dependence is None for dependence in made[: rule.first_demotion])
        if rule is not None and sequence.num_demoted:
            assert sequence.num_low == rule.split(sequence.num_demoted).low
            assert sequence.num_demoted <= max(0, count - rule.sinks - rule.recent)
        assert sequence.num_blocks <= self.pool.num_blocks

    def _chain(self, sequence: Sequence) -> list[int]:
        """For each token a number for it, those before it, and whether keys are stored rotated."""
        numbers = self.chains.setdefault(sequence, [])
        for token in sequence.token_ids[len(numbers) :]:
            numbers.append(hash((numbers[-1] if numbers else sequence.cache_rule is None, token)))
        return numbers

    def _write(self, chunk: ScheduledChunk) -> None:
        sequence, start = chunk.sequence, chunk.sequence.num_committed
        dependence = sequence.request.key if sequence.num_demoted else None
        self.made[sequence, sequence.start_number] += [dependence] * chunk.num_tokens
        chain = self._chain(sequence)
        for position in range(start, start + chunk.num_tokens):
            place = divmod(position - sequence.num_demoted, BLOCK_TOKENS)
            block = sequence.block_table[place[0]]
            assert self.pool.ref_count(block) == 1, "a shared block was written"
            assert block not in self.pool._keys, "a published block was written"
            self.slots[block, place[1]] = FULL, (chain[position], dependence)

    def _check_holders(self) -> None:
        held = sorted(
            block
            for sequence in self.scheduler.running
            for block in (*sequence.block_table, *sequence.low_table, *sequence.high_table)
        )
        counts = [self.pool.ref_count(block) for block in range(self.pool.num_blocks)]
        assert held == [block for block, count in enumerate(counts) for _ in range(count)]


def _places(places: Places) -> list[tuple[int, int]]:
    return list(zip(places.blocks, places.slots, strict=True))


def _where(sequence: Sequence) -> Iterator[tuple[CacheFormat, tuple[int, int]]]:
    """Format, block and slot of each committed token, in order of position."""
    rule = sequence.cache_rule
    if rule is None or not sequence.num_demoted:
        for place in range(sequence.num_committed):
            yield FULL, (sequence.block_table[place // BLOCK_TOKENS], place % BLOCK_TOKENS)
        return
    full = [(sequence.block_table[p // BLOCK_TOKENS], p % BLOCK_TOKENS) for p in range(sequence.num_full)]
    yield from ((FULL, place) for place in full[: rule.sinks])
    for place in range(sequence.num_low):
        yield rule.format.low, (sequence.low_table[place // rule.capacity], place % rule.capacity)
    for place in sequence.high_places:
        at = sequence.high_table[place // rule.high_capacity], place % rule.high_capacity
        yield rule.format.high, at
    yield from ((FULL, place) for place in full[rule.sinks :])


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


PRESSED = CachePlan(format="k4v4", sinks=2, recent=5, demote="pressure")


@pytest.mark.parametrize("make", SCHEDULERS)
@pytest.mark.parametrize("priority", [0, 1, 2])
def test_nobody_is_demoted_for_a_lower_priority(make: MakeScheduler, priority: int) -> None:
    """One that waits for blocks has those demoted that are of its own priority or below, and no others."""
    world = World(make, num_blocks=32, max_batched_tokens=512)
    world.add([1] * 240, PRESSED, n=1, max_tokens=9, priority=1)
    world.step()
    (sequence,) = world.scheduler.running
    world.add([2] * 300, CachePlan(), n=1, max_tokens=9, priority=priority)
    assert sequence.num_demoted == 0
    world.step()
    assert (sequence.num_demoted > 0) == (priority >= 1)


def runs(world: World, *requests: tuple[CachePlan, int, int]) -> list[Sequence]:
    """A plan, the length of a prompt and a priority each; when all prompts have run, and a token came."""
    for number, (plan, length, priority) in enumerate(requests):
        world.add([number] * length, plan, n=1, max_tokens=300, priority=priority)
    sequences = [request.sequences[0] for request in world.requests]
    while not all(sequence.is_decoding for sequence in sequences):
        assert world.step()
    return sequences


def carry_out(world: World) -> None:
    """What was planned so far."""
    for move in world.scheduler.take_moves():
        world._move(move)


def demoter_of(world: World) -> Demoter:
    """The scheduler's."""
    demoter = world.scheduler._demoter  # type: ignore[attr-defined]
    assert isinstance(demoter, Demoter)
    return demoter


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


@pytest.mark.parametrize(("num_blocks", "num_requests"), [(40, 2), (160, 8)])
@pytest.mark.parametrize("make", SCHEDULERS)
def test_an_eighth_of_the_cache_or_what_a_step_takes_is_kept_free(
    make: MakeScheduler, num_blocks: int, num_requests: int
) -> None:
    """Nobody waits: tokens are demoted in the step before which fewer blocks are free than that, and no
    sooner, until that many are.
    """
    world = World(make, num_blocks, max_batched_tokens=64, max_sequences=8)
    sequences = runs(world, *[(PRESSED, 100 + 5 * number, 0) for number in range(num_requests)])
    demoter, kept = demoter_of(world), []
    for _ in range(250):
        taken = max(demoter.num_taken(each) for each in sequences)
        needed = taken + 2 + sum(demoter.num_wanted(each, 1) for each in sequences)
        least = max(num_blocks // 8, needed)
        before, gains = [each.num_demoted for each in sequences], [demoter.gain(each) for each in sequences]
        is_short = world.pool.num_free < least
        world.scheduler._reclaim()  # type: ignore[attr-defined]
        demoted = [each.num_demoted for each in sequences] != before
        assert demoted == (is_short and max(gains) > 0)
        kept.append(is_short)
        assert world.step()
        if any(each.status is not SequenceStatus.RUNNING for each in sequences):
            break
    assert {True, False} == set(kept)


@pytest.mark.parametrize("make", SCHEDULERS)
def test_nobody_is_demoted_for_who_has_no_place(make: MakeScheduler) -> None:
    """One that waits for a place, and not for blocks, costs nobody a bit."""
    world = World(make, num_blocks=60, max_sequences=1, max_batched_tokens=512)
    (sequence,) = runs(world, (PRESSED, 300, 0))
    world.add([2] * 600, PRESSED, n=1, max_tokens=9, priority=1)
    for _ in range(5):
        world.step()
    assert sequence.num_demoted == 0


@pytest.mark.parametrize("make", SCHEDULERS)
def test_who_waits_has_just_so_much_room_made(make: MakeScheduler) -> None:
    """Beside what is kept free, its blocks: those of lower rank are demoted one by one until it has them."""
    world = World(make, num_blocks=80, max_batched_tokens=1024)
    first, second = runs(world, (PRESSED, 300, 0), (PRESSED, 300, 0))
    world.add([2] * 520, CachePlan(), n=1, max_tokens=9, priority=0)
    waiting = world.requests[-1].sequences[0]
    world.step()
    assert waiting.status is SequenceStatus.RUNNING
    assert (first.num_demoted > 0, second.num_demoted > 0) == (False, True)


@pytest.mark.parametrize("make", SCHEDULERS)
def test_what_must_repeat_is_not_demoted_for_want_of_blocks(make: MakeScheduler) -> None:
    """With a seed a `pressure` plan has boundaries: tokens are demoted there alone, however full it is."""
    world = World(make, num_blocks=32, max_batched_tokens=512)
    rule = world.space.rule(PRESSED, 200, is_seeded=True)
    assert rule is not None
    world.add([1] * 200, replace(PRESSED, demote="eager"), n=1, max_tokens=150, priority=0)
    world.add([2] * 200, PRESSED, n=1, max_tokens=150, priority=0)
    seeded, pressed = (request.sequences[0] for request in world.requests)
    assert seeded.cache_rule == rule
    while world.scheduler.has_work:
        if seeded.status is SequenceStatus.RUNNING and seeded.is_decoding:
            due = {rule.num_demoted(seeded.num_committed - back) for back in (0, 1)}
            assert seeded.num_demoted in due
        assert world.step()
    assert (seeded.was_reclaimed, pressed.was_reclaimed) == (False, True)


@pytest.mark.parametrize("make", SCHEDULERS)
def test_a_start_leaves_room_to_demote_those_under_pressure(make: MakeScheduler) -> None:
    """One of a lower priority, for whom nobody is demoted, starts if it leaves the blocks that demoting those
    takes, and not otherwise.
    """
    for num_beyond in (1, -3):
        world = World(make, num_blocks=60, max_batched_tokens=1024)
        (sequence,) = runs(world, (PRESSED, 300, 1))
        num_free = world.pool.num_free - demoter_of(world).num_taken(sequence)
        world.add([2] * (BLOCK_TOKENS * (num_free + num_beyond)), CachePlan(), n=1, max_tokens=1, priority=0)
        world.step()
        assert sequence.num_demoted == 0
        has_started = world.requests[-1].sequences[0].status is not SequenceStatus.WAITING
        assert has_started == (num_beyond < 0)


@pytest.mark.parametrize(("num_blocks", "num_prompt", "starts"), [(60, 240, True), (60, 460, False)])
def test_a_start_leaves_room_for_a_prompt_under_pressure(
    num_blocks: int, num_prompt: int, starts: bool
) -> None:
    """One that still reads its prompt will want the blocks of the rest of it, but none to demote it by way of
    beside those that are kept free for all.
    """
    world = World(PromiseScheduler, num_blocks, max_batched_tokens=100, max_prefill_chunk=50)
    world.add([1] * 480, PRESSED, n=1, max_tokens=9, priority=1)
    world.step()
    world.add([2] * num_prompt, CachePlan(), n=1, max_tokens=9, priority=0)
    reading, waiting = (request.sequences[0] for request in world.requests)
    for _ in range(4):
        world.step()
        assert reading.num_committed < 300
        assert (waiting.status is SequenceStatus.RUNNING) == starts


@pytest.mark.parametrize("make", SCHEDULERS)
def test_nobody_is_demoted_for_a_prompts_later_steps(make: MakeScheduler) -> None:
    """Of a long prompt, what the next step reads counts."""
    world = World(make, num_blocks=71, max_batched_tokens=64)
    (sequence,) = runs(world, (PRESSED, 300, 1))
    world.add([2] * 700, CachePlan(), n=1, max_tokens=1, priority=0)
    for _ in range(4):
        world.step()
    reading = world.requests[-1].sequences[0]
    assert 0 < reading.num_committed < 300
    assert sequence.num_demoted == 0


def test_room_is_made_for_who_would_start_first() -> None:
    """Of several that wait, the highest priority."""
    world = World(PromiseScheduler, num_blocks=60, max_batched_tokens=1024)
    (sequence,) = runs(world, (PRESSED, 300, 1))
    for priority in (0, 2):
        world.add([2 + priority] * 600, CachePlan(), n=1, max_tokens=1, priority=priority)
    world.step()
    assert sequence.num_demoted > 0
    assert world.requests[-1].sequences[0].status is SequenceStatus.FINISHED


def test_who_is_alone_and_stuck_starts_again_with_boundaries() -> None:
    """Blocks reserved for drafts may be the last ones: then there is none to demote by way of, and no other
    sequence to take any from. It is computed again, and comes to its end.
    """
    world = World(PromiseScheduler, num_blocks=24)
    (sequence,) = runs(world, (PRESSED, 150, 0))
    world.scheduler.reserve(sequence, 24 * BLOCK_TOKENS)
    assert world.pool.num_free == 0
    num_still = 0
    while world.scheduler.has_work:
        num_still = 0 if world.step() else num_still + 1
        assert num_still <= 1, "nothing moves"
    assert (sequence.num_preemptions, sequence.is_under_pressure) == (1, False)


def test_who_is_stuck_in_company_stands_still() -> None:
    """The one of least rank waits for blocks of the others, and loses none of its own."""
    world = World(PromiseScheduler, num_blocks=33, max_batched_tokens=512, headroom=0)
    for number in range(9):  # so that short answers are expected of the others
        world.add([number] * 9, CachePlan(), n=1, max_tokens=1, priority=0)
        world.step()
    world.add([1] * 290, CachePlan(), n=1, max_tokens=26, priority=1)
    world.add([2] * 188, replace(PRESSED, recent=190), n=1, max_tokens=60, priority=0)
    high, low = (request.sequences[0] for request in world.requests[-2:])
    has_stood_still = False
    while world.scheduler.has_work:
        before = low.num_committed
        assert world.step()
        has_stood_still |= low.is_decoding and low.num_committed == before and low in world.scheduler.running
    assert has_stood_still
    assert high.num_preemptions == low.num_preemptions == 0


def test_a_start_leaves_room_for_the_first_demotions_to_come() -> None:
    """One that still reads its prompt holds few blocks, and will want many before it demotes: until then none
    starts that would take them, and nobody is preempted.
    """
    world, plan = World(PromiseScheduler, num_blocks=60), CachePlan(format="k4v4", sinks=2, recent=5)
    for number, length in enumerate((480, 300)):
        world.add([number] * length, plan, n=1, max_tokens=200, priority=0)
    first, second = (request.sequences[0] for request in world.requests)
    while second.status is SequenceStatus.WAITING:
        assert world.step()
    assert first.num_demoted > 0
    while world.scheduler.has_work:
        assert world.step()
    assert first.num_preemptions == second.num_preemptions == 0


def test_who_is_preempted_under_pressure_starts_again_with_boundaries() -> None:
    """What it held cannot be had again; with boundaries it is known to fit, and the answer says so."""
    world = World(FirstComeScheduler, num_blocks=24)
    world.add([1] * 60, PRESSED, n=1, max_tokens=9, priority=0)
    world.step()
    (sequence,) = world.scheduler.running
    assert isinstance(world.scheduler, FirstComeScheduler)
    preempt(sequence, world.scheduler)
    assert not sequence.is_under_pressure
    while world.scheduler.has_work:
        world.step()
    usage = sequence.request.cache_usage
    assert usage is not None
    assert not usage.reproducible
    assert sequence.num_preemptions == 1


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
