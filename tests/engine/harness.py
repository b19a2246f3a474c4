"""Drives a bare engine with the real model."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch
from msgspec import Struct

from surefoot.backends.engine.backend import EngineParts
from surefoot.backends.engine.engine import Engine, EngineCounters
from surefoot.backends.engine.promise_scheduler import PromiseScheduler
from surefoot.backends.engine.runner import build_step
from surefoot.backends.engine.scheduler import MakeScheduler
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.errors import BackendError
from surefoot.backends.types import Chunk, GenerateRequest, SamplingParams, TextPrompt

MIB = 1024**2

_keys = itertools.count()


class Answer(Struct):
    """What came of one request: the chunks of its first choice, and its error."""

    chunks: list[Chunk]
    error: BackendError | None = None

    @property
    def text(self) -> str:
        """All text."""
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def token_ids(self) -> list[int]:
        """All tokens."""
        return [token_id for chunk in self.chunks for token_id in chunk.token_ids]


def make_engine(
    parts: EngineParts, *, make_scheduler: MakeScheduler = PromiseScheduler, **limits: int
) -> Engine:
    """An engine of its own for a test."""
    settings = EngineSettings(**{"cache_bytes": 256 * MIB, **limits})
    return Engine(
        parts.loaded,
        parts.ops,
        settings,
        cache_dtype=parts.cache_dtype,
        counters=EngineCounters(),
        clock=time.monotonic,
        make_scheduler=make_scheduler,
        draft=parts.draft,
    )


def run(
    engine: Engine,
    parts: EngineParts,
    requests: Sequence[tuple[str, SamplingParams]],
    promises: Sequence[dict[str, Any]] | None = None,
) -> list[Answer]:
    """Add all requests at once, each with what was promised to it, and step until they are done."""
    answers: dict[int, Answer] = {}
    for (text, params), promised in zip(requests, promises or [{}] * len(requests), strict=True):
        key = next(_keys)
        message = GenerateRequest(
            request_id=str(key), model="", prompt=TextPrompt(text), params=params, **promised
        )
        engine.submit(message, tuple(parts.loaded.tokenizer.encode(text)), key=key)
        answers[key] = Answer([])
    while engine.has_work:
        for output in engine.step():
            if isinstance(output.event, BackendError):
                answers[output.key].error = output.event
            elif isinstance(output.event, Chunk) and output.event.index == 0:
                answers[output.key].chunks.append(output.event)
    assert engine.pool.num_used == 0
    return list(answers.values())


def raw_logits(engine: Engine, parts: EngineParts, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits `[len(token_ids), vocab]` of every position, by the engine's own chunks."""
    message = GenerateRequest(
        request_id="",
        model="",
        prompt=TextPrompt(""),
        params=SamplingParams(logprobs=0, max_tokens=0),
        echo=True,
    )
    request = engine.submit(message, tuple(token_ids), key=next(_keys))
    rows = []
    while request.sequences[0].num_committed < len(token_ids):
        chunks = engine.scheduler.schedule()
        step = build_step(chunks)
        rows.append(engine._runner.run(step).clone())
        engine._runner.commit(step)
        request.sequences[0].num_committed += chunks[0].num_tokens
    engine.abort(request.key)
    return torch.cat(rows)
