"""Drives a bare scheduler against a model that costs time and computes nothing."""

from __future__ import annotations

from typing import Any

from surefoot.backends.engine.block_pool import BlockPool
from surefoot.backends.engine.cost_model import CostModel, StepCost, StepShape
from surefoot.backends.engine.first_come import FirstComeScheduler
from surefoot.backends.engine.prefix_cache import PrefixCache
from surefoot.backends.engine.promise_scheduler import PromiseScheduler
from surefoot.backends.engine.scheduler import MakeScheduler, ScheduledChunk, Scheduler
from surefoot.backends.engine.sequence import Request, Sequence, SequenceStatus
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.engine.simulator import VirtualClock, without_text
from surefoot.backends.types import GenerateRequest, TokenPrompt

SCHEDULERS: tuple[MakeScheduler, ...] = (FirstComeScheduler, PromiseScheduler)

COST = StepCost(fixed_s=0.01, row_s=0.001, further_row_s=0.001, sequence_s=0.0, context_s=0.0)
"""10 ms a step and 1 ms a row, so that expectations can be computed in the head."""


def enter(request: Request, cache: PrefixCache, scheduler: Scheduler) -> None:
    """Queue a request's choices as the engine does: those that share its prompt are held until it has run."""
    cache.enter(request)
    for sequence in request.branch(without_text(request.message.params.n)):
        scheduler.add(sequence)


def advance(chunk: ScheduledChunk, token_id: int, cache: PrefixCache, scheduler: Scheduler) -> None:
    """A chunk ran: its tokens are in the cache, and `token_id` is what it samples, if it samples."""
    sequence, samples = chunk.sequence, chunk.samples
    sequence.num_committed += chunk.num_tokens
    cache.publish(sequence)
    if sequence.num_committed >= sequence.num_prompt_tokens:
        for held in sequence.request.prompt_ran():
            scheduler.add(held)
    if samples:
        sequence.append(token_id)
        if sequence.num_output_tokens >= sequence.request.max_tokens:
            scheduler.finish(sequence)


def abort(request: Request, scheduler: Scheduler) -> None:
    """End all choices, those that are held too."""
    for sequence in request.sequences:
        if sequence.status in (SequenceStatus.RUNNING, SequenceStatus.WAITING):
            scheduler.finish(sequence)
        sequence.status = SequenceStatus.FINISHED


def preempt(sequence: Sequence, scheduler: FirstComeScheduler) -> None:
    """As the scheduler does when blocks run out."""
    scheduler._preempt(sequence)
    scheduler.waiting.appendleft(sequence)


class Driver:
    """A scheduler with a pool and a clock of its own, and steps that do what the engine would."""

    def __init__(
        self, make: MakeScheduler, *, num_blocks: int = 64, cost: StepCost = COST, **limits: Any
    ) -> None:
        settings = {"max_sequences": 4, "max_batched_tokens": 64, "headroom": 0.0, **limits}
        self.clock = VirtualClock()
        self.costs = CostModel(cost, frozen=True)
        self.pool = BlockPool(num_blocks)
        self.settings = EngineSettings(cache_bytes=1, **settings)
        self.scheduler = make(self.settings, PrefixCache(self.pool), self.costs, self.clock)

    def add(self, key: int, num_prompt: int, max_tokens: int = 4, **message: Any) -> Sequence:
        """A request with one choice, which arrives now."""
        asked = GenerateRequest(request_id=str(key), model="m", prompt=TokenPrompt((0,)), **message)
        request = Request(
            asked,
            (0,) * num_prompt,
            key=key,
            max_tokens=max_tokens,
            seed=0,
            arrived_s=self.clock.now_s,
        )
        (sequence,) = request.branch(without_text(1))
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[ScheduledChunk]:
        """Wait if the scheduler would, then a step: time passes, tokens come, the done ones finish."""
        self.clock.now_s += self.scheduler.wait_s()
        chunks = self.scheduler.schedule()
        shape = StepShape()
        for chunk in chunks:
            shape.add(chunk.num_tokens, chunk.sequence.num_committed)
        self.clock.now_s += self.costs.predict(shape.num_rows, shape.num_sequences, shape.num_context_tokens)
        for chunk in chunks:
            self._commit(chunk)
        return chunks

    def shares(self) -> dict[int, int]:
        """Tokens of the next step by the request's key."""
        return {chunk.sequence.request.key: chunk.num_tokens for chunk in self.step()}

    def _commit(self, chunk: ScheduledChunk) -> None:
        sequence, samples = chunk.sequence, chunk.samples
        sequence.num_committed += chunk.num_tokens
        assert sequence.blocks_missing(0) <= 0, "tokens were committed beyond the sequence's blocks"
        if samples:
            sequence.append(0)
            if sequence.num_output_tokens >= sequence.request.max_tokens:
                self.scheduler.finish(sequence)
