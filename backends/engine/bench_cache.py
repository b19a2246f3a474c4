"""What a quantised cache brings: how many requests it holds at once, and what decoding costs in it.

    make bench-cache
    python -m surefoot.backends.engine.bench_cache --help

Demand: so many requests that in full precision they would take 2.5 times the cache, all at once, of an engine
that knows how long answers are; for each shape of requests on a cache of its own. The simulator says beside
what it makes of the same, with the step costs that the engine has learnt.
Decoding: one request with a long context and room enough, its tokens a second against full precision's.
The exit status is 0 if every bar is kept by every format in every shape, 1 if one is missed.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Literal, get_args

import msgspec
from cyclopts import App, Parameter
from msgspec import Struct

from surefoot.backends.types import CachePlan, GenerateRequest, SamplingParams, ServingPlan, TokenPrompt

from .backend import EngineParts
from .bench_engine import load_bench_parts, make_bench_engine, say, step
from .cache_demand import Demand, Residents, Shape, simulated
from .cache_rule import BOUNDARY_TOKENS, FULL_NAME
from .device_runner import bytes_of_block
from .engine import Engine
from .settings import EngineSettings
from .simulator import Machine, blocks_of

MIN_TIMES_RESIDENT, MIN_TIMES_THROUGHPUT, MIN_TIMES_DECODE = 2.5, 1.1, 1.0

MAX_SEQUENCES = 64

SHAPES = (
    Shape(name="many-short", num_requests=24, prompt_tokens=768, output_tokens=256),
    Shape(name="few-long", num_requests=8, prompt_tokens=1536, output_tokens=768),
    Shape(name="long-answers", num_requests=8, prompt_tokens=256, output_tokens=1024),
)
"""At a demand of 2.5 the cache holds 9 of the first in full precision, and 3 of the others."""

ShapeName = Literal["many-short", "few-long", "long-answers"]
SHAPE_NAMES: tuple[ShapeName, ...] = get_args(ShapeName)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Job:
    """What to measure."""

    model: Annotated[str, Parameter(help="A catalog name, a GGUF file or a folder")] = "smollm2"
    cache_dir: Annotated[Path, Parameter(help="Prepared weights and kernels")] = Path("~/.cache/surefoot")
    threads: Annotated[int | None, Parameter(help="Threads [one per CPU]")] = None
    formats: Annotated[tuple[str, ...], Parameter(help="Beside full precision")] = ("k8v4", "mixed", "k4v4")
    demand: Annotated[float, Parameter(help="Demand, in caches of full precision")] = 2.5
    shapes: Annotated[tuple[ShapeName, ...], Parameter(help="Of requests that make the demand")] = SHAPE_NAMES
    contexts: Annotated[tuple[int, ...], Parameter(help="Where decoding is timed")] = (2048, 7900)
    rounds: Annotated[int, Parameter(help="How often decoding is timed there, by turns")] = 6
    output: Annotated[Path | None, Parameter(help="Result as JSON")] = None


class Decoding(Struct, frozen=True, kw_only=True):
    """One request that decodes after a context, by round."""

    format: str
    num_context_tokens: int
    tokens_per_s: list[float]


class CacheResult(Struct, frozen=True):
    """All of it, full precision first in each shape; `simulations` in the order of `demands`."""

    demands: list[Demand]
    simulations: list[Demand]
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
    """All shapes and formats, one after the other."""
    parts = load_bench_parts(job.model, job.cache_dir, job.threads)
    formats = (FULL_NAME, *job.formats)
    demands: list[Demand] = []
    simulations: list[Demand] = []
    for shape in (each for each in SHAPES if each.name in job.shapes):
        for name in formats:
            say(f"{shape.name}: {shape.num_requests} requests in {name} ...")
            engine = _engine(parts, shape.num_blocks(job.demand), max_sequences=MAX_SEQUENCES)
            demands.append(_demand(engine, parts, shape, name))
        simulations += [simulated(shape, _as_learnt(engine), name) for name in formats]
    decodings = []
    for context in job.contexts:
        say(f"decoding after {context} tokens ...")
        decodings += _decode(job, parts, formats, context)
    return CacheResult(demands, simulations, decodings)


def rows_of(result: CacheResult) -> list[Row]:
    """One line a figure; bars for those that have one."""
    rows = []
    for demand, simulation in zip(result.demands, result.simulations, strict=True):
        rows += _demand_rows(demand, _full(result.demands, demand.shape))
        own, full = simulation.tokens_per_s, _full(result.simulations, demand.shape).tokens_per_s
        rows.append(Row(name=f"{_name(demand)}, tokens/s, simulated", value=own, times=own / full))
    plain = {each.num_context_tokens: each for each in result.decodings if each.format == FULL_NAME}
    for each in result.decodings:
        rounds = zip(each.tokens_per_s, plain[each.num_context_tokens].tokens_per_s, strict=True)
        times = median(own / full for own, full in rounds)
        name = f"{each.format}, tokens/s after {each.num_context_tokens}"
        rows.append(_row(name, median(each.tokens_per_s), times, MIN_TIMES_DECODE))
    return rows


def _full(demands: Sequence[Demand], shape: str) -> Demand:
    """A shape in full precision."""
    return next(each for each in demands if (each.shape, each.format) == (shape, FULL_NAME))


def _name(demand: Demand) -> str:
    return f"{demand.shape}, {demand.format}"


def _demand_rows(demand: Demand, full: Demand) -> list[Row]:
    name, preempted = _name(demand), demand.num_preemptions
    resident, speed = demand.mean_running / full.mean_running, demand.tokens_per_s / full.tokens_per_s
    return [
        _row(f"{name}, sequences", demand.mean_running, resident, MIN_TIMES_RESIDENT),
        Row(
            name=f"{name}, preemptions",
            value=preempted,
            times=1.0,
            kept=None if demand is full else preempted == 0,
        ),
        _row(f"{name}, tokens/s", demand.tokens_per_s, speed, MIN_TIMES_THROUGHPUT),
    ]


def _line(row: Row) -> str:
    verdict = {None: "", True: "kept", False: "MISSED"}[row.kept]
    return f"{row.name:<44}{row.value:10.2f}{row.times:8.2f} x  {verdict}\n"


def _row(name: str, value: float, times: float, least: float) -> Row:
    return Row(name=name, value=value, times=times, kept=None if FULL_NAME in name else times >= least)


def _demand(engine: Engine, parts: EngineParts, shape: Shape, cache_format: str) -> Demand:
    """On an engine that has served one answer before, and so knows how long they are."""
    num_requests = shape.num_requests
    _add(engine, parts, num_requests, BOUNDARY_TOKENS, shape.output_tokens, cache_format)
    _run(engine)
    for key in range(num_requests):
        _add(engine, parts, key, shape.prompt_tokens, shape.output_tokens, cache_format)
    begun_s = time.perf_counter()
    residents = Residents(num_requests)
    while engine.has_work:
        running = engine.scheduler.running
        decoding, num_steps = [each for each in running if each.is_decoding], engine.counters.num_steps
        step(engine)
        # A step may also wait for company.
        if engine.counters.num_steps > num_steps:
            residents.observe(decoding, running, len(engine.keys))
    seconds = time.perf_counter() - begun_s
    return Demand(
        shape=shape.name,
        format=cache_format,
        mean_running=residents.mean,
        max_running=residents.most,
        num_preemptions=engine.counters.num_preemptions,
        tokens_per_s=num_requests * shape.output_tokens / seconds,
    )


def _as_learnt(engine: Engine) -> Machine:
    """The engine to simulate: its cache, and what it has learnt that steps cost."""
    space = engine.cache_space
    return Machine(
        settings=EngineSettings(cache_bytes=1, max_sequences=MAX_SEQUENCES, prefix_cache=False),
        num_blocks=space.num_blocks,
        cost=engine.costs.cost,
        layout=space.layout,
    )


def _decode(job: Job, parts: EngineParts, formats: Sequence[str], context: int) -> list[Decoding]:
    """The formats take turns, so that a slow moment of the machine is not one format's alone.

    The prompt is computed once in full precision and once with rotated keys, and then found in the cache. The
    first round meets what is slow once, and does not count.
    """
    num_blocks = 4 * blocks_of(context + 2 * BOUNDARY_TOKENS)
    engine = _engine(parts, num_blocks, max_sequences=1, prefix_cache=True)
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
        step(engine)
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
    token_ids = range(parts.loaded.config.vocab_size)
    prompt = tuple(random.Random(key).choices(token_ids, k=num_prompt))
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
        step(engine)


if __name__ == "__main__":
    app = App(name="bench-cache", help_format="plaintext", version_flags=[], default_command=main)
    sys.exit(app(sys.argv[1:], result_action="return_value"))
