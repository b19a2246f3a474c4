"""The real scheduler in virtual time: determinism, the bars of mixed load, and what a trace may be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from surefoot.backends.engine.bench_classes import PROMISES
from surefoot.backends.engine.cost_model import StepCost
from surefoot.backends.engine.first_come import FirstComeScheduler
from surefoot.backends.engine.gpu_times import GPUS, GpuTimes, Reached
from surefoot.backends.engine.machine_file import MachineCost, load_machine, save_machine
from surefoot.backends.engine.promise_scheduler import PromiseScheduler
from surefoot.backends.engine.scheduler import MakeScheduler
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.engine.simulation_report import percentile, report_of, report_text
from surefoot.backends.engine.simulator import Machine, Outcome, SimulationResult, gpu_machine, simulate
from surefoot.backends.engine.trace import (
    Lengths,
    TraceError,
    TraceRequest,
    parse_rates,
    read_trace,
    synthetic_trace,
)
from surefoot.backends.types import CachePlan, ServingPlan

COST = StepCost(fixed_s=0.009, row_s=0.00105, further_row_s=0.001, sequence_s=0.0, context_s=1e-6)
"""About what a small model takes on two cores."""
MACHINE = Machine(settings=EngineSettings(cache_bytes=1), num_blocks=2500, cost=COST)
LENGTHS = Lengths(prompt_tokens=128, output_tokens=128)
DURATION_S, SETTLED_S = 240.0, 60.0
"""A flood is looked at from when it has filled the server until it ends."""


def run(
    rates: dict[str, float],
    make: MakeScheduler = PromiseScheduler,
    *,
    seed: int = 0,
    machine: Machine = MACHINE,
    duration_s: float = DURATION_S,
) -> SimulationResult:
    """A synthetic load."""
    trace = synthetic_trace(rates, duration_s, LENGTHS, seed)
    return simulate(trace, machine, make_scheduler=make, promises=PROMISES)


def of_class(result: SimulationResult, name: str) -> list[Outcome]:
    """The outcomes of one class."""
    return [outcome for outcome in result.outcomes if outcome.request.sla_class == name]


def goodput(outcomes: Sequence[Outcome]) -> float:
    """Share served within both targets."""
    return sum(outcome.is_good for outcome in outcomes) / len(outcomes)


def output_rate(outcomes: Sequence[Outcome]) -> float:
    """Output tokens a second while the load is settled; an answer's tokens come evenly after its first."""
    num_tokens = 0.0
    for outcome in outcomes:
        timings = outcome.timings
        if timings is None or timings.ttft_s is None:
            continue
        first_s = outcome.request.arrival_s + timings.ttft_s
        last_s = outcome.request.arrival_s + timings.total_s
        within_s = min(last_s, DURATION_S) - max(first_s, SETTLED_S)
        if within_s > 0 and last_s > first_s:
            num_tokens += outcome.request.output_tokens * within_s / (last_s - first_s)
    return num_tokens / (DURATION_S - SETTLED_S)


def test_a_run_repeats() -> None:
    """The same trace gives the same outcome of every request, to the last bit."""
    rates = {"interactive": 1.0, "standard": 1.0, "batch": 2.0}
    first, again = run(rates, duration_s=30), run(rates, duration_s=30)
    assert first == again
    assert run(rates, seed=1, duration_s=30) != first


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_mixed_load_beyond_capacity(seed: int) -> None:
    """At 1.5 times capacity interactive goodput is 99 % or more, and batch gets 85 % or more of what is left.

    First come, first served keeps hardly a promise on the same trace.
    """
    capacity = output_rate(run({"batch": 4.25}, seed=seed).outcomes)
    rates = {"interactive": 0.5, "batch": 1.5 * capacity / LENGTHS.output_tokens - 0.5}
    ours = run(rates, seed=seed)
    interactive, batch = of_class(ours, "interactive"), of_class(ours, "batch")
    assert goodput(interactive) >= 0.99
    assert output_rate(batch) >= 0.85 * (capacity - output_rate(interactive))
    assert sum(outcome.num_preemptions for outcome in ours.outcomes) == 0
    naive = run(rates, FirstComeScheduler, seed=seed)
    assert goodput(of_class(naive, "interactive")) < 0.5


@pytest.mark.parametrize("num_prompt", [32, 128, 256, 512, 1500])
def test_low_load_waits_for_nothing(num_prompt: int) -> None:
    """At a fifth of what the machine can do each class's median first token comes as soon as on a server that
    is empty and first come, first served, within 5 %, however long the prompts: also in the classes that must
    leave room for an interactive request that may come.
    """
    busy_s = COST.predict(num_prompt, 1, num_prompt**2 // 2) + 16 * COST.predict(1, 1, num_prompt)
    rates = dict.fromkeys(PROMISES, 0.2 / busy_s / len(PROMISES))
    lengths = Lengths(prompt_tokens=num_prompt, output_tokens=16)
    trace = synthetic_trace(rates, 300 * busy_s / 0.2, lengths, 0)
    delays: dict[str, list[float]] = {name: [] for name in PROMISES}
    for outcome in simulate(trace, MACHINE, promises=PROMISES).outcomes:
        if outcome.timings is not None:
            alone_s = first_token_s(outcome.request)
            delays[outcome.request.sla_class].append((outcome.timings.ttft_s or 0.0) / alone_s)
    for name, ratios in delays.items():
        assert len(ratios) > 60, name
        assert percentile(ratios, 50) == pytest.approx(1.0, abs=0.05), name


def first_token_s(request: TraceRequest) -> float:
    """When a request that is alone gets its first token, first come, first served."""
    alone = [msgspec.structs.replace(request, arrival_s=0.0)]
    (outcome,) = simulate(alone, MACHINE, make_scheduler=FirstComeScheduler, promises=PROMISES).outcomes
    assert outcome.timings is not None
    assert outcome.timings.ttft_s is not None
    return outcome.timings.ttft_s


def test_batch_is_as_fast_alone_as_first_come() -> None:
    """With one class and no promise to keep, nothing is lost beside first come, first served."""
    ours, naive = (
        run({"batch": 5.0}, make, duration_s=60) for make in (PromiseScheduler, FirstComeScheduler)
    )
    assert ours.end_s == pytest.approx(naive.end_s, rel=0.02)


def test_half_the_cache_is_no_failure() -> None:
    """With half the blocks that 64 sequences want all are served, at hardly any recomputation."""
    tight = Machine(settings=MACHINE.settings, num_blocks=64 * 16 // 2, cost=COST)
    trace = [
        TraceRequest(
            arrival_s=0.0, prompt_tokens=128, output_tokens=128 - key, max_tokens=128, sla_class="batch"
        )
        for key in range(64)
    ]
    result = simulate(trace, tight, promises=PROMISES)
    assert all(outcome.timings is not None for outcome in result.outcomes)
    wanted = sum(each.prompt_tokens + each.output_tokens - 1 for each in trace)
    assert result.num_rows <= 1.05 * wanted
    assert max(outcome.num_preemptions for outcome in result.outcomes) <= 3


def test_overload_of_promises_is_refused_not_broken() -> None:
    """Twice as much interactive load as fits is refused in part, early, and what is let in is mostly good."""
    result = run({"interactive": 6.0}, duration_s=60)
    refused = [outcome for outcome in result.outcomes if outcome.refusal is not None]
    served = [outcome for outcome in result.outcomes if outcome.timings is not None]
    assert {outcome.refusal for outcome in refused} == {"target"}
    assert len(refused) > len(result.outcomes) / 4
    naive = run({"interactive": 6.0}, FirstComeScheduler, duration_s=60)
    naive_served = [outcome for outcome in naive.outcomes if outcome.timings is not None]
    assert goodput(served) > goodput(naive_served)


def test_a_faster_machine_promises_more() -> None:
    """What one machine cannot keep, one ten times as fast can."""
    rates = {"interactive": 6.0}
    fast = Machine(settings=MACHINE.settings, num_blocks=MACHINE.num_blocks, cost=COST.faster(10))
    assert goodput(run(rates, duration_s=60).outcomes) < 0.9
    assert goodput(run(rates, machine=fast, duration_s=60).outcomes) == 1.0


def test_a_prompt_group_is_computed_once() -> None:
    """Requests of a group and flow find what the first has computed, as they would in the server's prefix
    cache; others, those of another flow, and a server with the cache off compute it all.
    """
    trace = [
        TraceRequest(
            arrival_s=10.0 * number, prompt_tokens=400, output_tokens=4, flow=flow, prompt_group=group
        )
        for number, (flow, group) in enumerate([("a", 7), ("a", 7), ("b", 7), ("a", 8), ("a", None)])
    ]
    outcomes = simulate(trace, MACHINE, promises=PROMISES).outcomes
    cold, again, *others = [outcome.timings.ttft_s or 0.0 for outcome in outcomes if outcome.timings]
    assert again < cold / 5
    assert others == pytest.approx([cold] * 3)
    off = msgspec.structs.replace(MACHINE.settings, prefix_cache=False)
    result = simulate(trace, msgspec.structs.replace(MACHINE, settings=off), promises=PROMISES)
    assert result.num_rows == len(trace) * (400 + 3)


def test_a_report_counts_by_class() -> None:
    """Classes come by priority, refused requests count against goodput, and the text has a line for each."""
    trace = [
        TraceRequest(arrival_s=0.0, prompt_tokens=10, output_tokens=5, sla_class="batch"),
        TraceRequest(arrival_s=0.0, prompt_tokens=10, output_tokens=5, sla_class="interactive"),
        TraceRequest(arrival_s=1.0, prompt_tokens=10, output_tokens=100_000, sla_class="batch"),
    ]
    report = report_of(simulate(trace, MACHINE, promises=PROMISES), "promise", 1.0)
    interactive, batch = report.classes
    assert (interactive.sla_class, batch.sla_class) == ("interactive", "batch")
    assert (batch.num_requests, batch.num_served, batch.refusals) == (2, 1, {"context": 1})
    assert (interactive.goodput, batch.goodput) == (1.0, 0.5)
    assert [line.split()[0] for line in report_text(report).splitlines()[4:]] == ["interactive", "batch"]
    assert msgspec.json.decode(msgspec.json.encode(report))["classes"][1]["num_served"] == 1


FULL_FIRST = ("k16v16", "k8v8", "k8v4", "k4v4")


def crowd(machine: Machine, cache_format: str, **plan: Any) -> SimulationResult:
    """Forty requests at once, which in full precision would take two and a half times the cache."""
    trace = [
        TraceRequest(arrival_s=0.0, prompt_tokens=1000, output_tokens=200, sla_class="batch")
        for _ in range(40)
    ]
    cache = CachePlan(format=cache_format, **plan)
    return simulate(trace, machine, promises=PROMISES, plan=ServingPlan(name="crowd", cache=cache))


SMALL_CACHE = 40 * 1200 // 16 * 2 // 5


@pytest.mark.parametrize(
    "machine",
    [
        Machine(settings=MACHINE.settings, num_blocks=SMALL_CACHE, cost=COST),
        gpu_machine(GpuTimes(GPUS["h100"]), MACHINE.settings, SMALL_CACHE),
    ],
)
def test_fewer_bits_hold_and_serve_more(machine: Machine) -> None:
    """On every kind of machine each format with fewer bits has more sequences in the cache at once and ends
    sooner; in 4 bits all of the crowd are there, two and a half times those of full precision, and nobody is
    preempted.
    """
    results = [crowd(machine, each) for each in FULL_FIRST]
    resident = [each.max_resident for each in results]
    ends = [each.end_s for each in results]
    assert resident == sorted(resident)
    assert ends == sorted(ends, reverse=True)
    assert resident[0] <= 40 / 2.1
    assert resident[-1] == 40
    assert sum(outcome.num_preemptions for outcome in results[-1].outcomes) == 0
    assert all(outcome.timings is not None for each in results for outcome in each.outcomes)


def test_who_shares_a_prompt_starts_beside_the_others() -> None:
    """Blocks that many hold count once where it is decided who starts: all that share a long prompt run at
    once in a cache that a few of them would fill without, and of a smaller one as many as it holds.
    """
    machine = Machine(settings=MACHINE.settings, num_blocks=300, cost=COST)
    prompt = TraceRequest(arrival_s=0.0, prompt_tokens=1601, output_tokens=48, prompt_group=1)
    trace = [prompt, *[replace(prompt, arrival_s=10.0)] * 30]
    shared = simulate(trace, machine, promises={})
    apart = simulate([replace(each, prompt_group=None) for each in trace], machine, promises={})
    tight = simulate(trace, replace(machine, num_blocks=160), promises={})
    assert (shared.max_resident, apart.max_resident) == (30, 2)
    assert 12 <= tight.max_resident <= 18
    for result in (shared, apart, tight):
        assert all(outcome.timings is not None for outcome in result.outcomes)
        assert sum(outcome.num_preemptions for outcome in result.outcomes) == 0


def test_pressure_demotes_only_when_blocks_run_out() -> None:
    """A `pressure` plan takes what full precision takes where there is room, and fewer blocks where not."""
    roomy = Machine(settings=MACHINE.settings, num_blocks=4000, cost=COST)
    tight = Machine(settings=MACHINE.settings, num_blocks=SMALL_CACHE, cost=COST)
    for machine, is_alike in ((roomy, True), (tight, False)):
        full, lazy = crowd(machine, "k16v16"), crowd(machine, "k4v4", demote="pressure")
        assert (full.end_s == lazy.end_s) == is_alike
        assert lazy.end_s <= full.end_s


def test_a_longer_context_fits_in_fewer_bits() -> None:
    """What the cache has no room for in full precision is refused, and served in 4 bits."""
    long = [TraceRequest(arrival_s=0.0, prompt_tokens=1500, output_tokens=200, sla_class="batch")]
    machine = Machine(settings=MACHINE.settings, num_blocks=100, cost=COST)
    compact = ServingPlan(name="k4v4", cache=CachePlan(format="k4v4"))
    assert simulate(long, machine, promises=PROMISES).outcomes[0].refusal == "context"
    assert simulate(long, machine, promises=PROMISES, plan=compact).outcomes[0].timings is not None


def test_a_gpus_steps_follow_its_data_sheet() -> None:
    """A lone token takes the weights' bytes, a long prompt its operations, and memory holds what it has room
    for; the engine's model of costs, which knows less, stays within a factor of two.
    """
    times = GpuTimes(GPUS["h100"], reached=Reached(fixed_s=0.0, bytes_share=1.0, flops_share=1.0))
    one = TraceRequest(arrival_s=0.0, prompt_tokens=1, output_tokens=2)
    machine = gpu_machine(times, EngineSettings(cache_bytes=1, max_batched_tokens=8192))
    decoding = simulate([one], machine, promises={}).outcomes[0].timings
    assert decoding is not None
    assert decoding.tpot_s == pytest.approx(2 * 7.5e9 / 3.35e12, rel=0.01)
    prompt = msgspec.structs.replace(one, prompt_tokens=4000)
    prefill = simulate([prompt], machine, promises={}).outcomes[0].timings
    assert prefill is not None
    attention = 4 * 32 * 32 * 128 * 4000 * 4001 / 2
    assert prefill.ttft_s == pytest.approx((2 * 7.5e9 * 4000 + attention) / 989e12, rel=0.01)
    token_bytes, free = 131_072, 0.9 * 80e9 - 2 * 8.03e9 - 2e9
    assert times.num_blocks == int(free / (16 * token_bytes))
    assert 0.5 < times.believed().predict(64, 64, 64_000) / 0.0092 < 2


def test_a_trace_is_read_in_order(tmp_path: Path) -> None:
    """Lines may come in any order; what a line does not say is its class's."""
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"arrival_s": 2, "prompt_tokens": 3, "output_tokens": 4, "class": "batch", "flow": "acme"}\n\n'
        '{"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 6, "tpot_target_s": 0.5}\n'
    )
    first, second = read_trace(file)
    assert (first.arrival_s, first.sla_class, first.tpot_target_s) == (1.0, "standard", 0.5)
    assert (second.sla_class, second.flow) == ("batch", "acme")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"arrival_s": 0, "prompt_tokens": 1}', "output_tokens"),
        ('{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}', "tokens are 1 or more"),
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "clas": "batch"}', "clas"),
        ("{", "truncated"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    """A line that cannot be used is refused with its number and the reason."""
    file = tmp_path / "trace.jsonl"
    file.write_text('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n' + line)
    with pytest.raises(TraceError, match=f"line 2: .*{said}"):
        read_trace(file)


@pytest.mark.parametrize("word", ["batch", "batch=much", "batch=-1", "bach=1"])
def test_bad_rates_are_refused(word: str) -> None:
    """A rate is a known class and a number above 0."""
    with pytest.raises(TraceError, match=word):
        parse_rates([word], PROMISES)


def test_synthetic_traces_have_their_rates_and_lengths() -> None:
    """Arrivals come at about their rate, lengths within half of their mean, the same for the same seed."""
    trace = synthetic_trace({"batch": 20.0}, 100.0, Lengths(prompt_tokens=100, output_tokens=10), 3)
    assert len(trace) == pytest.approx(2000, rel=0.1)
    assert {50, 150} == {
        min(request.prompt_tokens for request in trace),
        max(request.prompt_tokens for request in trace),
    }
    assert trace == synthetic_trace({"batch": 20.0}, 100.0, Lengths(prompt_tokens=100, output_tokens=10), 3)


def test_step_costs_survive_a_file(tmp_path: Path) -> None:
    """What was saved is loaded; a file that is not there or not whole is no machine."""
    machine = MachineCost(num_blocks=7, cost=COST)
    save_machine(tmp_path / "new" / "cost.json", machine)
    assert load_machine(tmp_path / "new" / "cost.json") == machine
    (tmp_path / "half.json").write_text('{"num_blocks": 7')
    assert load_machine(tmp_path / "half.json") is load_machine(tmp_path / "none.json") is None
