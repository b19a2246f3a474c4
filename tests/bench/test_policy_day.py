"""The day in the simulator: what plans cost and bring there; every policy serves the same day."""

from __future__ import annotations

import pytest
import torch

from surefoot.backends.engine.cache_rule import format_name
from surefoot.backends.engine.cost_model import StepCost
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.engine.simulator import Machine, SimulationResult, simulate
from surefoot.backends.engine.trace import TraceRequest
from surefoot.backends.types import BASELINE_PLAN, CachePlan, ServingPlan, SpeculationPlan
from surefoot.bench.policy_day import TENANTS, Job, make_day, policies, run_day, text_of
from surefoot.bench.policy_day_engine import CAPACITY, PlannedSimulation, blocks_held
from surefoot.kernels.layout import FORMATS, BlockLayout
from surefoot.policies.bounds import MIXED

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
    for name in CAPACITY:
        result, num_held = run(ServingPlan(name=name, cache=CachePlan(format=name)))
        assert num_held == 0
        ends.append(result.end_s)
    assert ends == sorted(ends, reverse=True)
    assert ends[-1] < 0.8 * ends[0]


def test_capacities_are_the_layouts() -> None:
    """Blocks hold as many tokens as the kernels' do at 64 numbers a head; what is protected is in full."""
    layout = BlockLayout(num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    capacities = [layout.capacity(each) for each in FORMATS]
    assert capacities == [CAPACITY[format_name(each)] for each in FORMATS]
    assert 1 / CAPACITY[MIXED] == pytest.approx(0.75 / capacities[-1] + 0.25 / capacities[-2], rel=0.01)
    cache = CachePlan(format="k4v4", sinks=4, recent=60)
    assert blocks_held(cache, 96) == 6
    assert blocks_held(cache, 96 + 56) == 7
    assert blocks_held(cache, 96 + 57) == 8


def test_every_policy_serves_the_same_day() -> None:
    """The day is the same for a seed; each policy answers for all of it, and no tenant is left out."""
    job = Job(hour=0.5, load=2.0)
    trace = make_day(job)
    assert trace == make_day(job)
    assert {each.flow for each in trace} == {each.id for each in TENANTS}
    rows = [run_day(name, policy, trace, job) for name, policy in policies().items()]
    assert [row.policy for row in rows][-1] == "adaptive"
    assert all(0 <= row.goodput <= 1 and set(row.by_tenant) == {each.id for each in TENANTS} for row in rows)
    lossy = {row.policy for row in rows if row.too_lossy} - {"adaptive"}
    assert lossy == {"k4v4, no drafts", "k4v4, drafts of 8"}
    assert text_of(rows).count("\n") == 1 + len(rows)
