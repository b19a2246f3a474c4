"""The real scheduler in virtual time: a step takes what the cost model says, and nothing is computed.

Thousands of requests take seconds, and the same trace gives the same result every time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from surefoot.backends.errors import Overloaded
from surefoot.backends.types import GenerateRequest, SamplingParams, Timings, TokenPrompt
from surefoot.kernels.layout import BLOCK_TOKENS

from .block_pool import BlockPool
from .choice_stream import ChoiceStream
from .cost_model import CostModel, StepCost, StepShape
from .door import Door
from .prefix_cache import PrefixCache
from .promise_scheduler import PromiseScheduler
from .scheduler import MakeScheduler, ScheduledChunk
from .scheduler_load import UnitCost, load_of
from .sequence import Request
from .sequence import Sequence as EngineSequence
from .settings import EngineSettings
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
    """What is simulated: limits, blocks of the cache, and what steps cost."""

    settings: EngineSettings
    num_blocks: int
    cost: StepCost


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


def simulate(
    trace: Sequence[TraceRequest],
    machine: Machine,
    *,
    make_scheduler: MakeScheduler = PromiseScheduler,
    promises: Mapping[str, Promise],
) -> SimulationResult:
    """Serve a trace, sorted by arrival, to its end. `promises` are those of the classes that it names."""
    return Simulation(machine, make_scheduler, promises).run(trace)


class Simulation:
    """One run. Requests come in between steps, as they do for the engine's thread."""

    def __init__(
        self, machine: Machine, make_scheduler: MakeScheduler, promises: Mapping[str, Promise]
    ) -> None:
        self._clock = VirtualClock()
        self._promises = promises
        self._settings = machine.settings
        self._costs = CostModel(machine.cost, frozen=True)
        self.pool = BlockPool(machine.num_blocks)
        self._blocks = PrefixCache(self.pool, between_requests=machine.settings.prefix_cache)
        self.scheduler = make_scheduler(machine.settings, self._blocks, self._costs, self._clock)
        self._door = Door(machine.settings)
        self._published_s = -PUBLISH_EVERY_S
        self._traced: dict[int, TraceRequest] = {}
        self._last_key = -1
        self._outcomes: dict[int, Outcome] = {}
        self._num_steps = self._num_rows = 0
        self._busy_s = 0.0

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
        message = _message(key, traced, self._promise_of(traced))
        max_tokens = traced.max_tokens or traced.output_tokens
        try:
            self._door.check(message)
        except Overloaded as refusal:
            self._end(key, traced, refusal=refusal.reason)
            return
        if blocks_of(traced.prompt_tokens + max_tokens) > self.pool.num_blocks:
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
        sequence = EngineSequence(request, 0, ChoiceStream(0, NoText(), (), has_logprobs=False))
        request.sequences.append(sequence)
        self._blocks.enter(request)
        self._traced[key], self._last_key = traced, key
        self.scheduler.add(sequence)

    def _step(self) -> None:
        chunks = self.scheduler.schedule()
        self.scheduler.take_moves()  # there is no cache to move anything in
        shape = StepShape()
        for chunk in chunks:
            shape.add(chunk.num_tokens, chunk.sequence.num_committed)
            if chunk.sequence.request.first_step_s is None:
                chunk.sequence.request.first_step_s = self._clock.now_s
        seconds = self._costs.predict(shape.num_rows, shape.num_sequences, shape.num_context_tokens)
        self._clock.now_s += seconds
        self._busy_s += seconds
        self._num_steps += 1
        self._num_rows += shape.num_rows
        for chunk in chunks:
            self._commit(chunk)
        self._publish()

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


def _message(key: int, traced: TraceRequest, promise: Promise) -> GenerateRequest:
    return GenerateRequest(
        request_id=str(key),
        model="",
        prompt=TokenPrompt(()),
        params=SamplingParams(max_tokens=traced.max_tokens or traced.output_tokens),
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
