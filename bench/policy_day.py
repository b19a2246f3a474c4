"""A mixed day in the simulator under each fixed plan and under `adaptive`: who serves most of it as promised?

    make bench-policy-day
    python -m surefoot.bench.policy_day --help

A request counts as good if it was served within its class's targets, and if its tenant's answers of the day
kept the tenant's limit on quality in the mean: a plan cannot buy goodput with bits that nobody allowed. A
fixed plan that would not keep a tenant's limit is made more precise for that tenant. The exit status is 0 if
`adaptive` is at least as good as every other plan in the mean of the days, 1 if not.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Annotated

from cyclopts import App, Parameter
from msgspec import Struct

from surefoot.backends.engine.bench_classes import PROMISES
from surefoot.backends.engine.gpu_times import GPUS, GpuTimes
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.engine.simulator import Outcome, gpu_machine
from surefoot.backends.engine.trace import TraceRequest
from surefoot.backends.types import ServingPlan
from surefoot.policies.base import Decision, Observation, Policy
from surefoot.policies.bounds import (
    FORMATS,
    CacheBounds,
    PlanBounds,
    SpeculationBounds,
    bounded_plan,
    more_precise,
)
from surefoot.policies.recent_loss import RecentLoss, expected_loss
from surefoot.policies.registry import load_policies, serving_policy
from surefoot.policies.wrappers import Clamp

from .policy_day_engine import KIND, Load, PlannedSimulation

DRAFTS = 8
SETTINGS = EngineSettings(cache_bytes=1, max_sequences=256, max_batched_tokens=1024)


class DayTenant(Struct, frozen=True, kw_only=True):
    """A tenant and its traffic: `rate` requests a second in its busiest hour, by `hours` from midnight."""

    id: str
    sla_class: str
    bounds: PlanBounds
    accepts: float
    """How likely a draft token is accepted after those before it."""
    prompt_tokens: int
    output_tokens: int
    rate: float
    hours: Sequence[float]
    fragility: float = 1.0
    """What its answers lose, as a multiple of what formats are known to."""

    def expected_loss(self, plan: ServingPlan, traced: TraceRequest) -> float:
        """Nats per token of an answer, by what is known of its plan's format."""
        return expected_loss(plan.cache, self.bounds.cache.loss, traced.prompt_tokens)

    def loss(self, plan: ServingPlan, traced: TraceRequest) -> float:
        """Nats per token that an answer loses indeed."""
        return self.fragility * self.expected_loss(plan, traced)


OFFICE = (0.05,) * 7 + (0.3, 0.7, 1, 1, 0.9, 0.7, 0.9, 1, 1, 0.8, 0.5, 0.3, 0.2, 0.1) + (0.05,) * 3
EVENING = (0.2,) * 6 + (0.3,) * 6 + (0.5,) * 5 + (0.8, 1, 1, 1, 0.8, 0.5, 0.3)
NIGHT = (1,) * 6 + (0.5, 0.2) + (0.1,) * 12 + (0.5, 1, 1, 1)


def _bounds(max_loss: float) -> PlanBounds:
    cache = CacheBounds(format="k4v4", max_loss=max_loss)
    return PlanBounds(speculation=SpeculationBounds(max_draft=DRAFTS), cache=cache)


TENANTS = (
    DayTenant(
        id="chat", sla_class="interactive", bounds=_bounds(0.005), accepts=0.4,
        prompt_tokens=400, output_tokens=300, rate=4.5, hours=EVENING,
    ),
    DayTenant(
        id="agent", sla_class="interactive", bounds=_bounds(0.0005), accepts=0.85,
        prompt_tokens=3000, output_tokens=500, rate=0.7, hours=OFFICE,
    ),
    DayTenant(
        id="desk", sla_class="standard", bounds=_bounds(0.005), accepts=0.5,
        prompt_tokens=1500, output_tokens=600, rate=1.7, hours=OFFICE,
    ),
    DayTenant(
        id="legal", sla_class="standard", bounds=_bounds(0.0005), accepts=0.6,
        prompt_tokens=6000, output_tokens=500, rate=0.3, hours=OFFICE,
    ),
    DayTenant(
        id="summaries", sla_class="batch", bounds=_bounds(0.02), accepts=0.6,
        prompt_tokens=2500, output_tokens=500, rate=1.2, hours=NIGHT,
    ),
)  # fmt: skip


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Job:
    """How long a day is, and on which machine."""

    hour: Annotated[float, Parameter(help="Virtual seconds of an hour")] = 10.0
    gpu: Annotated[str, Parameter(help=f"By whose data sheet steps take: {', '.join(GPUS)}")] = "l40s"
    blocks: Annotated[int | None, Parameter(help="Of the cache [what its memory has room for]")] = None
    load: Annotated[float, Parameter(help="What the tenants' rates are multiplied by")] = 1.0
    seed: Annotated[int, Parameter(help="Of arrivals and lengths of the first day")] = 0
    days: Annotated[int, Parameter(help="How many days, each with the next seed")] = 1


class One:
    """One plan for everybody, cut to each tenant's bounds."""

    def __init__(self, cache_format: str, max_draft: int) -> None:
        self._cache_format, self._max_draft = cache_format, max_draft

    def decide(self, observation: Observation) -> Decision:
        """The same whatever is observed."""
        bounds = observation.bounds
        cache_format = more_precise(self._cache_format, bounds.cache.lasting)
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
    """The whole day under one policy, with a guard that scores every answer."""
    known = {each.id: each for each in TENANTS}
    recent = RecentLoss()

    def decide(traced: TraceRequest, load: Load) -> ServingPlan:
        tenant = known[traced.flow]
        plan = policy.decide(observe(tenant, traced, load, job, recent.get(tenant.id))).plan
        recent.choose(tenant.id, tenant.expected_loss(plan, traced))
        return plan

    def answered(traced: TraceRequest, plan: ServingPlan) -> None:
        tenant = known[traced.flow]
        recent.score(tenant.id, tenant.expected_loss(plan, traced), tenant.loss(plan, traced))

    accepts = {each.id: each.accepts for each in TENANTS}
    machine = gpu_machine(GpuTimes(GPUS[job.gpu]), SETTINGS, job.blocks)
    simulation = PlannedSimulation(machine, PROMISES, decide, accepts, answered)
    result = simulation.run(trace)
    return _row(name, result.outcomes, simulation.plans, result.busy_s)


def observe(
    tenant: DayTenant, traced: TraceRequest, load: Load, job: Job, quality_loss: float | None
) -> Observation:
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
        quality_loss=quality_loss,
        hour=traced.arrival_s / job.hour,
        bounds=tenant.bounds,
    )


def _row(name: str, outcomes: Sequence[Outcome], plans: Sequence[ServingPlan], busy_s: float) -> Row:
    num_good: dict[str, int] = {}
    too_lossy: list[str] = []
    counts: dict[str, int] = {}
    for tenant in TENANTS:
        own = [pair for pair in zip(outcomes, plans, strict=True) if pair[0].request.flow == tenant.id]
        counts[tenant.id] = len(own)
        if _mean_loss(tenant, own) > (tenant.bounds.cache.max_loss or 0.0):
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


def _mean_loss(tenant: DayTenant, served: Sequence[tuple[Outcome, ServingPlan]]) -> float:
    """Over a tenant's requests that came to an answer."""
    losses = [tenant.loss(plan, each.request) for each, plan in served if each.timings is not None]
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
    """Serve synthetic mixed days under every fixed plan and under adaptive."""
    days = []
    for seed in range(job.seed, job.seed + job.days):
        day = replace(job, seed=seed)
        trace = make_day(day)
        sys.stderr.write(f"day {seed}: {len(trace)} requests ...\n")
        days.append([run_day(name, policy, trace, day) for name, policy in policies().items()])
        sys.stdout.write(f"day {seed}\n{text_of(days[-1])}\n")
    if job.days > 1:
        sys.stdout.write(f"the mean of {job.days} days\n{text_of(mean_rows(days))}\n")
    return 0 if is_best(mean_rows(days)) else 1


def is_best(rows: Sequence[Row]) -> bool:
    """Whether the last policy is at least as good as every other."""
    *fixed, adaptive = rows
    return all(adaptive.goodput >= each.goodput for each in fixed)


def mean_rows(days: Sequence[Sequence[Row]]) -> list[Row]:
    """Each policy's days as one."""
    return [_mean_row(rows) for rows in zip(*days, strict=True)]


def _mean_row(rows: Sequence[Row]) -> Row:
    return Row(
        policy=rows[0].policy,
        goodput=mean(row.goodput for row in rows),
        by_tenant={name: mean(row.by_tenant[name] for row in rows) for name in rows[0].by_tenant},
        num_preemptions=sum(row.num_preemptions for row in rows),
        busy_s=sum(row.busy_s for row in rows),
        too_lossy=sorted({name for row in rows for name in row.too_lossy}),
    )


if __name__ == "__main__":
    app = App(name="policy_day", help=__doc__, result_action="return_value")
    app.default(main)
    sys.exit(app())
