"""What a quantised cache brings: how many requests it holds at once, and what decoding costs in it.

    python -m surefoot.backends.engine.bench_cache --help

Demand: so many requests that in full precision they would take `demand` times the cache, all at once, of an
engine that knows how long answers are; and the same in virtual time, with steps that cost what a GPU's might.
Decoding: one request with a long context and room enough, its tokens a second against full precision's.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
from cyclopts import App, Parameter
from msgspec import Struct

from surefoot.backends.errors import BackendError
from surefoot.backends.types import CachePlan, GenerateRequest, SamplingParams, ServingPlan, TokenPrompt

from .backend import EngineParts
from .cache_rule import BOUNDARY_TOKENS, FULL_NAME, CacheSpace
from .cost_model import StepCost
from .device_runner import bytes_of_block
from .engine import Engine
from .settings import EngineSettings
from .simulator import Machine, SimulationResult, blocks_of, simulate
from .speculation.bench_engine import load_bench_parts, make_bench_engine, say
from .trace import TraceRequest

MIN_TIMES_RESIDENT, MIN_TIMES_THROUGHPUT, MIN_TIMES_DECODE = 2.5, 1.1, 1.0
MIN_TIMES_ON_A_GPU = 1.8

MAX_SEQUENCES = 64
BEGIN_S = 60.0
GPU = StepCost(fixed_s=0.01, row_s=3e-5, further_row_s=3e-5, sequence_s=2e-5, context_s=4e-8)
"""Of a model of some billions of parameters; assumed, not measured."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Job:
    """What to measure."""

    model: Annotated[str, Parameter(help="A catalog name, a GGUF file or a folder")] = "smollm2"
    cache_dir: Annotated[Path, Parameter(help="Prepared weights and kernels")] = Path("~/.cache/surefoot")
    threads: Annotated[int | None, Parameter(help="Threads [one per CPU]")] = None
    formats: Annotated[tuple[str, ...], Parameter(help="Beside full precision")] = ("k8v4", "mixed", "k4v4")
    demand: Annotated[float, Parameter(help="Demand, in caches of full precision")] = 2.5
    requests: Annotated[int, Parameter(help="Requests that make the demand")] = 24
    prompt_tokens: Annotated[int, Parameter(help="Of each of them")] = 768
    output_tokens: Annotated[int, Parameter(help="Of each of them")] = 256
    contexts: Annotated[tuple[int, ...], Parameter(help="Where decoding is timed")] = (2048, 7900)
    rounds: Annotated[int, Parameter(help="How often decoding is timed there, by turns")] = 8
    output: Annotated[Path | None, Parameter(help="Result as JSON")] = None


class Demand(Struct, frozen=True, kw_only=True):
    """A cache that too much was asked of. `mean_running` is over the steps from the first in which all that
    run decode, until half of the requests ended: before it is not full yet, and after that there may be too
    few to fill it.
    """

    format: str
    mean_running: float
    max_running: int
    num_preemptions: int
    num_rows: int
    tokens_per_s: float
    simulated_tokens_per_s: float


class Decoding(Struct, frozen=True, kw_only=True):
    """One request that decodes after a context, by round."""

    format: str
    num_context_tokens: int
    tokens_per_s: list[float]


class CacheResult(Struct, frozen=True):
    """All of it; full precision comes first."""

    demands: list[Demand]
    decodings: list[Decoding]


class Row(Struct, frozen=True, kw_only=True):
    """A figure against full precision's."""

    name: str
    value: float
    times: float
    kept: bool | None = None


DEFAULT_JOB = Job()


def main(*, job: Job = DEFAULT_JOB) -> int:
    """Measure, print the table, and say by the exit status whether the bars are kept."""
    result = measure(job)
    rows = rows_of(result)
    sys.stdout.write("".join(_line(row) for row in rows))
    if job.output is not None:
        job.output.write_bytes(msgspec.json.encode(result) + b"\n")
    return int(any(row.kept is False for row in rows))


def measure(job: Job) -> CacheResult:
    """All formats, one after the other."""
    parts = load_bench_parts(job.model, job.cache_dir, job.threads)
    formats = (FULL_NAME, *job.formats)
    demands = []
    for name in formats:
        say(f"{job.requests} requests in {name} ...")
        demands.append(_demand(job, parts, name))
    decodings = []
    for context in job.contexts:
        say(f"decoding after {context} tokens ...")
        decodings += _decode(job, parts, formats, context)
    return CacheResult(demands, decodings)


def rows_of(result: CacheResult) -> list[Row]:
    """One line a figure; bars for those that have one."""
    full, *others = result.demands
    rows = [Row(name=f"{full.format}: mean running", value=full.mean_running, times=1.0)]
    for demand in others:
        name = demand.format
        resident = demand.mean_running / full.mean_running
        throughput = demand.tokens_per_s / full.tokens_per_s
        preempted = demand.num_preemptions
        rows += [
            _row(f"{name}: mean running", demand.mean_running, resident, MIN_TIMES_RESIDENT),
            _row(f"{name}: tokens/s", demand.tokens_per_s, throughput, MIN_TIMES_THROUGHPUT),
            _row(
                f"{name}: tokens/s on a GPU",
                demand.simulated_tokens_per_s,
                demand.simulated_tokens_per_s / full.simulated_tokens_per_s,
                MIN_TIMES_ON_A_GPU,
            ),
            Row(name=f"{name}: preemptions", value=preempted, times=1.0, kept=preempted == 0),
        ]
    plain = {each.num_context_tokens: each for each in result.decodings if each.format == full.format}
    for each in result.decodings:
        rounds = zip(each.tokens_per_s, plain[each.num_context_tokens].tokens_per_s, strict=True)
        times = median(own / full for own, full in rounds)
        name = f"{each.format}: tokens/s after {each.num_context_tokens}"
        rows.append(_row(name, median(each.tokens_per_s), times, MIN_TIMES_DECODE))
    return rows


def _line(row: Row) -> str:
    verdict = {None: "", True: "kept", False: "MISSED"}[row.kept]
    return f"{row.name:<32}{row.value:10.2f}{row.times:8.2f} x  {verdict}\n"


def _row(name: str, value: float, times: float, least: float) -> Row:
    return Row(name=name, value=value, times=times, kept=times >= least)


def _demand(job: Job, parts: EngineParts, cache_format: str) -> Demand:
    num_blocks = round(job.requests * blocks_of(job.prompt_tokens + job.output_tokens) / job.demand)
    engine = _engine(parts, num_blocks, max_sequences=MAX_SEQUENCES)
    _add(engine, parts, job.requests, BOUNDARY_TOKENS, job.output_tokens, cache_format)
    _run(engine)
    for key in range(job.requests):
        _add(engine, parts, key, job.prompt_tokens, job.output_tokens, cache_format)
    num_rows, begun_s = engine.counters.num_rows, time.perf_counter()
    running = _run_full(engine, job.requests)
    seconds, num_tokens = time.perf_counter() - begun_s, job.requests * job.output_tokens
    simulated_s = simulated(job, engine.cache_space, cache_format).end_s - BEGIN_S
    return Demand(
        format=cache_format,
        mean_running=sum(running) / len(running),
        max_running=max(running),
        num_preemptions=engine.counters.num_preemptions,
        num_rows=engine.counters.num_rows - num_rows,
        tokens_per_s=num_tokens / seconds,
        simulated_tokens_per_s=num_tokens / simulated_s,
    )


def _run_full(engine: Engine, num_requests: int) -> list[int]:
    """Serve them all; how many ran in each step in which the cache was full, as `Demand` has it."""
    running: list[int] = []
    while engine.has_work:
        num_steps = engine.counters.num_steps
        _step(engine)
        now = engine.scheduler.running
        # A step may also wait for company.
        has_run = engine.counters.num_steps > num_steps
        if has_run and 2 * len(engine.keys) > num_requests and (running or all(s.is_decoding for s in now)):
            running.append(len(now))
    return running


def simulated(job: Job, space: CacheSpace, cache_format: str, cost: StepCost = GPU) -> SimulationResult:
    """The same in virtual time; requests come at `BEGIN_S`, after one that shows how long answers are."""

    def traced(arrival_s: float, num_prompt: int) -> TraceRequest:
        return TraceRequest(arrival_s=arrival_s, prompt_tokens=num_prompt, output_tokens=job.output_tokens)

    settings = EngineSettings(cache_bytes=space.num_blocks * space.block_bytes, max_sequences=MAX_SEQUENCES)
    machine = Machine(settings=settings, num_blocks=space.num_blocks, cost=cost, layout=space.layout)
    plan = ServingPlan(name=cache_format, cache=CachePlan(format=cache_format))
    trace = [traced(0.0, BOUNDARY_TOKENS), *[traced(BEGIN_S, job.prompt_tokens)] * job.requests]
    return simulate(trace, machine, promises={}, plan=plan)


def _decode(job: Job, parts: EngineParts, formats: Sequence[str], context: int) -> list[Decoding]:
    """The formats take turns, so that a slow moment of the machine is not one format's alone.

    The prompt is computed once in full precision and once with rotated keys, and then found in the cache. The
    first round meets what is slow once, and does not count.
    """
    engine = _engine(parts, 4 * blocks_of(context + 2 * BOUNDARY_TOKENS), max_sequences=1, prefix_cache=True)
    rounds = [[_decode_once(engine, parts, name, context) for name in formats] for _ in range(job.rounds + 1)]
    by_format = zip(formats, zip(*rounds[1:], strict=True), strict=True)
    return [
        Decoding(format=name, num_context_tokens=context, tokens_per_s=list(speeds))
        for name, speeds in by_format
    ]


def _decode_once(engine: Engine, parts: EngineParts, cache_format: str, context: int) -> float:
    """Tokens a second after the first two, from one boundary to the next and so with one demotion."""
    _add(engine, parts, 0, context, 2 + BOUNDARY_TOKENS, cache_format)
    counters = engine.counters
    begin = counters.num_output_tokens + 2
    while counters.num_output_tokens < begin:
        _step(engine)
    begun_s = time.perf_counter()
    _run(engine)
    return BOUNDARY_TOKENS / (time.perf_counter() - begun_s)


def _engine(parts: EngineParts, num_blocks: int, *, max_sequences: int, prefix_cache: bool = False) -> Engine:
    cache_bytes = num_blocks * bytes_of_block(parts.loaded.model, parts.cache_dtype)
    return make_bench_engine(
        parts, EngineSettings(cache_bytes=cache_bytes, max_sequences=max_sequences, prefix_cache=prefix_cache)
    )


def _add(
    engine: Engine, parts: EngineParts, key: int, num_prompt: int, num_output: int, cache_format: str
) -> None:
    vocab_size = parts.loaded.config.vocab_size
    prompt = tuple(random.Random(key).choices(range(vocab_size), k=num_prompt))
    message = GenerateRequest(
        request_id=str(key),
        model="",
        prompt=TokenPrompt(prompt),
        params=SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True),
        plan=ServingPlan(name=cache_format, cache=CachePlan(format=cache_format)),
    )
    engine.submit(message, prompt, key=key)


def _run(engine: Engine) -> None:
    while engine.has_work:
        _step(engine)


def _step(engine: Engine) -> None:
    for output in engine.step():
        if isinstance(output.event, BackendError):
            raise SystemExit(f"a request failed: {output.event}")


if __name__ == "__main__":
    app = App(name="bench-cache", help_format="plaintext", version_flags=[], default_command=main)
    sys.exit(app(sys.argv[1:], result_action="return_value"))
