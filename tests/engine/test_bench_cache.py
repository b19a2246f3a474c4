"""The benchmark of the quantised cache: what it makes of what it measures, and its simulated part."""

from __future__ import annotations

import pytest
import torch

from surefoot.backends.engine.bench_cache import (
    BEGIN_S,
    MIN_TIMES_ON_A_GPU,
    CacheResult,
    Decoding,
    Demand,
    Job,
    rows_of,
    simulated,
)
from surefoot.backends.engine.cache_rule import PLAN_FORMATS, CacheSpace
from surefoot.backends.engine.cost_model import StepCost
from surefoot.kernels.layout import BlockLayout

LAYOUT = BlockLayout(num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)


def space_for(num_requests: int) -> CacheSpace:
    """What the benchmark gives so many of its requests."""
    num_blocks = round(64 * num_requests / 2.5)
    return CacheSpace(layout=LAYOUT, num_layers=1, num_blocks=num_blocks, max_context=8192)


@pytest.mark.parametrize("num_requests", [16, 20, 24, 32])
@pytest.mark.parametrize("cache_format", PLAN_FORMATS)
def test_nobody_starts_to_be_preempted(cache_format: str, num_requests: int) -> None:
    """Where answers are as long as expected, no start takes blocks that others will need before they end,
    though all of them come to their boundaries at nearly the same time.
    """
    cost = StepCost(fixed_s=0.006, row_s=0.0012, further_row_s=0.0012, sequence_s=0.0005, context_s=1e-7)
    result = simulated(Job(requests=num_requests), space_for(num_requests), cache_format, cost)
    assert all(outcome.refusal is None for outcome in result.outcomes)
    assert sum(outcome.num_preemptions for outcome in result.outcomes) == 0


@pytest.mark.parametrize("num_requests", [16, 24])
def test_four_bits_serve_a_demand_of_two_and_a_half_caches_sooner(num_requests: int) -> None:
    """With a GPU's step costs, in which more at once take hardly longer, by the bar that was set."""
    job, space = Job(requests=num_requests), space_for(num_requests)
    full, eight, four = (simulated(job, space, name).end_s - BEGIN_S for name in ("k16v16", "k8v4", "k4v4"))
    assert full >= MIN_TIMES_ON_A_GPU * four
    assert full > eight > four


def test_rows_are_against_full_precision() -> None:
    """Of demand each figure by that of full precision; of decoding the median over rounds, pair by pair."""
    demands = [
        Demand(
            format=name,
            mean_running=running,
            max_running=9,
            num_preemptions=preemptions,
            num_rows=1,
            tokens_per_s=speed,
            simulated_tokens_per_s=10.0,
        )
        for name, running, preemptions, speed in (("k16v16", 4.0, 0, 10.0), ("k4v4", 10.0, 1, 11.0))
    ]
    decodings = [
        Decoding(format=name, num_context_tokens=99, tokens_per_s=speeds)
        for name, speeds in (("k16v16", [10.0, 20.0, 10.0]), ("k4v4", [11.0, 18.0, 12.0]))
    ]
    rows = {row.name: (row.times, row.kept) for row in rows_of(CacheResult(demands, decodings))}
    assert rows["k4v4: mean running"] == (2.5, True)
    assert rows["k4v4: tokens/s"] == (1.1, True)
    assert rows["k4v4: tokens/s on a GPU"] == (1.0, False)
    assert rows["k4v4: preemptions"] == (1.0, False)
    assert rows["k4v4: tokens/s after 99"] == (1.1, True)
    assert rows["k16v16: tokens/s after 99"][0] == 1.0
