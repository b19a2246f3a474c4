"""The rounds of `peers`: each server in turn on the same model file, with the same prompts."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from msgspec import Struct

from .bars import turned
from .errors import BenchError
from .machine import Machine, describe_machine
from .peers_loads import PeerLoad, calibrate_words, run_load, warm_up_of, write_prompts
from .peers_memory import resident_bytes
from .peers_servers import (
    LLAMA,
    TRANSFORMERS,
    VLLM,
    Launch,
    PeerServer,
    PeersJob,
    llama_server,
    our_server,
    vllm_server,
)
from .prompts import Calibration
from .run import unseen
from .served import ServedProcess, on_free_port, output_of_module


class PeerRound(Struct, frozen=True, kw_only=True):
    """What one server reached in one round: tokens per second by load.

    `ready_s` and `resident_bytes` (after the loads, of the whole process tree) are the largest of its starts.
    """

    values: dict[str, float]
    ready_s: float
    resident_bytes: int | None


class PeersResult(Struct, frozen=True, kw_only=True):
    """Every round of everyone, by server. `skipped` has the reason why another was not measured.

    `first_ready_s` is that of our start before the rounds, which may have to prepare the weights.
    """

    schema: str = "surefoot.bench.peers/1"
    date: str
    machine: Machine
    model: str
    threads: int
    loads: tuple[PeerLoad, ...]
    first_ready_s: float
    versions: dict[str, str]
    commands: dict[str, list[str]]
    rounds: dict[str, list[PeerRound]]
    skipped: dict[str, str]


class Contenders(Struct, frozen=True, kw_only=True):
    """Who takes part, and why others do not."""

    servers: list[PeerServer]
    skipped: dict[str, str]


class Files(Struct, frozen=True, kw_only=True):
    """What is served, where the logs go, and where prompts are written."""

    model: Path
    log: Path
    folder: Path


async def measure_peers(job: PeersJob, say: Callable[[str], None]) -> PeersResult:
    """All rounds. The order within a round turns, so that nobody always finds the machine warm."""
    job.check_counts()
    with TemporaryDirectory() as name:
        folder = Path(name)
        files = Files(model=job.model_file(), log=job.log or folder / "servers.log", folder=folder)
        return await _measure(job, files, say)


async def _measure(job: PeersJob, files: Files, say: Callable[[str], None]) -> PeersResult:
    contenders = find_contenders(job, files.model)
    skipped = dict(contenders.skipped)
    say("first start of ours, which prepares the weights")
    ours = contenders.servers[0]
    async with start(ours, ours.launches[0], files) as served:
        first_ready_s, calibration = served.ready_s, await calibrate_words(served.url)

    turns = _turns(job, files, contenders.servers, calibration)
    rounds: dict[str, list[PeerRound]] = {name: [] for name in turns}
    may_fail = {server.name for server in contenders.servers if server.may_fail}
    for number in range(job.rounds):
        for name in turned([*turns], number):
            say(f"round {number + 1} of {job.rounds}: {name}")
            try:
                rounds[name].append(await turns[name](number))
            except BenchError as error:
                if name not in may_fail:
                    raise
                skipped[name] = str(error).partition("\n")[0]
                del turns[name], rounds[name]
    measured = [server for server in contenders.servers if server.name in rounds]
    return PeersResult(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=describe_machine(),
        model=files.model.name,
        threads=job.threads,
        loads=job.loads(),
        first_ready_s=first_ready_s,
        versions={server.name: server.version for server in measured} | _transformers_version(job),
        commands={server.name: [launch.described() for launch in server.launches] for server in measured},
        rounds=rounds,
        skipped=skipped,
    )


def find_contenders(job: PeersJob, model: Path) -> Contenders:
    """Ours first, then those that are installed."""
    loads = job.loads()
    servers, skipped = [our_server(job, model, loads)], {}
    for name, make in ((LLAMA, llama_server), (VLLM, vllm_server)):
        try:
            servers.append(make(job, model, loads))
        except BenchError as error:
            skipped[name] = str(error)
    if not job.transformers:
        skipped[TRANSFORMERS] = "not asked for"
    return Contenders(servers=servers, skipped=skipped)


Turn = Callable[[int], Awaitable[PeerRound]]
"""Measures one contender in the round of that number."""


def _turns(
    job: PeersJob, files: Files, servers: list[PeerServer], calibration: Calibration
) -> dict[str, Turn]:
    def turn_of(server: PeerServer) -> Turn:
        return lambda number: server_round(server, files, calibration, number)

    turns = {server.name: turn_of(server) for server in servers}
    if job.transformers:
        turns[TRANSFORMERS] = lambda number: transformers_round(job, files)
    return turns


async def server_round(server: PeerServer, files: Files, calibration: Calibration, number: int) -> PeerRound:
    """All loads on one server, each start with a warm-up of its own."""
    values: dict[str, float] = {}
    ready_s: list[float] = []
    resident: list[int] = []
    for launch in server.launches:
        async with start(server, launch, files) as served:
            ready_s.append(served.ready_s)
            await _run(warm_up_of(launch.loads), served.url, files, calibration, number)
            for load in launch.loads:
                values[load.key] = await _run(load, served.url, files, calibration, number)
            if (size := resident_bytes(served.pid)) is not None:
                resident.append(size)
    return PeerRound(values=values, ready_s=max(ready_s), resident_bytes=max(resident, default=None))


async def _run(load: PeerLoad, url: str, files: Files, calibration: Calibration, number: int) -> float:
    """One load, with the prompts that every server gets in that round. Those of no two loads are alike."""
    file = files.folder / "prompts.jsonl"
    write_prompts(load, calibration, int.from_bytes(f"{load.key}-{number}".encode(), "big"), file)
    return await run_load(load, url, file, unseen)


def start(server: PeerServer, launch: Launch, files: Files) -> ServedProcess:
    """The launch, on a free port."""
    return on_free_port(launch.command, files.log, server.ready_path)


async def transformers_round(job: PeersJob, files: Files) -> PeerRound:
    """`generate` in a process of its own; ready once the weights are there."""
    loads = {load.key: load for load in job.loads()}
    started_at = time.time()
    out = await output_of_module(
        "peer_transformers_loads",
        f"--model={files.model}",
        f"--dtype={job.transformers_dtype}",
        f"--threads={job.threads}",
        f"--prompt-tokens={loads['streams_1'].prompt_tokens}",
        f"--output-tokens={job.output_tokens}",
        f"--prefill-tokens={job.prefill_tokens}",
        f"--past-tokens={job.past_tokens}",
        f"--past-output-tokens={loads['after_past'].output_tokens}",
    )
    said = msgspec.json.decode(out, type=TransformersRound)
    return PeerRound(
        values=said.values, ready_s=said.ready_at - started_at, resident_bytes=said.resident_bytes
    )


class TransformersRound(Struct, frozen=True, kw_only=True):
    """What `peer_transformers_loads` prints: tokens per second by load, when it was ready, and memory."""

    ready_at: float
    values: dict[str, float]
    resident_bytes: int | None


def _transformers_version(job: PeersJob) -> dict[str, str]:
    if not job.transformers:
        return {}
    return {
        TRANSFORMERS: f"{version('transformers')}, torch {version('torch')}, {job.transformers_dtype},"
        " one sequence, without HTTP"
    }
