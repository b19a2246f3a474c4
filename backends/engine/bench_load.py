"""Loads of `bench_classes`: a flood and a trickle, or everything at once, on a real engine."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

from msgspec import Struct, field

from surefoot.backends.errors import BackendError
from surefoot.backends.types import Chunk, Finished, GenerateRequest, SamplingParams, TokenPrompt

from .backend import EngineBackend, EngineParts
from .engine import Engine
from .scheduler import MakeScheduler
from .settings import EngineSettings
from .trace import Promise, TraceRequest


class Answer(Struct, kw_only=True):
    """What came of one request; times since the load began, tokens with the moment each came."""

    arrival_s: float
    sla_class: str
    token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    is_whole: bool = False
    num_preemptions: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Until the first token; None if none came."""
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean gap after the first token; None with fewer than two."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    def keeps(self, promise: Promise) -> bool:
        """Whether it is whole and within both targets."""
        ttft_s, tpot_s = promise.ttft_target_s, promise.tpot_target_s
        return (
            self.is_whole
            and (ttft_s is None or (self.ttft_s or 0.0) <= ttft_s)
            and (tpot_s is None or (self.tpot_s or 0.0) <= tpot_s)
        )


@asynccontextmanager
async def served(
    parts: EngineParts, settings: EngineSettings, make_scheduler: MakeScheduler
) -> AsyncIterator[EngineBackend]:
    """A backend with a scheduler of choice, stopped without waiting for what still runs."""
    backend = EngineBackend(
        "bench", lambda: parts, settings, make_engine=partial(Engine, make_scheduler=make_scheduler)
    )
    await backend.start()
    try:
        yield backend
    finally:
        await backend.stop(0)


async def play(
    backend: EngineBackend,
    trace: Sequence[TraceRequest],
    promise_of: Callable[[str], Promise],
    until_s: float,
) -> list[Answer]:
    """Send each request at its time; at `until_s` end what is not done. Answers are in the trace's order."""
    begun_s = time.monotonic()
    answers = [Answer(arrival_s=each.arrival_s, sla_class=each.sla_class) for each in trace]

    async def one(number: int, traced: TraceRequest) -> None:
        await asyncio.sleep(begun_s + traced.arrival_s - time.monotonic())
        message = message_of(number, traced, promise_of(traced.sla_class))
        await _collect(backend, message, answers[number], begun_s)

    await _all_until([one(number, traced) for number, traced in enumerate(trace)], until_s)
    return answers


def message_of(number: int, traced: TraceRequest, promise: Promise) -> GenerateRequest:
    """A request with a random prompt; half of them greedy, half sampled, the same for the same number."""
    source = random.Random(number)
    return GenerateRequest(
        request_id=str(number),
        model="bench",
        prompt=TokenPrompt(tuple(source.randrange(1000, 20_000) for _ in range(traced.prompt_tokens))),
        params=SamplingParams(
            temperature=number % 2 * 1.0,
            seed=number,
            ignore_eos=True,
            max_tokens=traced.output_tokens,
        ),
        priority=promise.priority,
        ttft_target_s=promise.ttft_target_s,
        tpot_target_s=promise.tpot_target_s,
        flow=traced.sla_class,
    )


async def _collect(backend: EngineBackend, message: GenerateRequest, answer: Answer, begun_s: float) -> None:
    try:
        async with aclosing(backend.generate(message)) as events:
            async for event in events:
                if isinstance(event, Chunk):
                    answer.token_ids += event.token_ids
                    answer.token_times_s += [time.monotonic() - begun_s] * len(event.token_ids)
                elif isinstance(event, Finished):
                    answer.is_whole = True
                    answer.num_preemptions = event.num_preemptions
    except BackendError as error:
        answer.error = f"{type(error).__name__}: {error}"


async def _all_until(work: Sequence[Coroutine[Any, Any, None]], until_s: float) -> None:
    tasks = [asyncio.create_task(each) for each in work]
    _, late = await asyncio.wait(tasks, timeout=until_s)
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
