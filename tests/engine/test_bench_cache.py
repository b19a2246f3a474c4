"""The benchmarks of the quantised cache: what they make of what they measure, and their simulated part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from surefoot.backends.engine.backend import EngineParts
from surefoot.backends.engine.bench_cache import (
    MAX_SEQUENCES,
    SHAPES,
    CacheResult,
    Decoding,
    _as_learnt,
    _demand,
    _engine,
    rows_of,
)
from surefoot.backends.engine.bench_cache_gpus import Job, demand_of, line
from surefoot.backends.engine.cache_demand import Demand, Residents, Shape, simulated
from surefoot.backends.engine.cache_rule import PLAN_FORMATS
from surefoot.backends.engine.cost_model import StepCost
from surefoot.backends.engine.sequence import Request
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.engine.simulator import Machine, without_text
from surefoot.backends.types import GenerateRequest, TokenPrompt
from surefoot.kernels.layout import BlockLayout

from .serving import load_tiny

LAYOUT = BlockLayout(num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
CPU = StepCost(fixed_s=0.003, row_s=0.00095, further_row_s=0.00085, sequence_s=0.0001, context_s=1e-6)


def machine_for(shape: Shape, demand: float = 2.5) -> Machine:
    """What the benchmark gives a shape of load."""
    settings = EngineSettings(cache_bytes=1, max_sequences=MAX_SEQUENCES, prefix_cache=False)
    return Machine(settings=settings, num_blocks=shape.num_blocks(demand), cost=CPU, layout=LAYOUT)


@pytest.mark.parametrize("shape", [*SHAPES, replace(SHAPES[0], num_requests=16)], ids=lambda each: each.name)
@pytest.mark.parametrize("cache_format", PLAN_FORMATS)
def test_nobody_starts_to_be_preempted(cache_format: str, shape: Shape) -> None:
    """Where answers are as long as expected, no start takes blocks that others will need before they end,
    though all of them come to their boundaries at nearly the same time.
    """
    assert simulated(shape, machine_for(shape), cache_format).num_preemptions == 0


@pytest.mark.parametrize("shape", SHAPES, ids=lambda each: each.name)
def test_two_and_a_half_times_as_many_are_resident(shape: Shape) -> None:
    """In 4 bits, and in a mixed plan, at a demand of two and a half caches, by the bar that was set."""
    full, mixed, four = (
        simulated(shape, machine_for(shape), name).mean_running for name in ("k16v16", "mixed", "k4v4")
    )
    assert four >= mixed >= 2.5 * full


@pytest.mark.parametrize("cache_format", PLAN_FORMATS)
def test_the_simulator_has_the_engines_counts(parts: EngineParts, tmp_path: Path, cache_format: str) -> None:
    """A real engine has as many sequences in its cache as virtual time says, and preempts as many."""
    tiny = load_tiny("llama-head-dim", parts, tmp_path, head_dim=64)
    shape = Shape(name="small", num_requests=8, prompt_tokens=200, output_tokens=150)
    engine = _engine(tiny, shape.num_blocks(2.5), max_sequences=MAX_SEQUENCES)
    measured = _demand(engine, tiny, shape, cache_format)
    found = simulated(shape, _as_learnt(engine), cache_format)
    assert replace(measured, tokens_per_s=0.0) == replace(found, tokens_per_s=0.0)


def test_residents_are_counted_while_the_cache_is_full() -> None:
    """From the first step that reads no prompt, or in which a request ends, until half of them have ended."""
    request = Request(
        GenerateRequest(request_id="", model="", prompt=TokenPrompt((1,))),
        (1,),
        key=0,
        max_tokens=1,
        seed=0,
        arrived_s=0.0,
    )
    request.branch(without_text(2))
    first, second = request.sequences
    residents = Residents(4)
    for decoding, running, num_open in (
        ([], [first], 4),
        ([first], [first, second], 4),
        ([first, second], [first, second], 4),
        ([second], [first, second], 3),
        ([first, second], [first], 3),
        ([first], [first], 2),
    ):
        residents.observe(decoding, running, num_open)
    assert (residents.counts, residents.most) == ([2, 2, 1], 2)
    busy = Residents(4)
    busy.observe([first], [first, second], 4)
    busy.observe([first], [second], 3)
    assert busy.counts == [1]


def test_a_gpu_that_few_long_requests_fill_serves_more_in_fewer_bits() -> None:
    """With a GPU's step costs, in which more at once take hardly longer, by the bar that was set; each format
    with fewer bits has more tokens a second, and the table says so.
    """
    names = ("k16v16", "k8v4", "k4v4")
    full, eight, four = (demand_of("l40s", 24_000, 2000, name, 2.5).tokens_per_s for name in names)
    assert four >= 1.8 * full
    assert four > eight > full
    row = line(Job(formats=("k4v4",)), "l40s", 24_000, 2000)
    assert row.startswith("| L40S | 24,000 + 2,000 |")
    assert f"**{four / full:.2f}**" in row


def test_rows_are_against_full_precision() -> None:
    """Of demand each figure by that of full precision; of decoding the median over rounds, pair by pair."""
    demands = [
        Demand(
            shape="few",
            format=name,
            mean_running=running,
            max_running=9,
            num_preemptions=preemptions,
            tokens_per_s=speed,
        )
        for name, running, preemptions, speed in (("k16v16", 4.0, 0, 10.0), ("k4v4", 10.0, 1, 11.0))
    ]
    decodings = [
        Decoding(format=name, num_context_tokens=99, tokens_per_s=speeds)
        for name, speeds in (("k16v16", [10.0, 20.0, 10.0]), ("k4v4", [11.0, 18.0, 12.0]))
    ]
    simulations = [replace(each, tokens_per_s=2 * each.mean_running) for each in demands]
    rows = {row.name: (row.times, row.kept) for row in rows_of(CacheResult(demands, simulations, decodings))}
    assert rows["few, k4v4, sequences"] == (2.5, True)
    assert rows["few, k4v4, tokens/s"] == (1.1, True)
    assert rows["few, k4v4, tokens/s, simulated"] == (2.5, None)
    assert rows["few, k4v4, preemptions"] == (1.0, False)
    assert rows["k4v4, tokens/s after 99"] == (1.1, True)
    assert rows["few, k16v16, tokens/s"] == rows["k16v16, tokens/s after 99"] == (1.0, None)
