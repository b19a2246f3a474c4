"""The rounds of `main_job`: our server and transformers in turn, on the same model file."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import msgspec
from cyclopts import Parameter
from msgspec import Struct

from .bars import turned
from .errors import BenchError
from .keep_alive import watch_waiting
from .lengths import parse_length
from .loop_lag import LagProbe
from .machine import Machine, describe_machine
from .metrics import percentile
from .results import BenchResult
from .run import View, run_bench, unseen
from .served import ServedProcess, ServerJob, on_free_port, output_of_module
from .settings import BenchSettings

NUM_STREAMS = 8
NUM_WAITING = 100
KEEP_ALIVE_S = 1.0
LONG_OUTPUT = 1500
"""Tokens that keep the running streams busy while others wait."""
REQUESTS_EACH = 2
"""Requests per stream in a round; transformers makes as many."""
DTYPES = ("float32", "bfloat16")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Job(ServerJob):
    """What to measure, and how long."""

    rounds: Annotated[int, Parameter(help="Rounds of each in turn")] = 3
    prompt_tokens: Annotated[int, Parameter(help="Length of prompts")] = 64
    output_tokens: Annotated[int, Parameter(help="Length of answers")] = 128
    peers: Annotated[bool, Parameter(help="Measure transformers too")] = True
    watch_s: Annotated[float, Parameter(help="How long to watch the streams that wait")] = 8.0
    output: Annotated[Path | None, Parameter(help="Store everything in this file, as JSON")] = None


class Files(Struct, frozen=True, kw_only=True):
    """What is served, and where the server's log goes."""

    model: Path
    log: Path


class OurRound(Struct, frozen=True, kw_only=True):
    """What our server reached in one round. None for what it does not tell of itself."""

    ready_s: float
    one_stream_tokens_per_s: float
    streams_tokens_per_s: float
    ping_p99_s: float
    own_lag_p99_s: float | None
    loop_cpu_per_token_s: float | None
    keep_alive_late_p99_s: float
    num_keep_alives: int


class JobResult(Struct, frozen=True, kw_only=True):
    """Every round of everyone. `transformers` has tokens per second by dtype.

    `first_ready_s` is that of a start before the rounds, which may have to prepare the weights.
    """

    schema: str = "surefoot.bench.main/1"
    machine: Machine
    model: str
    threads: int
    first_ready_s: float
    ours: list[OurRound]
    transformers: dict[str, list[float]]


async def measure(job: Job, say: Callable[[str], None]) -> JobResult:
    """All rounds. The order within a round turns, so that nobody always finds the machine warm."""
    job.check_counts()
    with TemporaryDirectory() as folder:
        files = Files(model=job.model_file(), log=job.log or Path(folder) / "server.log")
        return await _measure(job, files, say)


async def _measure(job: Job, files: Files, say: Callable[[str], None]) -> JobResult:
    ours: list[OurRound] = []
    peers: dict[str, list[float]] = {dtype: [] for dtype in DTYPES} if job.peers else {}

    async def run_ours() -> None:
        ours.append(await our_round(job, files))

    def run_peer(dtype: str) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            peers[dtype].append(await transformers_tokens_per_s(job, files, dtype))

        return run

    turns: dict[str, Callable[[], Awaitable[None]]] = {"surefoot": run_ours}
    turns |= {f"transformers {dtype}": run_peer(dtype) for dtype in peers}
    say("first start, which prepares the weights")
    async with serve(job, files) as server:
        first_ready_s = server.ready_s
    for number in range(job.rounds):
        for name in turned([*turns], number):
            say(f"round {number + 1} of {job.rounds}: {name}")
            await turns[name]()
    return JobResult(
        machine=describe_machine(),
        model=files.model.name,
        threads=job.threads,
        first_ready_s=first_ready_s,
        ours=ours,
        transformers=peers,
    )


async def our_round(job: Job, files: Files) -> OurRound:
    """One start of our server, and all that is measured on it."""
    async with serve(job, files) as server:
        one = await load(job, server.url, 1, unseen)
        probe = LagProbe(server.url)
        streams = await load(job, server.url, NUM_STREAMS, probe)
        body = {"model": one.target.model, "prompt": "Once", "max_tokens": LONG_OUTPUT, "ignore_eos": True}
        waiting = await watch_waiting(server.url, body, NUM_STREAMS, NUM_WAITING, KEEP_ALIVE_S, job.watch_s)
        if not probe.ping_s:
            raise BenchError(f"none of {probe.num_lost} pings was answered")
        return OurRound(
            ready_s=server.ready_s,
            one_stream_tokens_per_s=one.summary.output_tokens_per_s,
            streams_tokens_per_s=streams.summary.output_tokens_per_s,
            ping_p99_s=percentile(sorted(probe.ping_s), 99),
            own_lag_p99_s=probe.own_p99_s,
            loop_cpu_per_token_s=(
                None if probe.own_cpu_s is None else probe.own_cpu_s / streams.summary.num_output_tokens
            ),
            keep_alive_late_p99_s=percentile(sorted(waiting.late_s), 99),
            num_keep_alives=waiting.num_comments,
        )


def serve(job: Job, files: Files) -> ServedProcess:
    """Our server, with as many sequences at once as there are streams, so that more of them wait."""
    options = f"--max-sequences={NUM_STREAMS}", f"--keep-alive-s={KEEP_ALIVE_S}"
    return on_free_port(job.command(files.model, *options), files.log)


async def load(job: Job, url: str, num_streams: int, view: View) -> BenchResult:
    """A closed loop on our server. `BenchError` unless every request was good and as long as asked for."""
    settings = BenchSettings(
        url=url,
        endpoint="completions",
        concurrency=num_streams,
        num_requests=REQUESTS_EACH * num_streams,
        num_warmup=num_streams,
        prompt_tokens=parse_length(str(job.prompt_tokens)),
        output_tokens=parse_length(str(job.output_tokens)),
        extra={"temperature": 0},
    )
    result = await run_bench(settings, view)
    if result.summary.num_failed:
        raise BenchError(f"requests failed: {result.summary.errors}")
    if result.summary.num_output_tokens != REQUESTS_EACH * num_streams * job.output_tokens:
        raise BenchError(f"answers were shorter than asked for: {result.summary.output_tokens}")
    return result


async def transformers_tokens_per_s(job: Job, files: Files, dtype: str) -> float:
    """One stream of `generate`, prompt included, in a process of its own."""
    out = await output_of_module(
        "peer_transformers",
        f"--model={files.model}",
        f"--dtype={dtype}",
        f"--threads={job.threads}",
        f"--prompt-tokens={job.prompt_tokens}",
        f"--output-tokens={job.output_tokens}",
        f"--repeats={REQUESTS_EACH}",
    )
    seconds: list[float] = msgspec.json.decode(out)["seconds"]
    return job.output_tokens * len(seconds) / sum(seconds)
