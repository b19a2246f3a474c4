"""The engine's simulator with plans: drafts cost rows and bring tokens, a format's blocks hold more of them.

The scheduler, the door, the pool and the controller of draft lengths are the engine's own. What is modelled
here is what they decide about: tokens of a draft are accepted one by one with a request's own probability,
and a sequence in a quantised format holds blocks as an engine would that demotes at the prompt's end and then
evenly.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from typing import cast

from msgspec import Struct
from msgspec.structs import replace

from surefoot.backends.engine.block_demand import BlockDemand
from surefoot.backends.engine.choice_stream import ChoiceStream
from surefoot.backends.engine.cost_model import CostModel
from surefoot.backends.engine.prefix_cache import PrefixCache
from surefoot.backends.engine.promise_scheduler import PromiseScheduler
from surefoot.backends.engine.scheduler import ScheduledChunk, shape_of
from surefoot.backends.engine.sequence import Sequence
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.engine.simulator import Machine, NoText, Simulation
from surefoot.backends.engine.speculation.base import Draft, strength_of_match
from surefoot.backends.engine.speculation.controller import Controller, StepBounds
from surefoot.backends.engine.trace import Promise, TraceRequest
from surefoot.backends.types import CachePlan, ServingPlan

CAPACITY = {"k16v16": 16, "k8v8": 30, "k8v4": 39, "mixed": 50, "k4v4": 56}
"""Tokens of a block, with 64 numbers a head (kernels/layout.py)."""
READ_COST = {"k16v16": 1.0, "k8v8": 0.71, "k8v4": 0.68, "mixed": 0.65, "k4v4": 0.64}
"""What a token takes to attend to (docs/measurements.md, "attention by cache format", two threads)."""
MEAN_UNDEMOTED = 32
"""Tokens that wait to be demoted, 0 to 63 of them."""
FIRST_MATCH = 4
"""The repetition that drafts begin after."""
KIND = "chat"
"""Of all requests: tenants differ enough."""


class Load(Struct, frozen=True):
    """What is seen of the engine when a request comes: as much as a gateway sees."""

    cache_pressure: float
    num_requests: int
    acceptance: Mapping[str, Mapping[str, float]]
    """By flow and kind."""


Decide = Callable[[TraceRequest, Load], ServingPlan]


class PlannedSequence(Sequence):
    """Counts blocks by its plan's format once its prompt has run."""

    def blocks_missing(self, num_tokens: int) -> int:
        """As an engine's, at the format's capacity."""
        return self.blocks_of(self.num_committed + num_tokens) - len(self.block_table)

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks that so many tokens take now: a prompt is in full precision until it has run."""
        if self.num_committed < self.num_prompt_tokens:
            return math.ceil(num_tokens / CAPACITY["k16v16"])
        return blocks_held(self.request.message.plan.cache, num_tokens)


def blocks_held(cache: CachePlan, num_tokens: int) -> int:
    """Blocks of full precision for what is protected, of the format for the rest."""
    num_kept = min(num_tokens, cache.sinks + cache.recent + MEAN_UNDEMOTED)
    full = CAPACITY["k16v16"]
    if cache.format == "k16v16":
        return math.ceil(num_tokens / full)
    return math.ceil(num_kept / full) + math.ceil((num_tokens - num_kept) / CAPACITY[cache.format])


class PlannedDemand(BlockDemand):
    """Expects each sequence to grow at its own format's capacity."""

    def _peak(self, sequences: Iterable[Sequence]) -> float:
        to_come = sorted(
            ((self._lengths.remaining(seq), *_held(seq)) for seq in sequences), key=lambda each: -each[0]
        )
        peak = num_blocks = growth = 0.0
        for num_more, held, per_token in to_come:
            num_blocks += held + 0.5
            growth += per_token
            peak = max(peak, num_blocks + growth * num_more)
        return peak


def _held(sequence: Sequence) -> tuple[int, float]:
    """Blocks of all its tokens, and those of one token more."""
    cache = sequence.request.message.plan.cache
    return blocks_held(cache, len(sequence.token_ids)), 1 / CAPACITY[cache.format]


class PlannedScheduler(PromiseScheduler):
    """The engine's, with room counted by format."""

    def __init__(
        self, settings: EngineSettings, blocks: PrefixCache, costs: CostModel, clock: Callable[[], float]
    ) -> None:
        super().__init__(settings, blocks, costs, clock)
        self._demand = PlannedDemand(blocks, self.lengths)
        self.newest: Sequence | None = None
        """What was added last."""

    def add(self, sequence: Sequence) -> None:
        """Queue it as a sequence that knows its plan."""
        request = sequence.request
        planned = PlannedSequence(request, 0, ChoiceStream(0, NoText(), (), has_logprobs=False))
        request.sequences[:] = [planned]
        self.newest = planned
        super().add(planned)


class PlannedSimulation(Simulation):
    """One run in which each request gets the plan that `decide` gives it when it comes.

    `accepts` is the probability, by flow, that a draft token is accepted after those before it.
    """

    def __init__(
        self,
        machine: Machine,
        promises: Mapping[str, Promise],
        decide: Decide,
        accepts: Mapping[str, float],
    ) -> None:
        # A plan's blocks are counted, not filled, so there are no prefixes to find in them.
        settings = replace(machine.settings, prefix_cache=False)
        super().__init__(replace(machine, settings=settings), PlannedScheduler, promises)
        self._decide = decide
        self._accepts = accepts
        self._controller = Controller(machine.settings.speculation)
        self._random = random.Random(0)
        self.plans: list[ServingPlan] = []
        """Of each request of the trace, whether or not it was let in."""

    def _arrive(self, key: int, traced: TraceRequest) -> None:
        plan = self._decide(traced, self._load())
        self.plans.append(plan)
        super()._arrive(key, traced)
        newest = cast(PlannedScheduler, self.scheduler).newest
        if newest is not None and newest.request.key == key:
            newest.request.message = replace(newest.request.message, plan=plan, kind=KIND)

    def _load(self) -> Load:
        pool = self.pool
        used = 1 - pool.num_free / pool.num_blocks
        num_requests = len(self.scheduler.running) + len(self.scheduler.waiting)
        return Load(used, num_requests, self._controller.acceptance.rates())

    def _step(self) -> None:
        chunks = self._with_drafts(self.scheduler.schedule())
        shape = shape_of(chunks)
        unread = sum(_unread(chunk) for chunk in chunks)
        for chunk in chunks:
            if chunk.sequence.request.first_step_s is None:
                chunk.sequence.request.first_step_s = self._clock.now_s
        num_context = round(shape.num_context_tokens - unread)
        seconds = self._costs.predict(shape.num_rows, shape.num_sequences, num_context)
        self._clock.now_s += seconds
        self._busy_s += seconds
        self._num_steps += 1
        self._num_rows += shape.num_rows
        for chunk in chunks:
            self._verify(chunk)
        self._publish()

    def _with_drafts(self, chunks: list[ScheduledChunk]) -> list[ScheduledChunk]:
        """Drafts as long as the engine's controller finds worth their rows."""
        drafts = [
            (chunk.sequence, _draft(max_tokens))
            for chunk in chunks
            if chunk.samples and (max_tokens := self._controller.max_tokens(chunk.sequence)) > 0
        ]
        if not drafts:
            return chunks
        shape = shape_of(chunks)
        mean_context = shape.num_context_tokens / max(shape.num_rows, 1)
        bounds = StepBounds(
            num_sampled=sum(chunk.samples for chunk in chunks),
            max_rows=max(self._settings.max_batched_tokens - shape.num_rows, 0),
        )

        def cost(count: int) -> float:
            rows, sequences = shape.num_rows + count, shape.num_sequences + count
            num_context = shape.num_context_tokens + round(count * mean_context)
            return self._costs.predict(rows, sequences, num_context)

        choice = self._controller.choose(drafts, bounds, cost)
        by_sequence = {
            seq: draft.cut(length) for (seq, draft), length in zip(drafts, choice.lengths, strict=True)
        }
        return [self._drafted(chunk, by_sequence.get(chunk.sequence)) for chunk in chunks]

    def _drafted(self, chunk: ScheduledChunk, draft: Draft | None) -> ScheduledChunk:
        room = 0 if draft is None else self.scheduler.reserve(chunk.sequence, len(draft))
        if draft is None or room <= 0:
            return chunk
        return ScheduledChunk(chunk.sequence, chunk.num_tokens, draft.cut(room))

    def _verify(self, chunk: ScheduledChunk) -> None:
        """Commit a chunk, and what of its draft is accepted."""
        sequence, num_accepted = chunk.sequence, 0
        if chunk.draft is not None:
            rate, length = self._accepts[sequence.request.message.flow], len(chunk.draft)
            num_accepted = next((j for j in range(length) if self._random.random() >= rate), length)
            self._controller.acceptance.observe(sequence, chunk.draft, num_accepted)
        traced = self._traced[sequence.request.key]
        for _ in range(min(num_accepted, traced.output_tokens - sequence.num_output_tokens - 1)):
            sequence.append(0)
            sequence.num_committed += 1
        self._commit(replace(chunk, draft=None))
        if sequence.num_output_tokens >= traced.output_tokens:
            self._controller.acceptance.finish(sequence)
        else:
            self._demote(cast(PlannedSequence, sequence))

    def _demote(self, sequence: PlannedSequence) -> None:
        """Give back what its tokens no longer take."""
        if (num_left := -sequence.blocks_missing(0)) > 0:
            self.pool.free(sequence.block_table[-num_left:])
            del sequence.block_table[-num_left:]


def _unread(chunk: ScheduledChunk) -> float:
    """Tokens' worth of reading that a format saves a chunk of a sequence whose prompt has run."""
    sequence = chunk.sequence
    if sequence.num_committed < sequence.num_prompt_tokens:
        return 0.0
    return (
        (1 - READ_COST[sequence.request.message.plan.cache.format]) * chunk.num_rows * sequence.num_committed
    )


def _draft(length: int) -> Draft:
    strengths = tuple(strength_of_match(FIRST_MATCH + j) for j in range(length))
    return Draft("ngram", (0,) * length, strengths)
