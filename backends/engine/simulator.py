"""The real scheduler in virtual time: a step takes what it would cost, and nothing is computed.

Thousands of requests take seconds, and the same trace gives the same result every time. Plans have their
cache formats: sequences are demoted at the engine's own boundaries, in the engine's own blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from msgspec import Struct

from surefoot.backends.errors import Overloaded
from surefoot.backends.types import (
    BASELINE_PLAN,
    GenerateRequest,
    SamplingParams,
    ServingPlan,
    Timings,
    TokenPrompt,
)
from surefoot.kernels.layout import BLOCK_TOKENS, FORMATS, BlockLayout

from .block_pool import BlockPool
from .cache_rule import CacheSpace
from .choice_stream import ChoiceStream
from .cost_model import CostModel, StepCost
from .demotion import Move
from .door import Door
from .gpu_times import GpuTimes
from .prefix_cache import PrefixCache
from .promise_scheduler import PromiseScheduler
from .scheduler import MakeScheduler, ScheduledChunk, shape_of
from .scheduler_load import UnitCost, load_of
from .sequence import Request
from .settings import EngineSettings
from .step_times import LinearTimes, StepTimes
from .trace import Promise, TraceRequest

PUBLISH_EVERY_S = 0.25
"""As often as the engine's thread does."""

ANSWER_TOKEN = 0
"""What answers are made of, and no prompt."""


class VirtualClock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Machine(Struct, frozen=True, kw_only=True):
    """What is simulated: limits, blocks of the cache, and what steps cost.

    `cost` is what the scheduler believes, `times` what steps take (None: what is believed, with `READ_COST`
    for demoted tokens). `layout` is that of a block, and says what a format's holds.
    """

    settings: EngineSettings
    num_blocks: int
    cost: StepCost
    times: StepTimes | None = None
    layout: BlockLayout = BlockLayout(num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)

    @property
    def space(self) -> CacheSpace:
        """The cache, which alone bounds contexts."""
        max_context = max(map(self.layout.capacity, FORMATS)) * self.num_blocks
        return CacheSpace(
            layout=self.layout, num_layers=1, num_blocks=self.num_blocks, max_context=max_context
        )


def gpu_machine(times: GpuTimes, settings: EngineSettings, num_blocks: int | None = None) -> Machine:
    """A GPU with a model, with all the blocks that its memory has room for or so many."""
    return Machine(
        settings=settings,
        num_blocks=num_blocks or times.num_blocks,
        cost=times.believed(),
        times=times,
        layout=times.layout,
    )


class Outcome(Struct, frozen=True, kw_only=True):
    """What became of one request of the trace. `refusal` is the reason if it was not let in."""

    request: TraceRequest
    promise: Promise
    refusal: str | None = None
    timings: Timings | None = None
    num_preemptions: int = 0

    @property
    def is_good(self) -> bool:
        """Whether it was served within what its class promises."""
        if self.timings is None:
            return False
        return _within(self.timings.ttft_s, self.promise.ttft_target_s) and _within(
            self.timings.tpot_s, self.promise.tpot_target_s
        )


class SimulationResult(Struct, frozen=True, kw_only=True):
    """All outcomes in the order of arrival, and the steps that it took."""

    outcomes: list[Outcome]
    end_s: float
    num_steps: int
    num_rows: int
    busy_s: float
    """Seconds in steps."""
    mean_resident: float
    """Sequences in the cache, the mean over seconds in steps."""
    max_resident: int


def simulate(
    trace: Sequence[TraceRequest],
    machine: Machine,
    *,
    make_scheduler: MakeScheduler = PromiseScheduler,
    promises: Mapping[str, Promise],
    plan: ServingPlan = BASELINE_PLAN,
) -> SimulationResult:
    """Serve a trace, sorted by arrival, to its end. `promises` are those of the classes that it names; all
    requests have one plan, of which drafts are not simulated.
    """
    return Simulation(machine, make_scheduler, promises, plan).run(trace)


class Simulation:
    """One run. Requests come in between steps, as they do for the engine's thread."""

    def __init__(
        self,
        machine: Machine,
        make_scheduler: MakeScheduler,
        promises: Mapping[str, Promise],
        plan: ServingPlan = BASELINE_PLAN,
    ) -> None:
        self._plan = plan
        self._space = machine.space
        self._times = machine.times or LinearTimes(machine.cost)
        self._clock = VirtualClock()
        self._promises = promises
        self._settings = machine.settings
        # An engine learns what its steps take as they come, where that is not what is believed.
        self._costs = CostModel(machine.cost, frozen=machine.times is None)
        self.pool = BlockPool(machine.num_blocks)
        self._blocks = PrefixCache(self.pool, between_requests=machine.settings.prefix_cache)
        self.scheduler = make_scheduler(machine.settings, self._blocks, self._costs, self._clock)
        self._door = Door(machine.settings)
        self._published_s = -PUBLISH_EVERY_S
        self._traced: dict[int, TraceRequest] = {}
        self._last_key = -1
        self._outcomes: dict[int, Outcome] = {}
        self._num_steps = self._num_rows = self._max_resident = 0
        self._busy_s = self._resident_s = 0.0

    def run(self, trace: Sequence[TraceRequest]) -> SimulationResult:
        """Serve the trace to its end."""
        arrived = 0
        while arrived < len(trace) or self.scheduler.has_work:
            while arrived < len(trace) and trace[arrived].arrival_s <= self._clock.now_s:
                self._arrive(arrived, trace[arrived])
                arrived += 1
            next_s = trace[arrived].arrival_s if arrived < len(trace) else None
            self._turn(next_s)
        return SimulationResult(
            outcomes=[self._outcomes[key] for key in range(len(trace))],
            end_s=self._clock.now_s,
            num_steps=self._num_steps,
            num_rows=self._num_rows,
            busy_s=self._busy_s,
            mean_resident=self._resident_s / max(self._busy_s, 1e-9),
            max_resident=self._max_resident,
        )

    def _turn(self, next_arrival_s: float | None) -> None:
        """A step, or the time until there is something to do."""
        if not self.scheduler.has_work:
            if next_arrival_s is not None:
                self._clock.now_s = next_arrival_s
        elif (wait_s := self.scheduler.wait_s()) > 0:
            until_s = self._clock.now_s + wait_s
            self._clock.now_s = until_s if next_arrival_s is None else min(until_s, next_arrival_s)
        else:
            self._step()

    def _arrive(self, key: int, traced: TraceRequest) -> None:
        self._publish()
        plan = self._plan_of(traced)
        message = _message(key, traced, self._promise_of(traced), plan)
        max_tokens = traced.max_tokens or traced.output_tokens
        try:
            self._door.check(message)
        except Overloaded as refusal:
            self._end(key, traced, refusal=refusal.reason)
            return
        if traced.prompt_tokens + max_tokens > self._space.longest(plan.cache, traced.prompt_tokens):
            self._end(key, traced, refusal="context")
            return
        self._door.enter(key, message, traced.prompt_tokens, max_tokens)
        request = Request(
            message,
            _prompt(key, traced),
            key=key,
            max_tokens=max_tokens,
            seed=0,
            arrived_s=traced.arrival_s,
        )
        request.cache_rule = self._space.rule(plan.cache, traced.prompt_tokens)
        (sequence,) = request.branch(without_text(1))
        self._blocks.enter(request)
        self._traced[key], self._last_key = traced, key
        self.scheduler.add(sequence)

    def _step(self) -> None:
        chunks = self._prepared(self.scheduler.schedule())
        for chunk in chunks:
            if chunk.sequence.request.first_step_s is None:
                chunk.sequence.request.first_step_s = self._clock.now_s
        self._pass(chunks, self.scheduler.take_moves())
        for chunk in chunks:
            self._verify(chunk)
        self._publish()

    def _prepared(self, chunks: list[ScheduledChunk]) -> list[ScheduledChunk]:
        """What runs of what was scheduled: here, all as it is."""
        return chunks

    def _pass(self, chunks: Sequence[ScheduledChunk], moves: Sequence[Move]) -> None:
        """Let the time of a step pass."""
        seconds = self._times.seconds(chunks, moves)
        shape = shape_of(chunks)
        self._costs.observe(shape.num_rows, shape.num_sequences, shape.num_context_tokens, seconds)
        self._clock.now_s += seconds
        self._busy_s += seconds
        self._num_steps += 1
        self._num_rows += shape.num_rows
        num_resident = len(self.scheduler.running)
        self._resident_s += seconds * num_resident
        self._max_resident = max(self._max_resident, num_resident)

    def _verify(self, chunk: ScheduledChunk) -> None:
        """What a step leaves of a chunk."""
        self._commit(chunk)

    def _commit(self, chunk: ScheduledChunk) -> None:
        sequence, samples = chunk.sequence, chunk.samples
        sequence.num_committed += chunk.num_tokens
        self._blocks.publish(sequence)
        if not samples:
            return
        request = sequence.request
        request.has_run_prompt = True
        sequence.append(ANSWER_TOKEN)
        request.last_token_s = self._clock.now_s
        if request.first_token_s is None:
            request.first_token_s = self._clock.now_s
        traced = self._traced[request.key]
        if sequence.num_output_tokens >= traced.output_tokens:
            self.scheduler.finish(sequence)
            self._door.leave(request.key)
            timings = request.timings(self._clock.now_s)
            self._end(request.key, traced, timings=timings, num_preemptions=sequence.num_preemptions)

    def _publish(self) -> None:
        if self._clock.now_s - self._published_s >= PUBLISH_EVERY_S or not self.scheduler.has_work:
            settings = self._settings
            unit = UnitCost.of(self._costs.cost, settings.max_sequences, settings.max_batched_tokens)
            self._door.load = load_of(self.scheduler, unit, self._last_key)
            self._published_s = self._clock.now_s

    def _plan_of(self, traced: TraceRequest) -> ServingPlan:
        """The plan of a request that comes now; asked once for each."""
        return self._plan

    def _promise_of(self, traced: TraceRequest) -> Promise:
        """The class's, with what the request says itself."""
        promise = self._promises.get(traced.sla_class, Promise())
        ttft_s, tpot_s = traced.ttft_target_s, traced.tpot_target_s
        return Promise(
            priority=promise.priority if traced.priority is None else traced.priority,
            ttft_target_s=promise.ttft_target_s if ttft_s is None else ttft_s,
            tpot_target_s=promise.tpot_target_s if tpot_s is None else tpot_s,
        )

    def _end(
        self,
        key: int,
        traced: TraceRequest,
        *,
        refusal: str | None = None,
        timings: Timings | None = None,
        num_preemptions: int = 0,
    ) -> None:
        self._outcomes[key] = Outcome(
            request=traced,
            promise=self._promise_of(traced),
            refusal=refusal,
            timings=timings,
            num_preemptions=num_preemptions,
        )


def blocks_of(num_tokens: int) -> int:
    """Blocks that so many tokens take."""
    return -(-num_tokens // BLOCK_TOKENS)


class NoText:
    """A detokeniser for token counts alone."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def without_text(num_choices: int) -> list[ChoiceStream]:
    """Streams of choices of which only token counts matter."""
    return [ChoiceStream(choice, NoText(), (), has_logprobs=False) for choice in range(num_choices)]


def _message(key: int, traced: TraceRequest, promise: Promise, plan: ServingPlan) -> GenerateRequest:
    return GenerateRequest(
        request_id=str(key),
        model="",
        prompt=TokenPrompt(()),
        params=SamplingParams(max_tokens=traced.max_tokens or traced.output_tokens),
        plan=plan,
        priority=promise.priority,
        ttft_target_s=promise.ttft_target_s,
        tpot_target_s=promise.tpot_target_s,
        flow=traced.flow,
        weight=traced.weight,
        salt=traced.flow,
    )


def _prompt(key: int, traced: TraceRequest) -> tuple[int, ...]:
    """Token ids that are equal within a group and different between groups, so that a cache can tell."""
    number = 2 * key + 1 if traced.prompt_group is None else 2 * traced.prompt_group + 2
    return (number % 2**32,) * traced.prompt_tokens


def _within(seconds: float | None, target_s: float | None) -> bool:
    return target_s is None or seconds is None or seconds <= target_s
