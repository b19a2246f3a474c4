"""Schedulers, demotion, pool and prefix cache as the engine joins them, and a model that runs instantly."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from surefoot.backends.engine.block_pool import BlockPool
from surefoot.backends.engine.cache_rule import CacheSpace
from surefoot.backends.engine.cost_model import CostModel
from surefoot.backends.engine.demotion import Demoter, Move, Places
from surefoot.backends.engine.prefix_cache import PrefixCache
from surefoot.backends.engine.scheduler import MakeScheduler, ScheduledChunk
from surefoot.backends.engine.sequence import Request, Sequence
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.engine.simulator import VirtualClock
from surefoot.backends.types import CachePlan, GenerateRequest, SamplingParams, ServingPlan, TokenPrompt
from surefoot.kernels.layout import BLOCK_TOKENS, FORMATS, FULL, BlockLayout, CacheFormat

from .schedules import advance, enter

LAYOUT = BlockLayout(num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)

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


PRESSED = CachePlan(format="k4v4", sinks=2, recent=5, demote="pressure")


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
