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

from surefoot.backends.engine.block_pool import BlockPool
from surefoot.backends.engine.cache_rule import MIXED_NAME, PLAN_FORMATS, CacheRule, CacheSpace
from surefoot.backends.engine.cost_model import CostModel
from surefoot.backends.engine.demotion import Move, Places
from surefoot.backends.engine.first_come import FirstComeScheduler
from surefoot.backends.engine.prefix_cache import PrefixCache
from surefoot.backends.engine.scheduler import MakeScheduler, ScheduledChunk
from surefoot.backends.engine.sequence import Request, Sequence, SequenceStatus
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.engine.simulator import VirtualClock, without_text
from surefoot.backends.types import CachePlan, GenerateRequest, SamplingParams, ServingPlan, TokenPrompt
from surefoot.kernels.layout import BLOCK_TOKENS, FORMATS, FULL, BlockLayout, CacheFormat

from .schedules import SCHEDULERS

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
        self.cache.enter(request)
        self.requests.append(request)
        for sequence in request.branch(without_text(n)):
            self.scheduler.add(sequence)

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
            self._advance(chunk)
        self.pool.check_integrity()
        self._check_holders()
        return sum(chunk.num_tokens for chunk in chunks)

    def finish(self, sequence: Sequence) -> None:
        """It ended, or its client is gone."""
        self.scheduler.finish(sequence)

    def abort(self, request: Request) -> None:
        """All its choices, those that are held too."""
        for sequence in request.sequences:
            if sequence.status in (SequenceStatus.RUNNING, SequenceStatus.WAITING):
                self.finish(sequence)
            sequence.status = SequenceStatus.FINISHED

    def preempt(self, sequence: Sequence) -> None:
        """As the naive scheduler does when blocks run out."""
        assert isinstance(self.scheduler, FirstComeScheduler)
        self.scheduler._preempt(sequence)
        self.scheduler.waiting.appendleft(sequence)

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
        for position, (cache_format, place) in enumerate(_where(sequence)):
            found_format, (token, dependence) = self.slots[place]
            assert (found_format, token) == (cache_format, chain[position])
            # Under pressure choices of a prompt may share what one of them computed after it had demoted.
            assert dependence == made[position] or (sequence.is_under_pressure and sequence.num_demoted)
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

    def _advance(self, chunk: ScheduledChunk) -> None:
        sequence, samples = chunk.sequence, chunk.samples
        sequence.num_committed += chunk.num_tokens
        self.cache.publish(sequence)
        if sequence.num_committed >= sequence.num_prompt_tokens:
            for held in sequence.request.prompt_ran():
                self.scheduler.add(held)
        if samples:
            sequence.append(len(set(sequence.token_ids[-5:])) + sequence.choice)
            if sequence.num_output_tokens >= sequence.request.max_tokens:
                self.finish(sequence)

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
                world.abort(data.draw(st.sampled_from(running)).request)
            case 2 if running and isinstance(world.scheduler, FirstComeScheduler):
                world.preempt(data.draw(st.sampled_from(running)))
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
