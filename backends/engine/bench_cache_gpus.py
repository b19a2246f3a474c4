"""What a quantised cache brings on GPUs that nobody measured: shapes of load by GPUs, in virtual time.

    make bench-cache-gpus
    python -m surefoot.backends.engine.bench_cache_gpus --help

The steps are those of `surefoot simulate --gpu` (gpu_times.py): a model by its card, devices by their data
sheets. So many requests come at once that in full precision they would take 2.5 times the cache, and so many
may run. The same on every machine; prints a table in Markdown.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import App, Parameter

from .bench_engine import say
from .cache_demand import Demand, Shape, simulated
from .cache_rule import FULL_NAME
from .gpu_times import GPUS, GpuTimes
from .settings import EngineSettings
from .simulator import blocks_of, gpu_machine

LENGTHS = ((1000, 1000), (1000, 4000), (4000, 2000), (8000, 500), (16000, 2000))
"""Tokens of prompts and answers."""

MIN_TIMES_THROUGHPUT = 1.8
MAX_BATCHED_TOKENS = 2048


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Job:
    """What to simulate."""

    gpus: Annotated[tuple[Literal["l40s", "h100", "h200"], ...], Parameter(help="Devices")] = (
        "l40s",
        "h100",
        "h200",
    )
    formats: Annotated[tuple[str, ...], Parameter(help="Beside full precision")] = ("k8v4", "mixed", "k4v4")
    demand: Annotated[float, Parameter(help="Demand, in caches of full precision")] = 2.5


DEFAULT_JOB = Job()


def main(*, job: Job = DEFAULT_JOB) -> int:
    """Simulate all of it and print the table."""
    heads = ["GPU", "prompt + answer", "sequences", "tokens/s", *job.formats]
    sys.stdout.write(_row(heads) + _row(["---"] * len(heads)))
    for gpu in job.gpus:
        for num_prompt, num_output in LENGTHS:
            say(f"{gpu}, {num_prompt} + {num_output} ...")
            sys.stdout.write(line(job, gpu, num_prompt, num_output))
            sys.stdout.flush()
    return 0


def line(job: Job, gpu: str, num_prompt: int, num_output: int) -> str:
    """A row of the table: full precision, then each format against it."""
    full, *others = (
        demand_of(gpu, num_prompt, num_output, name, job.demand) for name in (FULL_NAME, *job.formats)
    )
    return _row(
        [
            gpu.upper(),
            f"{num_prompt:,} + {num_output:,}",
            f"{full.mean_running:.0f}",
            f"{full.tokens_per_s:,.0f}",
            *(_cell(other, full) for other in others),
        ]
    )


def demand_of(gpu: str, num_prompt: int, num_output: int, cache_format: str, demand: float) -> Demand:
    """So many requests of these lengths as ask `demand` times what the device's cache holds."""
    times = GpuTimes(GPUS[gpu])
    num_requests = round(demand * times.num_blocks / blocks_of(num_prompt + num_output))
    settings = EngineSettings(
        cache_bytes=1,
        max_sequences=num_requests,
        max_batched_tokens=max(MAX_BATCHED_TOKENS, num_requests),
        max_waiting=num_requests,
        max_waiting_s=float("inf"),
        prefix_cache=False,
    )
    shape = Shape(name=gpu, num_requests=num_requests, prompt_tokens=num_prompt, output_tokens=num_output)
    return simulated(shape, gpu_machine(times, settings), cache_format)


def _cell(own: Demand, full: Demand) -> str:
    """Throughput, bold where the bar is kept, and sequences, as multiples; preemptions if there are any."""
    times = f"{own.tokens_per_s / full.tokens_per_s:.2f}"
    kept = own.tokens_per_s >= MIN_TIMES_THROUGHPUT * full.tokens_per_s
    preempted = f", {own.num_preemptions} preempted" if own.num_preemptions else ""
    return f"{f'**{times}**' if kept else times} ({own.mean_running / full.mean_running:.2f}{preempted})"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    app = App(name="bench-cache-gpus", help_format="plaintext", version_flags=[], default_command=main)
    sys.exit(app(sys.argv[1:], result_action="return_value"))
