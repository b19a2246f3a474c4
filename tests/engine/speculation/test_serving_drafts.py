"""Drafts through the backend: predictions come in as text, counts come out, and outlive an engine."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from surefoot.backends.engine.backend import EngineBackend, EngineParts
from surefoot.backends.engine.speculation.settings import SpeculationSettings
from surefoot.backends.errors import ContextTooLong, EngineFailed
from surefoot.backends.types import (
    BackendState,
    Chunk,
    Event,
    Finished,
    GenerateRequest,
    SamplingParams,
    ServingPlan,
    SpeculationPlan,
    Started,
    TextPrompt,
)

from ..test_backend import FragileEngine, collect, serve, until

COUNTING = " ".join(str(number) for number in range(10, 40))


def asking(*proposers: str, prediction: str | None = None, **fields: Any) -> GenerateRequest:
    """A greedy request that counts on, with drafts of up to 8 tokens."""
    plan = SpeculationPlan(max_draft=8, proposers=proposers)
    return GenerateRequest(
        request_id="r",
        model="m",
        prompt=TextPrompt(COUNTING),
        params=SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
        plan=ServingPlan(name="draft8", speculation=plan),
        prediction=prediction,
        flow="acme",
        kind="text",
        **fields,
    )


def tokens(events: list[Event]) -> list[int]:
    """Of the answer."""
    return [token_id for event in events if isinstance(event, Chunk) for token_id in event.token_ids]


def test_a_prediction_is_drafted_from(parts: EngineParts) -> None:
    """The text that a plain request gave, predicted, is accepted, counted and changes nothing; a plan without
    the proposer ignores it; one longer than any context is refused by name.
    """

    async def use(backend: EngineBackend) -> None:
        plain = await collect(backend, asking())
        text = "".join(event.text for event in plain if isinstance(event, Chunk))
        ignored = await collect(backend, asking(prediction=text))
        assert isinstance(ignored[-1], Finished)
        assert ignored[-1].speculation is None
        predicted = await collect(backend, asking("prediction", prediction=text))
        assert tokens(predicted) == tokens(plain) == tokens(ignored)
        assert isinstance(predicted[-1], Finished)
        counts = predicted[-1].speculation
        assert counts is not None
        assert counts.num_accepted_predicted_tokens == counts.num_accepted_tokens > 0
        (drafts,) = backend.stats.speculation.drafts
        assert (drafts.flow, drafts.proposer) == ("acme", "prediction")
        assert (drafts.num_accepted_tokens, drafts.accepted_at) == (
            counts.num_accepted_tokens,
            counts.accepted_at,
        )
        for proposers in ((), ("prediction",)):
            with pytest.raises(ContextTooLong, match="the prediction's 300000 characters") as refused:
                await collect(backend, asking(*proposers, prediction="x" * 300_000))
            assert refused.value.param == "prediction"

    serve(parts, use, max_model_len=400)


def test_counts_and_outputs_outlive_an_engine(parts: EngineParts) -> None:
    """When an engine is replaced, counters go on from where they were, and a flow's outputs still draft."""

    async def use(backend: EngineBackend) -> None:
        first = await collect(backend, asking("suffix"))
        assert backend.stats.speculation.drafts == ()
        generation = backend.generate(
            replace(asking("ngram"), params=SamplingParams(max_tokens=2000, ignore_eos=True))
        )
        await anext(generation)
        await anext(generation)
        FragileEngine.broken.set()
        with pytest.raises(EngineFailed):
            async for _ in generation:
                pass
        await until(lambda: backend.status.state is BackendState.READY)
        assert not backend._speculator.controller.acceptance.num_requests
        again = await collect(backend, asking("suffix"))
        assert tokens(again) == tokens(first)
        before = backend.stats.speculation
        assert {drafts.proposer for drafts in before.drafts} >= {"suffix"}
        backend.forget_outputs("acme")
        once_more = await collect(backend, asking("suffix"))
        assert isinstance(once_more[-1], Finished)
        assert once_more[-1].speculation is None
        assert tokens(once_more) == tokens(first)
        assert backend.stats.speculation.drafts == before.drafts
        assert (before.max_draft, set(before.proposers or ())) == (16, {"ngram", "prediction", "suffix"})

    serve(parts, use)


def test_synthetic_acceptance_is_marked(parts: EngineParts) -> None:
    """A benchmark's made-up acceptance shows in the fingerprint and in the stats."""

    async def use(backend: EngineBackend) -> None:
        events = await collect(backend, asking("ngram"))
        assert isinstance(events[0], Started)
        assert events[0].system_fingerprint.endswith(":draft8:synthetic")
        assert backend.stats.speculation.is_synthetic
        assert [drafts.proposer for drafts in backend.stats.speculation.drafts] == ["synthetic"]

    serve(parts, use, speculation=SpeculationSettings(synthetic_acceptance=(1.0,)))
