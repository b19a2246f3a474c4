"""The engine with the real model: drafts change no token, no logprob and no end of an answer."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from surefoot.backends.engine.backend import EngineParts
from surefoot.backends.engine.cost_model import StepCost
from surefoot.backends.engine.engine import Engine, EngineCounters
from surefoot.backends.engine.first_come import FirstComeScheduler
from surefoot.backends.engine.promise_scheduler import PromiseScheduler
from surefoot.backends.engine.scheduler import MakeScheduler
from surefoot.backends.engine.sequence import Request
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.engine.speculation.settings import SpeculationSettings
from surefoot.backends.engine.step_input import StepInput
from surefoot.backends.types import (
    BASELINE_PLAN,
    Chunk,
    Finished,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    ServingPlan,
    SpeculationPlan,
    TextPrompt,
)

MIB = 1024**2
REPEATING = (
    "Copy the list exactly.\nList: red apple, green pear, blue plum, red apple, green pear, blue plum\n"
    "Copy: red apple, green pear, blue plum, red"
)
CODE = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n"
FREE = "Once upon a time, in a village by the sea, there lived"
PROMPTS = (REPEATING, CODE, FREE)
DRAFTS = SpeculationPlan(max_draft=8, proposers=("prediction", "ngram"))

_keys = itertools.count()


def make_eager(engine: Engine) -> None:
    """Set costs that make every draft pay, so that long drafts are verified whatever they are worth."""
    engine.costs.frozen = True
    engine.costs.refit(StepCost(fixed_s=1.0, row_s=1e-9, further_row_s=1e-9, sequence_s=0.0))


def make_engine(
    parts: EngineParts, make_scheduler: MakeScheduler = PromiseScheduler, **limits: int
) -> Engine:
    """An engine that drafts whenever a proposer has an idea."""
    engine = Engine(
        parts.loaded,
        parts.ops,
        EngineSettings(**{"cache_bytes": 256 * MIB, **limits}),
        cache_dtype=parts.cache_dtype,
        counters=EngineCounters(),
        clock=time.monotonic,
        make_scheduler=make_scheduler,
    )
    make_eager(engine)
    return engine


def add(
    engine: Engine,
    parts: EngineParts,
    prompt: str,
    params: SamplingParams,
    plan: SpeculationPlan | None,
    prediction: str = "",
) -> Request:
    """Queue a request."""
    encode = parts.loaded.tokenizer.encode
    message = GenerateRequest(
        request_id="r",
        model="",
        prompt=TextPrompt(prompt),
        params=params,
        plan=BASELINE_PLAN if plan is None else ServingPlan(name="drafts", speculation=plan),
    )
    return engine.submit(
        message, tuple(encode(prompt)), key=next(_keys), prediction_token_ids=tuple(encode(prediction))
    )


class Answer:
    """All choices of a request, joined: text, tokens, logprobs, ends; and its last event."""

    def __init__(self, n: int) -> None:
        self.text = [""] * n
        self.token_ids: list[tuple[int, ...]] = [()] * n
        self.logprobs: list[tuple[object, ...]] = [()] * n
        self.ends: list[object] = [None] * n
        self.finished: Finished | None = None

    def observe(self, event: object) -> None:
        if isinstance(event, Chunk):
            self.text[event.index] += event.text
            self.token_ids[event.index] += event.token_ids
            self.logprobs[event.index] += event.logprobs or ()
            self.ends[event.index] = event.finish_reason or self.ends[event.index]
        elif isinstance(event, Finished):
            self.finished = event

    @property
    def content(self) -> tuple[object, ...]:
        """What a client can tell."""
        assert self.finished is not None
        return self.text, self.token_ids, self.logprobs, self.ends, self.finished.usage


def finish(engine: Engine, requests: list[Request]) -> list[Answer]:
    """Step until all is done; nothing is left in the cache."""
    answers = {request.key: Answer(len(request.sequences)) for request in requests}
    while engine.has_work:
        for output in engine.step():
            answers[output.key].observe(output.event)
        engine.pool.check_integrity()
    assert engine.pool.num_used == 0
    return list(answers.values())


def both(
    parts: EngineParts, params: SamplingParams, prompts: tuple[str, ...] = PROMPTS, **limits: int
) -> tuple[list[Answer], list[Answer], Engine]:
    """The answers without drafts and with them, each in one batch, and the engine that drafted."""
    plain_engine, drafting_engine = make_engine(parts, **limits), make_engine(parts, **limits)
    plain = finish(plain_engine, [add(plain_engine, parts, prompt, params, None) for prompt in prompts])
    drafted = finish(
        drafting_engine, [add(drafting_engine, parts, prompt, params, DRAFTS) for prompt in prompts]
    )
    return plain, drafted, drafting_engine


def num_accepted(engine: Engine) -> int:
    """Draft tokens that were accepted, of all requests."""
    return sum(counts.num_accepted_tokens for counts in engine.speculator.counters.by_source.values())


GREEDY = {"temperature": 0.0, "max_tokens": 32}
CHANGES: list[dict[str, object]] = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "seed": 4, "top_p": 0.9, "top_k": 50, "n": 3},
    {"logprobs": 3},
    {"frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"repetition_penalty": 1.2},
    {"logit_bias": {260: 3.0, 28: -5.0}},
    {"min_tokens": 24},
    {"stop": (" plum", "\n\n"), "logprobs": 0},
    {"stop": ("e",), "min_tokens": 7},
    {"stop_token_ids": (28, 30)},
    {"max_tokens": 1},
    {"max_tokens": 2},
    {"max_tokens": 7, "ignore_eos": True},
]


@pytest.fixture(scope="module")
def batches(parts: EngineParts) -> tuple[list[Answer], list[Answer]]:
    """Every prompt with all of `CHANGES`, in one batch without drafts and in one with them."""
    answers = []
    for plan in (None, DRAFTS):
        engine = make_engine(parts)
        asked = [
            add(engine, parts, prompt, SamplingParams(**{**GREEDY, **changes}), plan)  # type: ignore[arg-type]
            for changes in CHANGES
            for prompt in PROMPTS
        ]
        answers.append(finish(engine, asked))
    assert num_accepted(engine) > 100
    return answers[0], answers[1]


@pytest.mark.xdist_group("drafts")
@pytest.mark.parametrize("number", range(len(CHANGES)), ids=lambda number: str(CHANGES[number]))
def test_drafts_change_nothing(batches: tuple[list[Answer], list[Answer]], number: int) -> None:
    """Text, tokens, logprobs, ends and usage are the same with drafts and without, whatever the parameters,
    also where requests of different ones share a batch.
    """
    plain, drafted = (each[len(PROMPTS) * number : len(PROMPTS) * (number + 1)] for each in batches)
    assert [answer.content for answer in drafted] == [answer.content for answer in plain]


@pytest.mark.xdist_group("drafts")
def test_nothing_follows_a_stop(batches: tuple[list[Answer], list[Answer]]) -> None:
    """An answer whose stop string was drafted ends before it, and its text, tokens, logprobs and usage end
    there together (vLLM PR 47616, SGLang 31599, transformers 47912).
    """
    number = next(i for i, changes in enumerate(CHANGES) if " plum" in changes.get("stop", ()))  # type: ignore[operator]
    answer = batches[1][len(PROMPTS) * number + PROMPTS.index(REPEATING)]
    assert answer.ends == [FinishReason.STOP]
    assert answer.text[0].endswith(" blue")
    assert answer.finished is not None
    assert answer.finished.speculation is not None
    assert answer.finished.speculation.num_accepted_tokens > 0
    assert answer.finished.usage.num_output_tokens == len(answer.token_ids[0]) == len(answer.logprobs[0])


def test_a_seed_gives_one_answer(parts: EngineParts) -> None:
    """The same seed and parameters give the same answer, however long drafts may get and whoever shares the
    batch (vLLM 6038, 53436).
    """
    params = SamplingParams(temperature=0.9, seed=11, max_tokens=32, ignore_eos=True)
    answers = []
    for max_draft, others in ((0, ()), (1, (FREE,)), (3, ()), (8, (REPEATING, FREE))):
        engine = make_engine(parts)
        plan = SpeculationPlan(max_draft=max_draft, proposers=("ngram",))
        asked = [add(engine, parts, prompt, params, plan) for prompt in (*others, CODE)]
        answers.append(finish(engine, asked)[-1].content)
    assert answers == [answers[0]] * 4


def test_drafts_are_accepted(parts: EngineParts) -> None:
    """The equality above is not vacuous: most of a repeating answer comes from drafts, in fewer steps."""
    _, drafted, engine = both(
        parts, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True), (REPEATING,)
    )
    assert drafted[0].finished is not None
    usage = drafted[0].finished.speculation
    assert usage is not None
    assert usage.num_accepted_tokens == num_accepted(engine) >= 30
    assert engine.counters.num_steps <= 30
    assert usage.accepted_at[0] >= usage.accepted_at[-1]


def test_chunks_hold_several_tokens(parts: EngineParts) -> None:
    """A step's accepted tokens come in one chunk, whose text, tokens and logprobs agree."""
    engine = make_engine(parts)
    add(engine, parts, REPEATING, SamplingParams(temperature=0.0, max_tokens=40, logprobs=0), DRAFTS)
    longest = 0
    while engine.has_work:
        for output in engine.step():
            if isinstance(output.event, Chunk):
                assert output.event.logprobs is not None
                assert [each.token_id for each in output.event.logprobs] == list(output.event.token_ids)
                longest = max(longest, len(output.event.token_ids))
    assert longest > 3


def test_a_prediction_is_accepted(parts: EngineParts) -> None:
    """A prediction that is right makes an answer take a few steps, and one that is wrong changes nothing."""
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    engine = make_engine(parts)
    plain = finish(engine, [add(engine, parts, FREE, params, None)])[0]
    plan = SpeculationPlan(max_draft=16, proposers=("prediction",))
    for prediction, least in ((plain.text[0], 30), ("This is not what comes next at all.", 0)):
        engine = make_engine(parts)
        answer = finish(engine, [add(engine, parts, FREE, params, plan, prediction)])[0]
        assert answer.content == plain.content
        assert answer.finished is not None
        usage = answer.finished.speculation
        assert (usage.num_accepted_predicted_tokens if usage else 0) >= least


@pytest.mark.parametrize("changes", [{"repetition_penalty": 1.6}, {"min_tokens": 20}], ids=str)
def test_a_draft_of_new_tokens_counts_along_its_rows(parts: EngineParts, changes: dict[str, Any]) -> None:
    """Each row of a draft is sampled as if the tokens before it had been said: those that neither prompt nor
    answer has yet count for penalties, and an end is banned for so long as it would be without drafts.
    """
    free = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    engine = make_engine(parts)
    said = finish(engine, [add(engine, parts, FREE, free, None)])[0].token_ids[0]
    # Without the penalty the answer would end where the ban does.
    end = () if "min_tokens" not in changes else (said[changes["min_tokens"]],)
    params = replace(free, stop_token_ids=end, **changes)
    plain = finish(engine, [add(engine, parts, FREE, params, None)])[0]
    assert len(plain.token_ids[0]) == (changes["min_tokens"] if end else 40)
    request = add(engine, parts, FREE, params, SpeculationPlan(max_draft=16, proposers=("prediction",)))
    request.prediction_token_ids = plain.token_ids[0]
    drafted = finish(engine, [request])[0]
    assert drafted.content == plain.content
    assert num_accepted(engine) >= 15


def test_rejected_tokens_never_touch_the_cache(parts: EngineParts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token of prompt and answer is written once, but for the last, and nothing else is."""
    engine = make_engine(parts)
    commit, num_written = engine._runner.commit, []

    def counted(step: StepInput, rows: list[int] | None = None) -> None:
        num_written.append(len(step.token_ids) if rows is None else len(rows))
        commit(step, rows)

    monkeypatch.setattr(engine._runner, "commit", counted)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    request = add(
        engine, parts, FREE, params, DRAFTS, "there lived a king, in a village by the sea, there lived"
    )
    usage = finish(engine, [request])[0].finished
    assert usage is not None
    assert usage.speculation is not None
    assert usage.speculation.num_accepted_tokens < usage.speculation.num_draft_tokens
    assert sum(num_written) == len(request.prompt_token_ids) + 40 - 1


def test_preemption_and_drafts(parts: EngineParts) -> None:
    """With too small a cache, drafts give way, sequences are preempted, and answers stay the same."""
    config = parts.loaded.model.config
    block = 16 * 2 * config.num_layers * config.num_kv_heads * config.head_dim * parts.cache_dtype.itemsize
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    roomy, _, _ = both(parts, params)
    engine = make_engine(parts, FirstComeScheduler, cache_bytes=8 * block, max_sequences=8)
    tight = finish(engine, [add(engine, parts, prompt, params, DRAFTS) for prompt in PROMPTS])
    assert engine.counters.num_preemptions > 0
    assert [answer.content[:4] for answer in tight] == [answer.content[:4] for answer in roomy]


def test_a_prefix_hit_and_drafts(parts: EngineParts) -> None:
    """After a prefix hit the answer and what is accepted are as without one."""
    engine = make_engine(parts)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompt = FREE + " " + REPEATING
    first, again = (finish(engine, [add(engine, parts, prompt, params, DRAFTS)])[0] for _ in range(2))
    assert first.finished is not None
    assert again.finished is not None
    assert again.finished.usage.num_cached_tokens > 0
    assert again.content[:4] == first.content[:4]
    assert again.finished.speculation == first.finished.speculation


def test_aborted_drafts_leave_nothing(parts: EngineParts) -> None:
    """A request that is aborted between steps leaves no block, no index and no estimate of its own."""
    engine = make_engine(parts)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    requests = [add(engine, parts, prompt, params, DRAFTS) for prompt in PROMPTS]
    for _ in range(12):
        engine.step()
    for request in requests:
        engine.abort(request.key)
    assert engine.pool.num_used == 0
    assert not engine.speculator.controller.acceptance.num_requests


def test_a_fault_in_a_draft_row_ends_its_request(parts: EngineParts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of NaN ends its own request at that place; others are what they were."""
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    engine = make_engine(parts)
    healthy = finish(engine, [add(engine, parts, FREE, params, DRAFTS)])[0]
    engine = make_engine(parts)
    add(engine, parts, REPEATING, params, DRAFTS)
    survivor = add(engine, parts, FREE, params, DRAFTS)
    run = engine._runner.run

    def poisoned(step: object) -> Tensor:
        logits = run(step).clone()  # type: ignore[arg-type]
        if len(logits) > 4:
            logits[1] = torch.nan
        return logits

    monkeypatch.setattr(engine._runner, "run", poisoned)
    answers = {survivor.key: Answer(1)}
    errors = 0
    while engine.has_work:
        for output in engine.step():
            if output.key in answers:
                answers[output.key].observe(output.event)
            errors += isinstance(output.event, Exception)
    assert errors == 1
    assert answers[survivor.key].content == healthy.content
    assert engine.pool.num_used == 0


class OnlyEven:
    """A grammar of sorts: even and odd tokens in turn, by how much was said so far."""

    def __init__(self, vocab_size: int) -> None:
        self._even = torch.arange(vocab_size) % 2 == 0
        self._said: list[int] = []

    def allowed(self, drafted: tuple[int, ...]) -> Tensor:
        return self._even if (len(self._said) + len(drafted)) % 2 else ~self._even

    def advance(self, token_id: int) -> None:
        self._said.append(token_id)


def test_masks_hold_at_every_draft_position(parts: EngineParts) -> None:
    """With a mask that depends on what came before, drafts change nothing and every token is allowed."""
    answers = []
    for plan in (None, DRAFTS):
        engine = make_engine(parts)
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        request = add(engine, parts, REPEATING, params, plan)
        request.sequences[0].mask = OnlyEven(parts.loaded.model.config.vocab_size)
        answers.append(finish(engine, [request])[0])
    assert answers[0].content == answers[1].content
    assert [token_id % 2 for token_id in answers[1].token_ids[0]] == [1, 0] * 20


def test_synthetic_acceptance_is_what_was_asked(parts: EngineParts) -> None:
    """With a synthetic rate the share of accepted first tokens is that rate, and the drafts bear its name."""
    settings = EngineSettings(
        cache_bytes=256 * MIB, speculation=SpeculationSettings(synthetic_acceptance=(0.7, 0.5))
    )
    engine = Engine(
        parts.loaded,
        parts.ops,
        settings,
        cache_dtype=parts.cache_dtype,
        counters=EngineCounters(),
        clock=time.monotonic,
    )
    make_eager(engine)
    params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True, seed=1)
    plan = SpeculationPlan(max_draft=2)
    finish(engine, [add(engine, parts, FREE, params, plan) for _ in range(4)])
    counts = engine.speculator.counters.by_source[("", "synthetic")]
    assert counts.accepted_at[0] / counts.drafted_at[0] == pytest.approx(0.7, abs=0.1)
    assert counts.accepted_at[1] / counts.accepted_at[0] == pytest.approx(0.5, abs=0.12)
    assert engine.speculator.counters.by_source.keys() == {("", "synthetic")}
