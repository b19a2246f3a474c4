"""One run from end to end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime

from msgspec.structs import replace

from .client import HttpClient
from .load import Load
from .machine import describe_machine
from .metrics import summarise
from .progress import Progress
from .prompts import Calibration, Prompts, SyntheticPrompts, read_prompts
from .requester import Requester, Target
from .results import BenchResult, ClientCost
from .server import learn_lengths, meet, read_server
from .settings import BenchSettings

WARMUP_FROM = 1_000_000_000
"""Warm-up requests are numbered from here, so that their prompts are not those of the run."""

View = Callable[[Progress], AbstractAsyncContextManager[object]]
"""Shows a run's progress for as long as it is entered."""


@asynccontextmanager
async def unseen(progress: Progress) -> AsyncIterator[None]:
    """A view that shows nothing."""
    yield


async def run_bench(settings: BenchSettings, view: View) -> BenchResult:
    """Get to know the server, warm it up, load it, sum up. `BenchError` if there is nothing to measure."""
    given = read_prompts(settings.prompts, chat=settings.endpoint == "chat") if settings.prompts else None
    async with HttpClient(settings.url, settings.headers) as client:
        server = await read_server(client, settings)
        target = await meet(client, settings, server)
        calibration = None if given else await learn_lengths(client, settings, target)
        prompts = given or _synthetic(settings, calibration)
        await _warm_up(client, settings, target, prompts)
        date = datetime.now(UTC).isoformat(timespec="seconds")
        progress = Progress()
        load = Load(Requester(client, settings, target, prompts, progress), settings, progress)
        cpu = time.process_time()
        async with view(progress):
            interrupted = await _until_interrupted(load)
        cpu = time.process_time() - cpu
    return BenchResult(
        date=date,
        interrupted=interrupted,
        arguments=settings.described(),
        server=server,
        target=target,
        calibration=calibration,
        machine=describe_machine(),
        client=ClientCost(cpu_s=cpu, cpu_us_per_chunk=cpu * 1e6 / max(progress.num_chunks, 1)),
        summary=summarise(load.records, settings.max_ttft_s, settings.max_tpot_s),
        records=sorted(load.records, key=lambda record: record.index),
    )


def _synthetic(settings: BenchSettings, calibration: Calibration | None) -> SyntheticPrompts:
    assert calibration is not None
    return SyntheticPrompts(settings.prompt_tokens, settings.seed, calibration)


async def _warm_up(client: HttpClient, settings: BenchSettings, target: Target, prompts: Prompts) -> None:
    """Requests like those of the run, that nobody counts."""
    if settings.num_warmup:
        alike = replace(settings, num_requests=settings.num_warmup, duration_s=None, rate=None)
        progress = Progress()
        await Load(Requester(client, alike, target, prompts, progress), alike, progress, WARMUP_FROM).run()


async def _until_interrupted(load: Load) -> bool:
    """Run the load; True if Ctrl-C ended it. What has been recorded by then is kept."""
    try:
        await load.run()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        return True
    return False
