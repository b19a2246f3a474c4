"""Requests of the benchmarks of speculation: prompts in, tokens and the time they took out."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Generator, Sequence

from msgspec import Struct

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
from ..bench_engine import step
from ..engine import Engine
from ..sequence import Request
from .bench_prompts import BenchPrompt

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


def answer_group(
    engine: Engine,
    parts: EngineParts,
    group: Sequence[tuple[BenchPrompt, SamplingParams]],
    kind: str,
    plan: SpeculationPlan | None,
    at_once: int,
) -> Generator[None, None, GroupRun]:
    """Answer a group, `at_once` requests at a time, a step for each `next`. Where one ends the next begins.

    Raises `SystemExit` if a request fails.
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
        outputs = step(engine)
        if is_timed:
            seconds += time.perf_counter() - begun_s
            num_tokens += _num_tokens(requests) - num_before
        finished += [each.event for each in outputs if isinstance(each.event, Finished)]
        yield
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


def run_in_turns(*groups: Generator[None, None, GroupRun]) -> list[GroupRun]:
    """Answer groups side by side, a step of each in turn: if the machine changes speed it does so for all."""
    runs: dict[int, GroupRun] = {}
    while len(runs) < len(groups):
        for number, group in enumerate(groups):
            if number not in runs:
                try:
                    next(group)
                except StopIteration as end:
                    runs[number] = end.value
    return [runs[number] for number in range(len(groups))]


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
