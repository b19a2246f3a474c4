"""A mixed day in the simulator under each fixed plan and under `adaptive`: who serves most of it as promised?

    make bench-policy-day
    python -m surefoot.bench.policy_day --help

A request counts as good if it was served within its class's targets, and if its tenant's answers of the day
kept the tenant's limit on quality in the mean: a plan cannot buy goodput with bits that nobody allowed. The
exit status is 0 if `adaptive` is at least as good as every other plan, 1 if not.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from cyclopts import App, Parameter
from msgspec import Struct

from surefoot.backends.engine.bench_classes import PROMISES
from surefoot.backends.engine.cost_model import StepCost
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.engine.simulator import Machine, Outcome
from surefoot.backends.engine.trace import TraceRequest
from surefoot.backends.types import CachePlan, ServingPlan
from surefoot.policies.base import Decision, Observation, Policy
from surefoot.policies.bounds import (
    FORMATS,
    CacheBounds,
    Format,
    PlanBounds,
    SpeculationBounds,
    bounded_plan,
    more_precise,
)
from surefoot.policies.registry import load_policies, serving_policy
from surefoot.policies.wrappers import Clamp

from .policy_day_engine import KIND, Load, PlannedSimulation

LOSS: Mapping[str, float] = {"k16v16": 0.0, "k8v8": 0.0, "k8v4": 0.0, "mixed": 0.0045, "k4v4": 0.01}
"""Nats per token (docs/policies.md, "Cache formats")."""
DRAFTS = 8
STEPS = StepCost(fixed_s=0.01, row_s=3e-5, further_row_s=3e-5, sequence_s=2e-5, context_s=4e-8)
"""About a model of some billions of parameters on a GPU, whose KV cache has 128 KiB a token."""
SETTINGS = EngineSettings(cache_bytes=1, max_sequences=128, max_batched_tokens=1024)


class DayTenant(Struct, frozen=True, kw_only=True):
    """A tenant and its traffic: `rate` requests a second in its busiest hour, by `hours` from midnight."""

    id: str
    sla_class: str
    bounds: PlanBounds
    max_loss: float
    accepts: float
    """How likely a draft token is accepted after those before it."""
    prompt_tokens: int
    output_tokens: int
    rate: float
    hours: Sequence[float]


OFFICE = (0.05,) * 7 + (0.3, 0.7, 1, 1, 0.9, 0.7, 0.9, 1, 1, 0.8, 0.5, 0.3, 0.2, 0.1) + (0.05,) * 3
EVENING = (0.2,) * 6 + (0.3,) * 6 + (0.5,) * 5 + (0.8, 1, 1, 1, 0.8, 0.5, 0.3)
NIGHT = (1,) * 6 + (0.5, 0.2) + (0.1,) * 12 + (0.5, 1, 1, 1)


def _bounds(cache_format: Format) -> PlanBounds:
    return PlanBounds(speculation=SpeculationBounds(max_draft=DRAFTS), cache=CacheBounds(format=cache_format))


TENANTS = (
    DayTenant(
        id="chat", sla_class="interactive", bounds=_bounds("k8v4"), max_loss=0.002, accepts=0.4,
        prompt_tokens=400, output_tokens=150, rate=4.0, hours=EVENING,
    ),
    DayTenant(
        id="agent", sla_class="interactive", bounds=_bounds("k8v4"), max_loss=0.002, accepts=0.85,
        prompt_tokens=3000, output_tokens=250, rate=0.6, hours=OFFICE,
    ),
    DayTenant(
        id="desk", sla_class="standard", bounds=_bounds("k4v4"), max_loss=0.006, accepts=0.5,
        prompt_tokens=1500, output_tokens=250, rate=1.5, hours=OFFICE,
    ),
    DayTenant(
        id="legal", sla_class="standard", bounds=_bounds("k8v4"), max_loss=0.002, accepts=0.6,
        prompt_tokens=6000, output_tokens=200, rate=0.25, hours=OFFICE,
    ),
    DayTenant(
        id="summaries", sla_class="batch", bounds=_bounds("k4v4"), max_loss=0.02, accepts=0.6,
        prompt_tokens=2500, output_tokens=200, rate=1.0, hours=NIGHT,
    ),
)  # fmt: skip


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Job:
    """How long a day is, and on which machine."""

    hour: Annotated[float, Parameter(help="Virtual seconds of an hour")] = 15.0
    blocks: Annotated[int, Parameter(help="Blocks of the cache, of 16 tokens in full precision")] = 2000
    load: Annotated[float, Parameter(help="What the tenants' rates are multiplied by")] = 1.0
    seed: Annotated[int, Parameter(help="Of arrivals and lengths")] = 0


class One:
    """One plan for everybody, cut to each tenant's bounds."""

    def __init__(self, cache_format: str, max_draft: int) -> None:
        self._cache_format, self._max_draft = cache_format, max_draft

    def decide(self, observation: Observation) -> Decision:
        """The same whatever is observed."""
        bounds = observation.bounds
        cache_format = more_precise(self._cache_format, bounds.cache.format)
        plan = bounded_plan(bounds, min(self._max_draft, bounds.speculation.ceiling), cache_format)
        return Decision(plan, "everybody has this plan")


class Row(Struct, frozen=True, kw_only=True):
    """A day under one policy. `goodput` is the share of all requests that were good."""

    policy: str
    goodput: float
    by_tenant: dict[str, float]
    num_preemptions: int
    busy_s: float
    too_lossy: list[str]
    """Tenants whose limit on quality was not kept: none of their requests is good."""


def policies() -> dict[str, Policy]:
    """Every fixed plan, and the built-in policy that chooses."""
    fixed = {
        f"{cache_format}, {f'drafts of {length}' if length else 'no drafts'}": Clamp(
            One(cache_format, length)
        )
        for cache_format in FORMATS
        for length in (0, DRAFTS)
    }
    return {**fixed, "adaptive": serving_policy(load_policies([]))}


def make_day(job: Job, tenants: Sequence[DayTenant] = TENANTS) -> list[TraceRequest]:
    """Poisson arrivals whose rate changes by the hour; the same for the same seed."""
    trace: list[TraceRequest] = []
    for tenant in tenants:
        source = random.Random(f"{job.seed} {tenant.id}")
        for hour, share in enumerate(tenant.hours):
            arrival_s = hour * job.hour
            while (arrival_s := arrival_s + source.expovariate(tenant.rate * share * job.load)) < (
                (hour + 1) * job.hour
            ):
                trace.append(_request(tenant, arrival_s, source))
    return sorted(trace, key=lambda each: each.arrival_s)


def run_day(name: str, policy: Policy, trace: Sequence[TraceRequest], job: Job) -> Row:
    """The whole day under one policy."""
    known = {each.id: each for each in TENANTS}

    def decide(traced: TraceRequest, load: Load) -> ServingPlan:
        return policy.decide(observe(known[traced.flow], traced, load, job)).plan

    accepts = {each.id: each.accepts for each in TENANTS}
    machine = Machine(settings=SETTINGS, num_blocks=job.blocks, cost=STEPS)
    simulation = PlannedSimulation(machine, PROMISES, decide, accepts)
    result = simulation.run(trace)
    return _row(name, result.outcomes, simulation.plans, result.busy_s)


def observe(tenant: DayTenant, traced: TraceRequest, load: Load, job: Job) -> Observation:
    """What a gateway would put together."""
    return Observation(
        tenant_id=tenant.id,
        model="day",
        policy="adaptive",
        service_class=tenant.sla_class,
        kind=KIND,
        num_prompt_tokens=traced.prompt_tokens,
        cache_pressure=load.cache_pressure,
        load=load.num_requests,
        acceptance=load.acceptance.get(tenant.id, {}).get(KIND),
        hour=traced.arrival_s / job.hour,
        bounds=tenant.bounds,
    )


def loss_of(plan: CachePlan, num_prompt_tokens: int) -> float:
    """Nats per token of a request: none where its whole prompt is protected."""
    return LOSS[plan.format] if num_prompt_tokens > plan.sinks + plan.recent else 0.0


def _row(name: str, outcomes: Sequence[Outcome], plans: Sequence[ServingPlan], busy_s: float) -> Row:
    num_good: dict[str, int] = {}
    too_lossy: list[str] = []
    counts: dict[str, int] = {}
    for tenant in TENANTS:
        own = [pair for pair in zip(outcomes, plans, strict=True) if pair[0].request.flow == tenant.id]
        counts[tenant.id] = len(own)
        if _mean_loss(own) > tenant.max_loss:
            too_lossy.append(tenant.id)
        is_kept = tenant.id not in too_lossy
        num_good[tenant.id] = sum(outcome.is_good for outcome, _ in own) if is_kept else 0
    return Row(
        policy=name,
        goodput=sum(num_good.values()) / max(len(outcomes), 1),
        by_tenant={each: num_good[each] / max(count, 1) for each, count in counts.items()},
        num_preemptions=sum(each.num_preemptions for each in outcomes),
        busy_s=busy_s,
        too_lossy=too_lossy,
    )


def _mean_loss(served: Sequence[tuple[Outcome, ServingPlan]]) -> float:
    """Over a tenant's requests that came to an answer."""
    losses = [
        loss_of(plan.cache, each.request.prompt_tokens) for each, plan in served if each.timings is not None
    ]
    return sum(losses) / max(len(losses), 1)


def text_of(rows: Sequence[Row]) -> str:
    """A table of all policies."""
    head = f"{'policy':24}{'goodput':>9}" + "".join(f"{each.id:>11}" for each in TENANTS)
    lines = [head + f"{'preempted':>11}{'busy s':>9}  too lossy"]
    for row in rows:
        shares = "".join(f"{100 * row.by_tenant[each.id]:10.1f}%" for each in TENANTS)
        lines.append(
            f"{row.policy:24}{100 * row.goodput:8.1f}%{shares}{row.num_preemptions:11}{row.busy_s:9.1f}"
            f"  {', '.join(row.too_lossy)}"
        )
    return "\n".join(lines) + "\n"


def _request(tenant: DayTenant, arrival_s: float, source: random.Random) -> TraceRequest:
    prompt, output = tenant.prompt_tokens, tenant.output_tokens
    return TraceRequest(
        arrival_s=arrival_s,
        prompt_tokens=source.randint(prompt // 2, prompt + prompt // 2),
        output_tokens=source.randint(output // 2, output + output // 2),
        sla_class=tenant.sla_class,
        flow=tenant.id,
    )


DEFAULT_JOB = Job()


def main(*, job: Job = DEFAULT_JOB) -> int:
    """Serve one synthetic mixed day under every fixed plan and under adaptive."""
    trace = make_day(job)
    rows = []
    for name, policy in policies().items():
        sys.stderr.write(f"serving {len(trace)} requests under {name} ...\n")
        rows.append(run_day(name, policy, trace, job))
    sys.stdout.write(text_of(rows))
    *fixed, adaptive = rows
    return 0 if all(adaptive.goodput >= each.goodput for each in fixed) else 1


if __name__ == "__main__":
    app = App(name="policy_day", help=__doc__, result_action="return_value")
    app.default(main)
    sys.exit(app())
