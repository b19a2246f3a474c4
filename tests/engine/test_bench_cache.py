"""The benchmark of the quantised cache: what it makes of what it measures, and its simulated part."""

from __future__ import annotations

import pytest
import torch

from surefoot.backends.engine.bench_cache import (
    MIN_TIMES_ON_A_GPU,
    CacheResult,
    Decoding,
    Demand,
    Job,
    rows_of,
    simulated_s,
)
from surefoot.backends.engine.cache_rule import CacheSpace
from surefoot.kernels.layout import BlockLayout

LAYOUT = BlockLayout(num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)


@pytest.mark.parametrize("num_requests", [16, 24])
def test_four_bits_serve_a_demand_of_two_and_a_half_caches_sooner(num_requests: int) -> None:
    """With a GPU's step costs, in which more at once take hardly longer, by the bar that was set."""
    space = CacheSpace(
        layout=LAYOUT, num_layers=1, num_blocks=round(64 * num_requests / 2.5), max_context=8192
    )
    job = Job(requests=num_requests)
    full, eight, four = (simulated_s(job, space, name) for name in ("k16v16", "k8v4", "k4v4"))
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
