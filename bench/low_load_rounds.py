"""The measurements of `low_load_job`: the same arrivals at our server and at one that plans nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import msgspec
from cyclopts import Parameter
from msgspec import Struct

from .arrivals import Rate, arrivals
from .bars import turned
from .client import HttpClient
from .errors import BenchError, RequestFailed
from .machine import Machine, describe_machine
from .prefix_rounds import PATH, random_prompt, served_id
from .served import ServedProcess, ServerJob, on_free_port
from .stream import CompletionStream

TIERS = ("priority", "default", "flex")
"""One for each of the server's own classes: interactive, standard and batch."""
EMPTY, ALONE, LOAD = "first come, nobody else", "ours, nobody else", "ours, at low load"
ARMS = (EMPTY, ALONE, LOAD)
NUM_WARMUP = 9
CACHE_MEMORY = "256MiB"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LowLoadJob(ServerJob):
    """What to measure, and how often."""

    rounds: Annotated[int, Parameter(help="Rounds of each in turn")] = 3
    requests: Annotated[int, Parameter(help="Requests of each in a round, of all classes together")] = 24
    load: Annotated[float, Parameter(help="Share of time that a server works")] = 0.2
    prompt_tokens: Annotated[int, Parameter(help="Length of prompts")] = 256
    output_tokens: Annotated[int, Parameter(help="Length of answers")] = 16
    seed: Annotated[int, Parameter(help="Of prompts and arrivals")] = 0
    output: Annotated[Path | None, Parameter(help="Store everything in this file, as JSON")] = None


class Arrival(Struct, frozen=True):
    """When a request is due, from the block's start, and the service tier that it asks for."""

    at_s: float
    tier: str


class Timed(Struct, frozen=True, kw_only=True):
    """One request: until its first token, until its end, and whether another one was there as it was sent."""

    tier: str
    ttft_s: float
    total_s: float
    is_beside: bool


class LowLoadResult(Struct, frozen=True, kw_only=True):
    """Every request, by arm. `rate` is that of arrivals, in requests a second."""

    schema: str = "surefoot.bench.low-load/1"
    machine: Machine
    model: str
    threads: int
    prompt_tokens: int
    output_tokens: int
    load: float
    rate: float
    arms: dict[str, list[Timed]]


class Caller:
    """Sends requests to one server."""

    def __init__(self, job: LowLoadJob, client: HttpClient, model: str, random: Random) -> None:
        self._job = job
        self._client = client
        self._model = model
        self._random = random
        self._num_open = 0

    async def ask(self, tier: str) -> Timed:
        """A prompt that nobody has sent. `BenchError` if it is not answered."""
        body = {
            "model": self._model,
            "prompt": random_prompt(self._random, self._job.prompt_tokens),
            "max_tokens": self._job.output_tokens,
            "service_tier": tier,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        stream, is_beside = CompletionStream(), self._num_open > 0
        self._num_open += 1
        start = time.perf_counter()
        try:
            stream.check(await self._client.send("POST", PATH, msgspec.json.encode(body), stream))
        except RequestFailed as error:
            raise BenchError(f"a request failed: {error}") from error
        finally:
            self._num_open -= 1
        if not stream.chunk_times or stream.last_token_at is None:
            raise BenchError("the server sent no token")
        return Timed(
            tier=tier,
            ttft_s=stream.chunk_times[0] - start,
            total_s=stream.last_token_at - start,
            is_beside=is_beside,
        )

    async def one_by_one(self, plan: Sequence[Arrival]) -> list[Timed]:
        """Each when it is due, but not before the one before has ended."""
        begun_s, answers = time.perf_counter(), []
        for due in plan:
            await asyncio.sleep(begun_s + due.at_s - time.perf_counter())
            answers.append(await self.ask(due.tier))
        return answers

    async def as_they_come(self, plan: Sequence[Arrival]) -> list[Timed]:
        """Each when it is due, whoever else is there."""
        begun_s = time.perf_counter()

        async def one(due: Arrival) -> Timed:
            await asyncio.sleep(begun_s + due.at_s - time.perf_counter())
            return await self.ask(due.tier)

        return await asyncio.gather(*(one(due) for due in plan))


async def measure(job: LowLoadJob, say: Callable[[str], None]) -> LowLoadResult:
    """Start both servers and ask them in turn. `BenchError` if it cannot be measured."""
    job.check_counts()
    if not (job.requests >= len(TIERS) and 0 < job.load < 1):
        raise BenchError(
            f"{job.requests} requests at a load of {job.load:g}: expected {len(TIERS)} requests or more, and"
            " a load between 0 and 1"
        )
    model = job.model_file()
    with TemporaryDirectory() as folder:
        log = job.log or Path(folder) / "server.log"
        say("starting the servers")
        async with (
            serve(job, model, "first-come", log) as first_come,
            serve(job, model, "promise", log) as ours,
            HttpClient(first_come.url) as client,
            HttpClient(ours.url) as our_client,
        ):
            random, model_id = Random(job.seed), await served_id(our_client)
            callers = Caller(job, client, model_id, random), Caller(job, our_client, model_id, random)
            rate = job.load / await warm_up(*callers)
            return LowLoadResult(
                machine=describe_machine(),
                model=model.name,
                threads=job.threads,
                prompt_tokens=job.prompt_tokens,
                output_tokens=job.output_tokens,
                load=job.load,
                rate=rate,
                arms=await all_rounds(job, *callers, rate, say),
            )


async def warm_up(first_come: Caller, ours: Caller) -> float:
    """Meet what is slow once; returns the seconds that a request takes."""
    for caller in (first_come, ours):
        answers = [await caller.ask(TIERS[number % len(TIERS)]) for number in range(NUM_WARMUP)]
    return median(answer.total_s for answer in answers)


async def all_rounds(
    job: LowLoadJob, first_come: Caller, ours: Caller, rate: float, say: Callable[[str], None]
) -> dict[str, list[Timed]]:
    """Every round of every arm."""
    answers: dict[str, list[Timed]] = {arm: [] for arm in ARMS}
    turns = {EMPTY: first_come.one_by_one, ALONE: ours.one_by_one, LOAD: ours.as_they_come}
    for number in range(job.rounds):
        plan = planned(job, rate, number)
        for arm in turned(ARMS, number):
            say(f"round {number + 1} of {job.rounds}: {arm}, {plan[-1].at_s:.0f} s")
            answers[arm] += await turns[arm](plan)
    return answers


def planned(job: LowLoadJob, rate: float, number: int) -> list[Arrival]:
    """A round's arrivals, a Poisson process; of each class as many, in random order."""
    tiers = [TIERS[place % len(TIERS)] for place in range(job.requests)]
    seed = job.seed * 1000 + number
    Random(f"tiers-{seed}").shuffle(tiers)
    times = arrivals(Rate(start=rate, end=rate), seed, job.requests, None)
    return [Arrival(at_s, tier) for at_s, tier in zip(times, tiers, strict=True)]


def serve(job: LowLoadJob, model: Path, scheduler: str, log: Path) -> ServedProcess:
    """Our server, with a scheduler of choice."""
    options = f"--scheduler={scheduler}", f"--cache-memory={CACHE_MEMORY}"
    return on_free_port(job.command(model, *options), log)
