"""A bare engine for the benchmarks of speculation: requests in, tokens and the time they took out."""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from surefoot.backends.catalog import default_model_id, locate_model
from surefoot.backends.errors import BackendError
from surefoot.backends.types import (
    BASELINE_PLAN,
    Finished,
    GenerateRequest,
    SamplingParams,
    ServingPlan,
    SpeculationPlan,
    SpeculationUsage,
    TokenPrompt,
)

from ..backend import EngineParts
from ..engine import Engine, EngineCounters
from ..sequence import Request
from ..settings import EngineSettings
from ..start import EngineOptions, load_parts
from .bench_prompts import BenchPrompt

MIB = 1024**2

_keys = itertools.count()


class GroupRun(Struct, frozen=True, kw_only=True):
    """Requests that were answered, so many at once. Only steps in which all of those decode are timed."""

    token_ids: list[tuple[int, ...]]
    num_tokens: int
    seconds: float
    num_drafted: int
    num_accepted: int

    @property
    def token_s(self) -> float:
        """Seconds per token of all of them together; with one at a time the TPOT."""
        return self.seconds / self.num_tokens


def load_bench_parts(model: str, cache_dir: Path, threads: int | None) -> EngineParts:
    """The model as `serve` has it."""
    options = EngineOptions(
        model=locate_model(model),
        model_id=default_model_id(model),
        cache_dir=cache_dir.expanduser(),
        threads=threads,
    )
    return load_parts(options, say)


def make_bench_engine(parts: EngineParts, settings: EngineSettings) -> Engine:
    """An engine that has met every shape once and knows what steps cost."""
    engine = Engine(
        parts.loaded,
        parts.ops,
        settings,
        cache_dtype=parts.cache_dtype,
        counters=EngineCounters(),
        clock=time.perf_counter,
    )
    # The first time may be slow for reasons of its own, and then it measures less.
    for _ in range(2):
        engine.warm_up()
    return engine


def run_group(
    engine: Engine,
    parts: EngineParts,
    group: Sequence[tuple[BenchPrompt, SamplingParams]],
    kind: str,
    plan: SpeculationPlan | None,
    at_once: int,
) -> GroupRun:
    """Answer a group, `at_once` requests at a time: the next one begins as soon as one ends. Raises
    `SystemExit` if a request fails.
    """
    waiting = deque(group)
    requests: list[Request] = []
    finished: list[Finished] = []
    seconds, num_tokens = 0.0, 0
    while waiting or engine.has_work:
        while waiting and len(requests) - len(finished) < at_once:
            requests.append(_add(engine, parts, *waiting.popleft(), kind, plan))
        is_timed = _all_decode(engine, at_once)
        begun_s, num_before = time.perf_counter(), _num_tokens(requests)
        outputs = engine.step()
        if is_timed:
            seconds += time.perf_counter() - begun_s
            num_tokens += _num_tokens(requests) - num_before
        for output in outputs:
            if isinstance(output.event, BackendError):
                raise SystemExit(f"a request of {kind} failed: {output.event}")
            if isinstance(output.event, Finished):
                finished.append(output.event)
    if not num_tokens:
        raise SystemExit(f"{kind}: {at_once} requests never decoded at once")
    usages = [each.speculation or SpeculationUsage() for each in finished]
    return GroupRun(
        token_ids=[_output(request) for request in requests],
        num_tokens=num_tokens,
        seconds=seconds,
        num_drafted=sum(usage.num_draft_tokens for usage in usages),
        num_accepted=sum(usage.num_accepted_tokens for usage in usages),
    )


def _add(
    engine: Engine,
    parts: EngineParts,
    prompt: BenchPrompt,
    params: SamplingParams,
    kind: str,
    plan: SpeculationPlan | None,
) -> Request:
    tokenizer = parts.loaded.tokenizer
    token_ids = tuple(
        tokenizer.encode(tokenizer.render_chat(prompt.messages) + prompt.begun, add_special_tokens=False)
    )
    message = GenerateRequest(
        request_id=kind,
        model="",
        prompt=TokenPrompt(token_ids),
        params=params,
        plan=BASELINE_PLAN if plan is None else ServingPlan(name="drafts", speculation=plan),
        kind=kind,
    )
    prediction = tuple(tokenizer.encode(prompt.prediction, add_special_tokens=False))
    return engine.submit(message, token_ids, key=next(_keys), prediction_token_ids=prediction)


def _all_decode(engine: Engine, at_once: int) -> bool:
    running = engine.scheduler.running
    return len(running) == at_once and all(sequence.is_decoding for sequence in running)


def _output(request: Request) -> tuple[int, ...]:
    return tuple(request.sequences[0].token_ids[request.sequences[0].num_prompt_tokens :])


def _num_tokens(requests: Sequence[Request]) -> int:
    return sum(request.sequences[0].num_output_tokens for request in requests)


def say(text: str) -> None:
    """Progress, beside the result."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
