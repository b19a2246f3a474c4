"""Sequences for tests of speculation: tokens, a plan, no engine."""

from __future__ import annotations

import itertools

from surefoot.backends.engine.sequence import Request, Sequence
from surefoot.backends.engine.simulator import without_text
from surefoot.backends.types import GenerateRequest, ServingPlan, SpeculationPlan, TokenPrompt

_keys = itertools.count()


def sequence(
    prompt: list[int],
    output: list[int] | None = None,
    *,
    flow: str = "a",
    kind: str = "",
    proposers: tuple[str, ...] = ("ngram",),
    max_draft: int = 8,
    max_tokens: int = 1000,
    prediction: tuple[int, ...] = (),
    min_gain: float = 0.0,
    tpot_target_s: float | None = None,
) -> Sequence:
    """A sequence that has its prompt and some output."""
    plan = SpeculationPlan(max_draft=max_draft, proposers=proposers, min_gain=min_gain)
    message = GenerateRequest(
        request_id="r",
        model="m",
        prompt=TokenPrompt(tuple(prompt)),
        plan=ServingPlan(name="test", speculation=plan),
        flow=flow,
        kind=kind,
        tpot_target_s=tpot_target_s,
    )
    request = Request(
        message,
        tuple(prompt),
        key=next(_keys),
        max_tokens=max_tokens,
        seed=0,
        arrived_s=0.0,
        prediction_token_ids=prediction,
    )
    (made,) = request.branch(without_text(1))
    for token_id in output or []:
        made.append(token_id)
    return made
