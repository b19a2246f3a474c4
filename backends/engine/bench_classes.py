"""Promises on the real model: a flood beside a trickle, and a cache too small for all.

    make bench-classes
    python -m surefoot.backends.engine.bench_classes --help

Measures what the engine can do with a flood alone, then serves 1.5 times as much, a trickle of interactive
requests among it, with each scheduler; then 64 requests at once with all the cache they want and with half.
The exit status is 0 if every bar is kept, 1 if one is missed or the machine is too slow for the trickle.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter
from msgspec import Struct
from msgspec.structs import replace

from .backend import EngineParts
from .bench_engine import load_bench_parts, say
from .bench_load import Answer, play, served
from .device_runner import bytes_of_block
from .first_come import FirstComeScheduler
from .promise_scheduler import PromiseScheduler
from .scheduler import MakeScheduler
from .settings import EngineSettings
from .simulation_report import percentile
from .simulator import blocks_of
from .trace import Lengths, Promise, TraceRequest, synthetic_trace

PROMISES: Mapping[str, Promise] = {
    "interactive": Promise(priority=200, ttft_target_s=0.5, tpot_target_s=0.1),
    "standard": Promise(priority=100, ttft_target_s=5.0, tpot_target_s=0.25),
    "batch": Promise(),
}
"""What is promised here; what a server promises is its operator's choice."""

OVERLOAD = 1.5
INTERACTIVE_BAR, BATCH_BAR = 0.95, 0.85
NUM_CROWD = 64
CROWD_LENGTHS = Lengths(prompt_tokens=96, output_tokens=96)
DRAIN_S = 15.0
"""What interactive requests get after the last arrival to be counted."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Job:
    """What to measure, and how long."""

    model: Annotated[str, Parameter(help="What to serve")] = "smollm2"
    cache_dir: Annotated[Path, Parameter(help="Folder of prepared weights")] = Path("~/.cache/surefoot")
    threads: Annotated[int | None, Parameter(help="CPU threads [as many as there are]")] = None
    seconds: Annotated[float, Parameter(help="Of arrivals, for each scheduler")] = 60.0
    interactive: Annotated[float, Parameter(help="Interactive requests a second")] = 0.5
    prompt_tokens: Annotated[int, Parameter(help="Mean length of prompts")] = 96
    output_tokens: Annotated[int, Parameter(help="Mean length of answers")] = 64
    max_sequences: Annotated[int, Parameter(help="Sequences that run at once")] = 64
    tpot_target: Annotated[float, Parameter(help="Interactive TPOT target in seconds")] = 0.1
    ttft_target: Annotated[float, Parameter(help="Interactive TTFT target in seconds")] = 0.5
    seed: Annotated[int, Parameter(help="Another seed, other requests")] = 0
    output: Annotated[Path | None, Parameter(help="Store everything in this file, as JSON")] = None


class Arm(Struct, frozen=True, kw_only=True):
    """One scheduler under the flood. Rates in output tokens a second while requests arrive."""

    scheduler: str
    num_interactive: int
    goodput: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    interactive_rate: float
    batch_rate: float
    batch_share: float
    """Of the capacity that interactive requests left."""
    num_preemptions: int
    predicted_share: float
    """Predicted seconds of all steps by those measured."""


class Crowd(Struct, frozen=True, kw_only=True):
    """64 requests at once with half the cache: how many failed or differ from an unconstrained run."""

    num_failed: int
    num_different: int
    num_preemptions: int


class Result(Struct, frozen=True, kw_only=True):
    """All of it."""

    capacity: float
    arms: list[Arm]
    crowd: Crowd


DEFAULT_JOB = Job()


def main(*, job: Job = DEFAULT_JOB) -> int:
    """Measure promises under a flood beside first come, first served, and a cache too small for all."""
    parts = load_bench_parts(job.model, job.cache_dir, job.threads)
    result = asyncio.run(measure(job, replace(parts, cost_file=None)))
    sys.stdout.write(text_of(result))
    if job.output is not None:
        job.output.write_bytes(msgspec.json.encode(result) + b"\n")
    return 0 if is_kept(result) else 1


async def measure(job: Job, parts: EngineParts) -> Result:
    """Capacity, then both arms, then the crowd."""
    say("capacity: a flood alone ...")
    flood = {"batch": 1e3 / job.output_tokens}
    alone, _ = await run_flood(job, parts, PromiseScheduler, flood, job.seconds)
    capacity = rate(alone, job.seconds / 3, job.seconds)
    batch = OVERLOAD * capacity / job.output_tokens - job.interactive
    if batch <= 0:
        raise SystemExit(
            f"{job.interactive:g} interactive requests a second are more than {capacity:.1f} tokens/s"
        )
    arms = []
    for name, make in (("promise", PromiseScheduler), ("first-come", FirstComeScheduler)):
        say(f"{name}: {job.interactive:g} interactive and {batch:.2f} batch requests a second ...")
        rates = {"interactive": job.interactive, "batch": batch}
        answers, predicted_share = await run_flood(job, parts, make, rates, job.seconds)
        arms.append(_arm(job, name, answers, predicted_share, capacity))
    say(f"{NUM_CROWD} requests at once, with all the cache they want and with half ...")
    return Result(capacity=capacity, arms=arms, crowd=await run_crowd(parts))


async def run_flood(
    job: Job, parts: EngineParts, make: MakeScheduler, rates: dict[str, float], seconds: float
) -> tuple[list[Answer], float]:
    """Arrivals for some seconds; returns answers, and predicted by measured seconds of steps."""
    lengths = Lengths(prompt_tokens=job.prompt_tokens, output_tokens=job.output_tokens)
    trace = synthetic_trace(rates, seconds, lengths, job.seed)
    settings = _settings(parts, 8 * 1024 * job.max_sequences // 16, job.max_sequences)
    promises = _promises(job)
    drain_s = DRAIN_S if "interactive" in rates else 0.0
    async with served(parts, settings, make) as backend:
        answers = await play(backend, trace, promises.__getitem__, seconds + drain_s)
        stats = backend.stats
        return answers, stats.step_predicted_s_total / max(stats.step_measured_s_total, 1e-9)


async def run_crowd(parts: EngineParts) -> Crowd:
    """The same requests with all the blocks that they want at once, and with half."""
    trace = [
        replace(each, arrival_s=0.0)
        for each in synthetic_trace({"batch": 1e3}, 1.0, CROWD_LENGTHS, 0)[:NUM_CROWD]
    ]
    wanted = sum(blocks_of(each.prompt_tokens + each.output_tokens) for each in trace)
    roomy = await _crowd_answers(parts, trace, wanted)
    tight = await _crowd_answers(parts, trace, wanted // 2)
    return Crowd(
        num_failed=sum(not answer.is_whole for answer in (*roomy, *tight)),
        num_different=sum(a.token_ids != b.token_ids for a, b in zip(roomy, tight, strict=True)),
        num_preemptions=sum(answer.num_preemptions for answer in tight),
    )


async def _crowd_answers(parts: EngineParts, trace: Sequence[TraceRequest], num_blocks: int) -> list[Answer]:
    async with served(parts, _settings(parts, num_blocks, NUM_CROWD), PromiseScheduler) as backend:
        return await play(backend, trace, PROMISES.__getitem__, 600.0)


def rate(answers: Sequence[Answer], from_s: float, to_s: float) -> float:
    """Output tokens a second between two moments."""
    times = [moment for answer in answers for moment in answer.token_times_s]
    return sum(from_s <= moment < to_s for moment in times) / (to_s - from_s)


def is_kept(result: Result) -> bool:
    """Whether every bar is kept."""
    ours, crowd = result.arms[0], result.crowd
    flood = ours.goodput >= INTERACTIVE_BAR and ours.batch_share >= BATCH_BAR
    return flood and crowd.num_failed == crowd.num_different == 0


def text_of(result: Result) -> str:
    """The result for people."""
    heads = f"{'':<12}{'goodput':>9}{'TTFT p50':>10}{'p99':>8}{'TPOT p50':>10}{'p99':>8}"
    lines = [
        f"capacity {result.capacity:.1f} output tokens/s; times in ms",
        "",
        f"{heads}{'tok/s':>8}{'batch':>8}{'of rest':>9}{'preempted':>11}{'predicted':>11}",
    ]
    for arm in result.arms:
        times = (arm.ttft_p50_s, arm.ttft_p99_s, arm.tpot_p50_s, arm.tpot_p99_s)
        ttft_50, ttft_99, tpot_50, tpot_99 = ("-" if t is None else f"{1000 * t:.0f}" for t in times)
        lines.append(
            f"{arm.scheduler:<12}{arm.goodput:>9.1%}{ttft_50:>10}{ttft_99:>8}{tpot_50:>10}{tpot_99:>8}"
            f"{arm.interactive_rate:>8.1f}{arm.batch_rate:>8.1f}{arm.batch_share:>9.1%}"
            f"{arm.num_preemptions:>11}{arm.predicted_share:>11.2f}"
        )
    crowd = result.crowd
    return "\n".join(lines) + (
        f"\nbars{INTERACTIVE_BAR:>17.0%} interactive goodput, {BATCH_BAR:.0%} of the rest for batch\n\n"
        f"{NUM_CROWD} requests with half the cache: {crowd.num_failed} failed, {crowd.num_different} differ"
        f" (bars: 0), {crowd.num_preemptions} preemptions\n"
        f"{'every bar is kept' if is_kept(result) else 'A BAR IS MISSED'}\n"
    )


def _arm(job: Job, name: str, answers: list[Answer], predicted_share: float, capacity: float) -> Arm:
    promise = _promises(job)["interactive"]
    interactive = [answer for answer in answers if answer.sla_class == "interactive"]
    batch = [answer for answer in answers if answer.sla_class == "batch"]
    # The first third fills the engine.
    window = (job.seconds / 3, job.seconds)
    interactive_rate, batch_rate = rate(interactive, *window), rate(batch, *window)
    ttft_s = [answer.ttft_s for answer in interactive if answer.ttft_s is not None]
    tpot_s = [answer.tpot_s for answer in interactive if answer.tpot_s is not None]
    return Arm(
        scheduler=name,
        num_interactive=len(interactive),
        goodput=sum(answer.keeps(promise) for answer in interactive) / max(len(interactive), 1),
        ttft_p50_s=percentile(ttft_s, 50),
        ttft_p99_s=percentile(ttft_s, 99),
        tpot_p50_s=percentile(tpot_s, 50),
        tpot_p99_s=percentile(tpot_s, 99),
        interactive_rate=interactive_rate,
        batch_rate=batch_rate,
        batch_share=batch_rate / max(capacity - interactive_rate, 1e-9),
        num_preemptions=sum(answer.num_preemptions for answer in answers),
        predicted_share=predicted_share,
    )


def _promises(job: Job) -> dict[str, Promise]:
    interactive = replace(
        PROMISES["interactive"], ttft_target_s=job.ttft_target, tpot_target_s=job.tpot_target
    )
    return {**PROMISES, "interactive": interactive}


def _settings(parts: EngineParts, num_blocks: int, max_sequences: int) -> EngineSettings:
    return EngineSettings(
        cache_bytes=num_blocks * bytes_of_block(parts.loaded.model, parts.cache_dtype),
        max_sequences=max_sequences,
        max_waiting=100_000,
        max_waiting_s=1e6,
    )


if __name__ == "__main__":
    app = App(name="bench-classes", help_format="plaintext", version_flags=[], default_command=main)
    sys.exit(app(sys.argv[1:], result_action="return_value"))
