"""The day in the simulator: what plans cost and bring there; every policy serves the same day."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from surefoot.backends.engine.cost_model import StepCost
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.engine.simulator import Machine, SimulationResult, simulate
from surefoot.backends.engine.trace import TraceRequest
from surefoot.backends.types import BASELINE_PLAN, CachePlan, ServingPlan, SpeculationPlan
from surefoot.bench import policy_day
from surefoot.bench.policy_day import TENANTS, Job, is_best, make_day, mean_rows, policies, run_day, text_of
from surefoot.bench.policy_day_engine import PlannedSimulation
from surefoot.policies.bounds import FORMATS, CacheBounds

COST = StepCost(fixed_s=0.01, row_s=1e-5, further_row_s=1e-5, context_s=1e-8)
SETTINGS = EngineSettings(cache_bytes=1, max_sequences=64, max_batched_tokens=512)
TRACE = [TraceRequest(arrival_s=0.01 * i, prompt_tokens=1000, output_tokens=100, flow="a") for i in range(32)]


def run(plan: ServingPlan, rate: float = 0.0, num_blocks: int = 800) -> tuple[SimulationResult, int]:
    """All requests with one plan; the result, and blocks that are still held."""
    machine = Machine(settings=SETTINGS, num_blocks=num_blocks, cost=COST)
    simulation = PlannedSimulation(machine, {}, lambda *_: plan, {"a": rate})
    result = simulation.run(TRACE)
    return result, simulation.pool.num_blocks - simulation.pool.num_free


def test_the_baseline_is_the_engines_simulator() -> None:
    """Without drafts and formats the day's simulator is the one that it is made of."""
    plain = simulate(TRACE, Machine(settings=SETTINGS, num_blocks=4000, cost=COST), promises={})
    assert run(BASELINE_PLAN, num_blocks=4000)[0].outcomes == plain.outcomes


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_drafts_bring_tokens_by_their_acceptance(rate: float) -> None:
    """Accepted drafts save steps, the more the likelier they are; every request gets its tokens."""
    plan = ServingPlan(name="draft8", speculation=SpeculationPlan(max_draft=8))
    result, num_held = run(plan, rate, num_blocks=4000)
    without, _ = run(BASELINE_PLAN, num_blocks=4000)
    assert num_held == 0
    assert all(each.timings is not None for each in result.outcomes)
    if rate:
        assert result.num_steps < without.num_steps * (1 - rate / 4)
    else:
        assert result.num_steps >= without.num_steps


def test_formats_hold_more_requests() -> None:
    """Fewer bits mean an earlier end where the cache is too small for all, and no block is lost."""
    ends = []
    for name in FORMATS:
        result, num_held = run(ServingPlan(name=name, cache=CachePlan(format=name)))
        assert num_held == 0
        ends.append(result.end_s)
    assert ends == sorted(ends, reverse=True)
    assert ends[-1] < 0.8 * ends[0]


def test_every_policy_serves_the_same_day() -> None:
    """The day is the same for a seed; each policy answers for all of it, keeps each tenant's limit on quality
    and leaves nobody out.
    """
    job = Job(hour=0.5, load=2.0)
    trace = make_day(job)
    assert trace == make_day(job)
    assert {each.flow for each in trace} == {each.id for each in TENANTS}
    rows = [run_day(name, policy, trace, job) for name, policy in policies().items()]
    assert [row.policy for row in rows][-1] == "adaptive"
    assert all(0 <= row.goodput <= 1 and set(row.by_tenant) == {each.id for each in TENANTS} for row in rows)
    assert not any(row.too_lossy for row in rows)
    assert text_of(rows).count("\n") == 1 + len(rows)
    assert mean_rows([rows, rows])[-1].by_tenant == rows[-1].by_tenant
    assert is_best([rows[-1], rows[-1]])
    assert not is_best([rows[-1], replace(rows[-1], goodput=rows[-1].goodput - 0.1)])


def test_adaptive_keeps_the_limit_of_a_tenant_who_loses_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where answers lose three times what formats are known to, the fixed plans break a limit that adaptive,
    which is told of it, keeps.
    """
    legal = next(each for each in TENANTS if each.id == "legal")
    bounds = replace(legal.bounds, cache=CacheBounds(format="k4v4", max_loss=0.002))
    fragile = replace(legal, bounds=bounds, fragility=3.0, prompt_tokens=1000, output_tokens=100, rate=6.0)
    monkeypatch.setattr(policy_day, "TENANTS", (fragile,))
    job = Job(hour=4.0)
    trace = make_day(job, [fragile])
    rows = {name: run_day(name, policies()[name], trace, job) for name in ("k8v4, no drafts", "adaptive")}
    assert rows["k8v4, no drafts"].too_lossy == ["legal"]
    assert rows["adaptive"].too_lossy == []
