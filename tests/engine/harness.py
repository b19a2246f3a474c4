"""Drives a bare engine, and compares answers by the rule of docs/design.md, "Determinism"."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import torch
from msgspec import Struct

from surefoot.backends.engine.admission import admit
from surefoot.backends.engine.backend import EngineParts
from surefoot.backends.engine.engine import Engine, EngineCounters
from surefoot.backends.engine.runner import build_step
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.errors import BackendError
from surefoot.backends.types import Chunk, GenerateRequest, SamplingParams, TextPrompt
from surefoot.kernels.noise import gumbel_noise

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


def make_engine(parts: EngineParts, **limits: int) -> Engine:
    """An engine of its own for a test."""
    settings = EngineSettings(**{"cache_bytes": 256 * MIB, **limits})
    return Engine(
        parts.loaded,
        parts.ops,
        settings,
        cache_dtype=parts.cache_dtype,
        counters=EngineCounters(),
        clock=time.monotonic,
    )


def run(engine: Engine, parts: EngineParts, requests: Sequence[tuple[str, SamplingParams]]) -> list[Answer]:
    """Add all requests at once and step until they are done."""
    answers: dict[int, Answer] = {}
    for text, params in requests:
        key = next(_keys)
        engine.add(
            admit(
                GenerateRequest(request_id=str(key), model="", prompt=TextPrompt(text), params=params),
                tuple(parts.loaded.tokenizer.encode(text)),
                key=key,
                max_model_len=engine.max_model_len,
                vocab_size=parts.loaded.model.config.vocab_size,
                now_s=time.monotonic(),
            )
        )
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
    request = admit(
        message,
        tuple(token_ids),
        key=next(_keys),
        max_model_len=engine.max_model_len,
        vocab_size=parts.loaded.model.config.vocab_size,
        now_s=0.0,
    )
    engine.add(request)
    rows = []
    while request.sequences[0].num_committed < len(token_ids):
        chunks = engine.scheduler.schedule()
        step = build_step(chunks)
        rows.append(engine._runner.run(step))
        engine._runner.commit(step)
        request.sequences[0].num_committed += chunks[0].num_tokens
    engine.abort(request.key)
    return torch.cat(rows)


def assert_same_answer(
    ours: Answer, other: Answer, request: tuple[str, SamplingParams], parts: EngineParts, width: float
) -> None:
    """Equal, or first different where the two candidates' noised logits are closer than `width`."""
    if ours.token_ids == other.token_ids:
        assert ours.text == other.text
        return
    text, params = request
    pairs = itertools.zip_longest(ours.token_ids, other.token_ids)
    at, pair = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    assert None not in pair, f"one answer is the beginning of the other, {at} tokens long"
    before = [*parts.loaded.tokenizer.encode(text), *ours.token_ids[:at]]
    row = raw_logits(make_engine(parts), parts, before)[-1]
    if params.temperature > 0:
        assert params.seed is not None
        row = row / params.temperature + gumbel_noise(params.seed, 0, len(before), len(row))
    margin = abs(float(row[pair[0]] - row[pair[1]]))
    assert margin <= width, (
        f"answers differ at output token {at} where the margin is {margin:.4g}, above {width:.4g}"
    )
