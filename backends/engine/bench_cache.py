"""What a quantised cache brings: how many requests it holds at once, and what decoding costs in it.

    python -m surefoot.backends.engine.bench_cache --help

Demand: so many requests that in full precision they would take `demand` times the cache, all at once.
Decoding: one request with a long context and room enough, its tokens a second against full precision's.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter
from msgspec import Struct

from surefoot.backends.errors import BackendError
from surefoot.backends.types import CachePlan, GenerateRequest, SamplingParams, ServingPlan, TokenPrompt
from surefoot.kernels.layout import BlockLayout

from .admission import admit
from .backend import EngineParts
from .cache_rule import FULL_NAME
from .engine import Engine
from .settings import EngineSettings
from .simulator import blocks_of
from .speculation.bench_engine import load_bench_parts, make_bench_engine, say

MIN_TIMES_RESIDENT, MIN_TIMES_THROUGHPUT, MIN_TIMES_DECODE = 2.5, 1.1, 1.0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Job:
    """What to measure."""

    model: Annotated[str, Parameter(help="A catalog name, a GGUF file or a folder")] = "smollm2"
    cache_dir: Annotated[Path, Parameter(help="Prepared weights and kernels")] = Path("~/.cache/surefoot")
    threads: Annotated[int | None, Parameter(help="Threads [one per CPU]")] = None
    formats: Annotated[tuple[str, ...], Parameter(help="Beside full precision")] = ("k8v4", "k4v4")
    demand: Annotated[float, Parameter(help="Demand, in caches of full precision")] = 2.5
    requests: Annotated[int, Parameter(help="Requests that make the demand")] = 20
    prompt_tokens: Annotated[int, Parameter(help="Of each of them")] = 768
    output_tokens: Annotated[int, Parameter(help="Of each of them")] = 256
    contexts: Annotated[tuple[int, ...], Parameter(help="Where decoding is timed")] = (2048, 7900)
    decodes: Annotated[int, Parameter(help="Tokens that are timed there")] = 64
    rounds: Annotated[int, Parameter(help="How often decoding is timed; the best counts")] = 3
    output: Annotated[Path | None, Parameter(help="Result as JSON")] = None


class Demand(Struct, frozen=True, kw_only=True):
    """A cache that too much was asked of. `mean_running` is over the steps until half of the requests ended:
    after that there may be too few of them to fill it.
    """

    format: str
    mean_running: float
    max_running: int
    num_preemptions: int
    tokens_per_s: float


class Decoding(Struct, frozen=True, kw_only=True):
    """One request that decodes after a context."""

    format: str
    num_context_tokens: int
    tokens_per_s: float


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
            Row(name=f"{name}: preemptions", value=preempted, times=1.0, kept=preempted == 0),
        ]
    plain = {each.num_context_tokens: each for each in result.decodings if each.format == full.format}
    for each in result.decodings:
        times = each.tokens_per_s / plain[each.num_context_tokens].tokens_per_s
        name = f"{each.format}: tokens/s after {each.num_context_tokens}"
        rows.append(_row(name, each.tokens_per_s, times, MIN_TIMES_DECODE))
    return rows


def _line(row: Row) -> str:
    verdict = {None: "", True: "kept", False: "MISSED"}[row.kept]
    return f"{row.name:<32}{row.value:10.2f}{row.times:8.2f} x  {verdict}\n"


def _row(name: str, value: float, times: float, least: float) -> Row:
    return Row(name=name, value=value, times=times, kept=times >= least)


def _demand(job: Job, parts: EngineParts, cache_format: str) -> Demand:
    num_blocks = round(job.requests * blocks_of(job.prompt_tokens + job.output_tokens) / job.demand)
    engine = _engine(parts, num_blocks, max_sequences=max(64, job.requests))
    for key in range(job.requests):
        _add(engine, parts, key, job.prompt_tokens, job.output_tokens, cache_format)
    running: list[int] = []
    begun_s = time.perf_counter()
    while engine.has_work:
        num_steps = engine.counters.num_steps
        _step(engine)
        # A step may also wait for company.
        if engine.counters.num_steps > num_steps and 2 * len(engine.keys) > job.requests:
            running.append(len(engine.scheduler.running))
    seconds = time.perf_counter() - begun_s
    return Demand(
        format=cache_format,
        mean_running=sum(running) / len(running),
        max_running=max(running),
        num_preemptions=engine.counters.num_preemptions,
        tokens_per_s=job.requests * job.output_tokens / seconds,
    )


def _decode(job: Job, parts: EngineParts, formats: Sequence[str], context: int) -> list[Decoding]:
    """The formats take turns, so that a slow moment of the machine is not one format's alone."""
    best = dict.fromkeys(formats, 0.0)
    for _ in range(job.rounds):
        for name in formats:
            best[name] = max(best[name], _decode_once(job, parts, name, context))
    return [Decoding(format=name, num_context_tokens=context, tokens_per_s=best[name]) for name in formats]


def _decode_once(job: Job, parts: EngineParts, cache_format: str, context: int) -> float:
    """Tokens a second after the first two, which meet what is slow once."""
    engine = _engine(parts, 2 * blocks_of(context + job.decodes), max_sequences=1)
    _add(engine, parts, 0, context, job.decodes + 2, cache_format)
    while engine.counters.num_output_tokens < 2:
        _step(engine)
    begun_s = time.perf_counter()
    while engine.has_work:
        _step(engine)
    return job.decodes / (time.perf_counter() - begun_s)


def _engine(parts: EngineParts, num_blocks: int, *, max_sequences: int) -> Engine:
    config = parts.loaded.config
    layout = BlockLayout(num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=parts.cache_dtype)
    cache_bytes = num_blocks * config.num_layers * layout.block_bytes
    return make_bench_engine(
        parts, EngineSettings(cache_bytes=cache_bytes, max_sequences=max_sequences, prefix_cache=False)
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
    request = admit(
        message,
        prompt,
        key=key,
        max_model_len=engine.max_model_len,
        vocab_size=vocab_size,
        now_s=time.perf_counter(),
        space=engine.cache_space,
    )
    engine.add(request)


def _step(engine: Engine) -> None:
    for output in engine.step():
        if isinstance(output.event, BackendError):
            raise SystemExit(f"a request failed: {output.event}")


if __name__ == "__main__":
    app = App(name="bench-cache", help_format="plaintext", version_flags=[], default_command=main)
    sys.exit(app(sys.argv[1:], result_action="return_value"))
