"""The measurements of `prefix_job`: a server of ours with two tenants, asked one request at a time."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Annotated

import msgspec
from cyclopts import Parameter
from msgspec import Struct

from .client import HttpClient
from .errors import BenchError, RequestFailed
from .machine import Machine, describe_machine
from .served import ServedProcess, ServerJob, on_free_port
from .stream import CompletionStream, Usage

PATH = "/v1/completions"
TOKEN_IDS = range(1000, 10_000)
"""What prompts are drawn from: in the vocabulary of every model, and none of its special tokens."""
NUM_WARMUP = 5
SAY_EVERY = 50


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PrefixJob(ServerJob):
    """What to measure, and how often."""

    prompt_tokens: Annotated[int, Parameter(help="Length of the prompts that are asked twice")] = 1500
    pairs: Annotated[int, Parameter(help="Prompts that are asked twice")] = 10
    probe_tokens: Annotated[int, Parameter(help="Length of the prompts that tenants are told apart by")] = 256
    samples: Annotated[int, Parameter(help="Requests of each kind")] = 200
    seed: Annotated[int, Parameter(help="Of prompts and of the order of requests")] = 0
    output: Annotated[Path | None, Parameter(help="Store everything in this file, as JSON")] = None


class Answered(Struct, frozen=True):
    """One request: until its token came, and prompt tokens that the server had in its cache."""

    ttft_s: float
    num_cached_tokens: int


class PrefixResult(Struct, frozen=True, kw_only=True):
    """Every request. `cold` and `hits` are the same prompts; `others` were just asked by another tenant."""

    schema: str = "surefoot.bench.prefix/1"
    machine: Machine
    model: str
    threads: int
    prompt_tokens: int
    probe_tokens: int
    cold: list[Answered]
    hits: list[Answered]
    others: list[Answered]
    never_seen: list[Answered]


class Asker:
    """One tenant's connection."""

    def __init__(self, client: HttpClient, model: str) -> None:
        self._client = client
        self._model = model

    async def ask(self, prompt: list[int]) -> Answered:
        """Ask for one token. `BenchError` if it does not come, or without the counts."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        stream = CompletionStream()
        start = time.perf_counter()
        try:
            stream.check(await self._client.send("POST", PATH, msgspec.json.encode(body), stream))
        except RequestFailed as error:
            raise BenchError(f"a request failed: {error}") from error
        if stream.last_token_at is None or stream.usage is None:
            raise BenchError("the server sent no token or no usage")
        return Answered(stream.last_token_at - start, _cached(stream.usage))


async def measure(job: PrefixJob, say: Callable[[str], None]) -> PrefixResult:
    """Start the server and ask. `BenchError` if it cannot be measured."""
    job.check_counts()
    model = job.model_file()
    with TemporaryDirectory() as name:
        folder = Path(name)
        keys = [_make_tenant(folder, tenant) for tenant in ("first", "second")]
        say("starting the server")
        async with serve(job, model, folder) as server:
            headers = [{"authorization": f"Bearer {key}"} for key in keys]
            async with (
                HttpClient(server.url, headers[0]) as first,
                HttpClient(server.url, headers[1]) as second,
            ):
                model_id = await served_id(first)
                askers = Asker(first, model_id), Asker(second, model_id)
                return await _measure(job, model, askers, say)


async def _measure(
    job: PrefixJob, model: Path, askers: tuple[Asker, Asker], say: Callable[[str], None]
) -> PrefixResult:
    random = Random(job.seed)
    for asker in askers * NUM_WARMUP:
        await asker.ask(random_prompt(random, job.probe_tokens))
    say(f"{job.pairs} prompts of {job.prompt_tokens} tokens, each twice")
    cold, hits = await ask_twice(job, askers[0], random)
    say(f"{2 * job.samples} prompts of {job.probe_tokens} tokens, half of them the other tenant's")
    others, never_seen = await probe(job, *askers, random, say)
    return PrefixResult(
        machine=describe_machine(),
        model=model.name,
        threads=job.threads,
        prompt_tokens=job.prompt_tokens,
        probe_tokens=job.probe_tokens,
        cold=cold,
        hits=hits,
        others=others,
        never_seen=never_seen,
    )


async def ask_twice(job: PrefixJob, asker: Asker, random: Random) -> tuple[list[Answered], list[Answered]]:
    """Fresh prompts, and each again."""
    cold, hits = [], []
    for _ in range(job.pairs):
        prompt = random_prompt(random, job.prompt_tokens)
        cold.append(await asker.ask(prompt))
        hits.append(await asker.ask(prompt))
    return cold, hits


async def probe(
    job: PrefixJob, first: Asker, second: Asker, random: Random, say: Callable[[str], None]
) -> tuple[list[Answered], list[Answered]]:
    """The second tenant's requests for what the first has just asked, and for what nobody has, shuffled.

    The first asks before each of them, so that the server is in the same state before both kinds.
    """
    others: list[Answered] = []
    never_seen: list[Answered] = []
    kinds = [others, never_seen] * job.samples
    random.shuffle(kinds)
    for number, kind in enumerate(kinds, 1):
        prompt = random_prompt(random, job.probe_tokens)
        await first.ask(prompt)
        fresh = random_prompt(random, job.probe_tokens)
        kind.append(await second.ask(prompt if kind is others else fresh))
        if number % SAY_EVERY == 0:
            say(f"{number} of {len(kinds)}")
    return others, never_seen


def serve(job: PrefixJob, model: Path, tenants: Path) -> ServedProcess:
    """Our server, with the tenants' files in a folder."""
    return on_free_port(job.command(model, f"--tenants={tenants}"), job.log or tenants / "server.log")


def _make_tenant(folder: Path, tenant: str) -> str:
    """Write a tenant's file; returns its key."""
    key = f"sf-{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    (folder / f"{tenant}.toml").write_text(f'id = "{tenant}"\nkey_hashes = ["sha256:{digest}"]\n')
    return key


async def served_id(client: HttpClient) -> str:
    """The model that a server names first. `BenchError` if it names none."""
    head, body = await client.get("/v1/models")
    if head.status != 200:
        raise BenchError(f"the server answered {head.status} when it was asked for its models")
    models: list[dict[str, object]] = msgspec.json.decode(body)["data"]
    return str(models[0]["id"])


def random_prompt(random: Random, num_tokens: int) -> list[int]:
    """Token ids that no cache has seen."""
    return random.choices(TOKEN_IDS, k=num_tokens)


def _cached(usage: Usage) -> int:
    return usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
