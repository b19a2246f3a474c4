"""Requests that ask more of a cache than it holds: how many it has at once in a format, and the same in
virtual time.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from surefoot.backends.types import CachePlan, ServingPlan

from .cache_rule import BOUNDARY_TOKENS
from .promise_scheduler import PromiseScheduler
from .sequence import Sequence
from .simulator import Machine, Simulation, blocks_of
from .trace import TraceRequest

BEGIN_S = 1000.0
"""When simulated requests come, after one that has shown how long answers are."""


class Shape(Struct, frozen=True, kw_only=True):
    """Equal requests that come all at once."""

    name: str
    num_requests: int
    prompt_tokens: int
    output_tokens: int

    def num_blocks(self, demand: float) -> int:
        """Of a cache of which they ask `demand` times as much in full precision."""
        return round(self.num_requests * blocks_of(self.prompt_tokens + self.output_tokens) / demand)


class Demand(Struct, frozen=True, kw_only=True):
    """What became of a shape in a format. Tokens are those of answers, by the time from the first request to
    the last token: in it prompts are read, and at its end few requests are left.
    """

    shape: str
    format: str
    mean_running: float
    """See `Residents`."""
    max_running: int
    num_preemptions: int
    tokens_per_s: float


class Residents:
    """How many sequences are in the cache after each step, from the first that reads no prompt, or in which
    a request ends, until half of them have ended. Before that more start all the time, after it few are left.
    """

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self.counts: list[int] = []
        self.most = 0

    def observe(self, before: Collection[Sequence], after: Collection[Sequence], num_open: int) -> None:
        """A step: who decoded when it began, who runs after it, and how many requests have not ended."""
        self.most = max(self.most, len(after))
        is_full = bool(self.counts) or set(before).issuperset(after) or num_open < self._num_requests
        if is_full and 2 * num_open > self._num_requests:
            self.counts.append(len(after))

    @property
    def mean(self) -> float:
        """Over these steps; `most` is over all."""
        return sum(self.counts) / len(self.counts)


class _WatchedSimulation(Simulation):
    """A simulation that counts who is resident."""

    def __init__(self, machine: Machine, plan: ServingPlan, num_requests: int) -> None:
        super().__init__(machine, PromiseScheduler, {}, plan)
        self.residents = Residents(num_requests)
        self._num_open = num_requests

    def _step(self) -> None:
        running = self.scheduler.running
        decoding, num_before = [each for each in running if each.is_decoding], len(self._outcomes)
        super()._step()
        if self._clock.now_s > BEGIN_S:
            self._num_open -= len(self._outcomes) - num_before
            self.residents.observe(decoding, running, self._num_open)


def simulated(shape: Shape, machine: Machine, cache_format: str) -> Demand:
    """In virtual time; the machine's cache is as large as it is."""
    plan = ServingPlan(name=cache_format, cache=CachePlan(format=cache_format))
    simulation = _WatchedSimulation(machine, plan, shape.num_requests)

    def traced(arrival_s: float, num_prompt: int) -> TraceRequest:
        return TraceRequest(arrival_s=arrival_s, prompt_tokens=num_prompt, output_tokens=shape.output_tokens)

    trace = [traced(0.0, BOUNDARY_TOKENS), *[traced(BEGIN_S, shape.prompt_tokens)] * shape.num_requests]
    result = simulation.run(trace)
    if refused := [outcome.refusal for outcome in result.outcomes if outcome.refusal is not None]:
        raise ValueError(f"{len(refused)} of {shape.num_requests} requests were refused: {refused[0]}")
    return Demand(
        shape=shape.name,
        format=cache_format,
        mean_running=simulation.residents.mean,
        max_running=simulation.residents.most,
        num_preemptions=sum(outcome.num_preemptions for outcome in result.outcomes),
        tokens_per_s=shape.num_requests * shape.output_tokens / (result.end_s - BEGIN_S),
    )
