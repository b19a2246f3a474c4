"""The engine's simulator with a plan for each request as it comes: drafts cost rows and bring tokens.

The scheduler, the door, the cache with its formats and the controller of draft lengths are the engine's own.
What is modelled here is whether a draft's tokens are accepted: one by one, with a probability of the flow's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from surefoot.backends.engine.promise_scheduler import PromiseScheduler
from surefoot.backends.engine.scheduler import ScheduledChunk, shape_of
from surefoot.backends.engine.simulator import Machine, Simulation
from surefoot.backends.engine.speculation.base import Draft, strength_of_match
from surefoot.backends.engine.speculation.controller import Controller, StepBounds
from surefoot.backends.engine.trace import Promise, TraceRequest
from surefoot.backends.types import ServingPlan

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
Answered = Callable[[TraceRequest, ServingPlan], None]


def forget(_: TraceRequest, __: ServingPlan) -> None:
    """Nobody asks what an answer was like."""


class PlannedSimulation(Simulation):
    """One run in which each request gets the plan that `decide` gives it when it comes.

    `accepts` is the probability, by flow, that a draft token is accepted after those before it; `answered` is
    told of each answer.
    """

    def __init__(
        self,
        machine: Machine,
        promises: Mapping[str, Promise],
        decide: Decide,
        accepts: Mapping[str, float],
        answered: Answered = forget,
    ) -> None:
        # A day's prompts have nothing in common.
        settings = replace(machine.settings, prefix_cache=False)
        super().__init__(replace(machine, settings=settings), PromiseScheduler, promises)
        self._decide = decide
        self._accepts = accepts
        self._answered = answered
        self._controller = Controller(machine.settings.speculation)
        self._random = random.Random(0)
        self.plans: list[ServingPlan] = []
        """Of each request of the trace, whether or not it was let in."""

    def _plan_of(self, traced: TraceRequest) -> ServingPlan:
        plan = self._decide(traced, self._load())
        self.plans.append(plan)
        return plan

    def _load(self) -> Load:
        pool = self.pool
        used = 1 - pool.num_free / pool.num_blocks
        num_requests = len(self.scheduler.running) + len(self.scheduler.waiting)
        return Load(used, num_requests, self._controller.acceptance.rates())

    def _prepared(self, chunks: list[ScheduledChunk]) -> list[ScheduledChunk]:
        """With drafts as long as the engine's controller finds worth their rows."""
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
        request = sequence.request
        if chunk.draft is not None:
            rate, length = self._accepts[request.message.flow], len(chunk.draft)
            num_accepted = next((j for j in range(length) if self._random.random() >= rate), length)
            self._controller.acceptance.observe(sequence, chunk.draft, num_accepted)
        traced = self._traced[request.key]
        for _ in range(min(num_accepted, traced.output_tokens - sequence.num_output_tokens - 1)):
            sequence.append(0)
            sequence.num_committed += 1
        self._commit(replace(chunk, draft=None))
        if sequence.num_output_tokens >= traced.output_tokens:
            self._controller.acceptance.finish(sequence)
            self._answered(traced, request.message.plan)


def _draft(length: int) -> Draft:
    strengths = tuple(strength_of_match(FIRST_MATCH + j) for j in range(length))
    return Draft("ngram", (0,) * length, strengths)
