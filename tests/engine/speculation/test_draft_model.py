"""A model that drafts: what it proposes is right where it should be, and never changes an answer."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from surefoot.backends.engine.backend import EngineParts
from surefoot.backends.engine.cost_model import StepCost
from surefoot.backends.engine.engine import Engine, EngineCounters
from surefoot.backends.engine.first_come import FirstComeScheduler
from surefoot.backends.engine.hf_folder import read_config
from surefoot.backends.engine.model import Model
from surefoot.backends.engine.prepare import LoadedModel
from surefoot.backends.engine.promise_scheduler import PromiseScheduler
from surefoot.backends.engine.safetensors_folder import SafetensorsFolder
from surefoot.backends.engine.scheduler import MakeScheduler
from surefoot.backends.engine.sequence import Request
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.engine.speculation.draft_counts import DraftCounts
from surefoot.backends.engine.speculation.draft_model import DraftModel
from surefoot.backends.engine.speculation.settings import SpeculationSettings
from surefoot.backends.engine.weight_mode import WeightMode
from surefoot.backends.types import SamplingParams, SpeculationPlan

from ..tiny_models import tiny_hf_model
from .test_engine_with_drafts import CODE, FREE, MIB, PROMPTS, REPEATING, Answer, add, finish, make_eager

DRAFT = SpeculationPlan(max_draft=4, proposers=("draft",))
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=5, top_p=0.95, max_tokens=24, ignore_eos=True)


def load_tiny(name: str, parts: EngineParts, folder: Path, **changes: object) -> LoadedModel:
    """A tiny random model under the real tokenizer, which knows its ids too."""
    tiny_hf_model(name, **{"vocab_size": parts.loaded.config.vocab_size, **changes}).save_pretrained(folder)
    config = read_config(folder)
    with SafetensorsFolder(folder) as source:
        model = Model(config, source, parts.ops, mode=WeightMode.FLOAT32)
    return LoadedModel(config, model, parts.loaded.tokenizer, name)


def with_draft(parts: EngineParts, target: LoadedModel, draft: LoadedModel | None) -> EngineParts:
    """The parts of an engine with other models."""
    return EngineParts(loaded=target, ops=parts.ops, cache_dtype=parts.cache_dtype, draft=draft)


def make_engine(
    parts: EngineParts,
    make_scheduler: MakeScheduler = PromiseScheduler,
    *,
    max_catch_up: int = 64,
    draft_blocks: int | None = None,
    **limits: int,
) -> Engine:
    """An engine that drafts as much as it may, with the parts' draft model."""
    draft_bytes = None if draft_blocks is None else draft_blocks * block_bytes(parts, parts.draft)
    engine = Engine(
        parts.loaded,
        parts.ops,
        EngineSettings(
            **{"cache_bytes": 64 * MIB, **limits},  # type: ignore[arg-type]
            speculation=SpeculationSettings(max_catch_up=max_catch_up, draft_cache_bytes=draft_bytes),
        ),
        cache_dtype=parts.cache_dtype,
        counters=EngineCounters(),
        clock=time.monotonic,
        make_scheduler=make_scheduler,
        draft=parts.draft,
    )
    make_eager(engine)
    if engine.speculator.draft_model is not None:
        engine.speculator.draft_model.costs.frozen = True
        engine.speculator.draft_model.costs.refit(free_passes())
    return engine


def free_passes() -> StepCost:
    """Passes that cost next to nothing."""
    return StepCost(fixed_s=1e-9, row_s=1e-12, further_row_s=1e-12, sequence_s=0.0, context_s=0.0)


def block_bytes(parts: EngineParts, loaded: LoadedModel | None) -> int:
    """What a block takes in all layers."""
    assert loaded is not None
    config = loaded.config
    return 16 * 2 * config.num_layers * config.num_kv_heads * config.head_dim * parts.cache_dtype.itemsize


def model_of(engine: Engine) -> DraftModel:
    """The engine's draft model."""
    assert engine.speculator.draft_model is not None
    return engine.speculator.draft_model


def counts_of(engine: Engine) -> DraftCounts:
    """What became of the draft model's drafts."""
    return engine.speculator.counters.by_source.get(("", "draft"), DraftCounts())


def assert_all_accepted(engine: Engine, least: int) -> None:
    """Every draft token was accepted, of at least so many; nothing is left in the draft model's cache."""
    counts = counts_of(engine)
    assert counts.num_accepted_tokens == counts.num_draft_tokens >= least
    model_of(engine).cache.pool.check_integrity()
    assert model_of(engine).cache.pool.num_used == 0


def answers(
    engine: Engine, parts: EngineParts, params: SamplingParams, plan: SpeculationPlan | None
) -> list[Answer]:
    """Of all prompts, in one batch."""
    return finish(engine, [add(engine, parts, prompt, params, plan) for prompt in PROMPTS])


def contents(some: list[Answer]) -> list[object]:
    """What clients can tell, but for usage, which knows of cached tokens."""
    return [answer.content[:4] for answer in some]


@pytest.fixture(scope="module")
def itself(parts: EngineParts) -> EngineParts:
    """The default model, which drafts for itself."""
    return with_draft(parts, parts.loaded, parts.loaded)


@pytest.fixture(scope="module")
def twins(parts: EngineParts, tmp_path_factory: pytest.TempPathFactory) -> EngineParts:
    """A tiny model, which drafts for itself."""
    loaded = load_tiny("qwen3", parts, tmp_path_factory.mktemp("twins"))
    return with_draft(parts, loaded, loaded)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.9, "seed": 5, "top_p": 0.95, "n": 2},
        {"temperature": 0.7, "seed": 6, "repetition_penalty": 1.3, "logit_bias": {30: 2.0}},
        {"ignore_eos": False, "frequency_penalty": 0.5, "min_tokens": 9, "stop": ("e",), "logprobs": 1},
    ],
    ids=str,
)
def test_a_model_agrees_with_itself(itself: EngineParts, changes: dict[str, object]) -> None:
    """Drafting for itself, greedy or sampled, a model has every token accepted, and answers are the same."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, **changes})  # type: ignore[arg-type]
    plain = answers(make_engine(with_draft(itself, itself.loaded, None)), itself, params, None)
    engine = make_engine(itself)
    assert contents(answers(engine, itself, params, DRAFT)) == contents(plain)
    assert_all_accepted(engine, least=6)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_prefix_hit_changes_nothing(itself: EngineParts, params: SamplingParams) -> None:
    """With a prompt that the engine finds in its cache, every draft token is accepted as without."""
    prompt = CODE * 2
    engine = make_engine(itself, prefix_cache=True)
    first, second = (finish(engine, [add(engine, itself, prompt, params, DRAFT)])[0] for _ in range(2))
    assert second.finished is not None
    assert second.finished.usage.num_cached_tokens > 0
    assert contents([first]) == contents([second])
    assert_all_accepted(engine, least=30)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_acceptance_comes_back_after_a_pause(twins: EngineParts, params: SamplingParams) -> None:
    """After a phase without drafts the model catches up, few tokens a step, and is right as before."""
    engine = make_engine(twins, max_catch_up=8)
    model, long = model_of(engine), SamplingParams(temperature=params.temperature, seed=5, max_tokens=120)
    for prompt in PROMPTS:
        add(engine, twins, prompt, long, DRAFT)
    rows: list[int] = []
    while engine.has_work:
        engine.speculator.controller.ceiling = 0 if 20 <= engine.counters.num_steps < 50 else 16
        before = counts_of(engine).num_drafts
        engine.step()
        rows += [each.shape.num_rows for each in model.passes]
        if 20 < engine.counters.num_steps <= 50:
            assert counts_of(engine).num_drafts == before
    assert max(rows) <= 8 + 2 * len(PROMPTS)
    assert_all_accepted(engine, least=100)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_preemption_changes_nothing(twins: EngineParts, params: SamplingParams) -> None:
    """Preempted sequences get the same answers, and every draft token is accepted."""
    plain = answers(make_engine(with_draft(twins, twins.loaded, None)), twins, params, None)
    tight = 8 * block_bytes(twins, twins.loaded)
    engine = make_engine(twins, FirstComeScheduler, cache_bytes=tight, max_sequences=8)
    assert contents(answers(engine, twins, params, DRAFT)) == contents(plain)
    assert engine.counters.num_preemptions > 0
    assert_all_accepted(engine, least=30)


def test_a_small_draft_cache_serves_whom_it_can(twins: EngineParts) -> None:
    """Where not all fit into the draft model's cache, some are drafted for, rightly, and all are answered."""
    plain = answers(make_engine(with_draft(twins, twins.loaded, None)), twins, GREEDY, None)
    for num_blocks in (1, 4, 7):
        engine = make_engine(twins, draft_blocks=num_blocks)
        assert contents(answers(engine, twins, GREEDY, DRAFT)) == contents(plain)
        assert_all_accepted(engine, least=0 if num_blocks == 1 else 15)


def test_the_longest_unused_gives_way(twins: EngineParts) -> None:
    """A sequence that was not drafted for of late loses its blocks to one that is, and gets them back."""
    engine = make_engine(twins, draft_blocks=6)
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    first = add(engine, twins, FREE, long, DRAFT).sequences[0]
    engine.step()
    engine.step()
    cache = model_of(engine).cache
    assert cache.num_missing(first) < len(first.token_ids)
    other = add(engine, twins, REPEATING, long, DRAFT)
    cache.hold(other.sequences[0], 6 * 16, busy=())
    assert cache.num_missing(first) == len(first.token_ids)
    finish(engine, [first.request, other])
    assert_all_accepted(engine, least=20)


def test_aborts_leave_nothing_behind(twins: EngineParts) -> None:
    """Requests that end at random moments give their blocks back, drafted for or half caught up."""
    rng = random.Random(3)
    engine = make_engine(twins, max_catch_up=5)
    open_requests: list[Request] = []
    for _ in range(120):
        if len(open_requests) < 6:
            open_requests.append(add(engine, twins, rng.choice(PROMPTS), SAMPLED, DRAFT))
        if rng.random() < 0.4:
            engine.abort(open_requests.pop(rng.randrange(len(open_requests))).key)
        engine.step()
        model_of(engine).cache.pool.check_integrity()
    for request in open_requests:
        engine.abort(request.key)
    assert engine.pool.num_used == 0
    assert engine.speculator.controller.acceptance.num_requests == 0
    assert_all_accepted(engine, least=100)


@pytest.mark.parametrize("padding", [0, 64, 128], ids=["smaller", "equal", "larger"])
def test_another_model_changes_nothing(parts: EngineParts, tmp_path: Path, padding: int) -> None:
    """A model that knows nothing of what it drafts for, padded otherwise, changes no token and no logprob."""
    num_tokens = parts.loaded.tokenizer.vocab_size
    target = load_tiny("qwen3", parts, tmp_path / "target", vocab_size=num_tokens + 64)
    draft = load_tiny("mistral", parts, tmp_path / "draft", vocab_size=num_tokens + padding)
    params = SamplingParams(
        seed=8, max_tokens=20, ignore_eos=True, logprobs=1, logit_bias={num_tokens + 63: 1.0}
    )
    both = []
    for each in (None, draft):
        some = with_draft(parts, target, each)
        engine = make_engine(some)
        both.append(contents(answers(engine, some, params, DRAFT)))
    assert both[0] == both[1]
    assert counts_of(engine).num_draft_tokens > 0
    assert model_of(engine).cache.pool.num_used == 0


def test_tokens_beyond_its_vocabulary_are_not_drafted_for(
    parts: EngineParts, tmp_path: Path, twins: EngineParts
) -> None:
    """A sequence with a token that the draft model has no embedding for goes on without drafts."""
    some = with_draft(parts, twins.loaded, load_tiny("mistral", parts, tmp_path, vocab_size=300))
    engine = make_engine(some)
    answer = finish(engine, [add(engine, some, FREE, GREEDY, DRAFT)])[0]
    assert len(answer.token_ids[0]) == GREEDY.max_tokens
    assert counts_of(engine).num_drafts == 0


def test_a_short_context_ends_drafting(parts: EngineParts, tmp_path: Path, twins: EngineParts) -> None:
    """Beyond the draft model's own longest context a sequence goes on without drafts."""
    draft = load_tiny("qwen3", parts, tmp_path, max_position_embeddings=24)
    some = with_draft(parts, twins.loaded, draft)
    engine = make_engine(some)
    sequence = add(engine, some, FREE, GREEDY, DRAFT).sequences[0]
    finish(engine, [sequence.request])
    assert len(sequence.token_ids) > 24
    assert counts_of(engine).num_drafts > 0
    assert_all_accepted(engine, least=1)


def test_the_plan_says_when_it_is_asked(twins: EngineParts) -> None:
    """Proposers are asked in the plan's order; one that is not there is passed over."""
    assert make_engine(twins).speculator.proposers == ("ngram", "prediction", "suffix", "draft")
    for names, sources in (
        (("ngram", "draft"), {"ngram", "draft"}),
        (("draft", "ngram"), {"draft"}),
        (("suffix", "draft"), {"draft"}),
    ):
        engine = make_engine(twins)
        plan = SpeculationPlan(max_draft=2, proposers=names)
        finish(engine, [add(engine, twins, REPEATING, GREEDY, plan), add(engine, twins, FREE, GREEDY, plan)])
        assert {source for _, source in engine.speculator.counters.by_source} == sources
    without = make_engine(with_draft(twins, twins.loaded, None))
    assert "draft" not in without.speculator.proposers
    plan = SpeculationPlan(max_draft=2, proposers=("draft", "ngram"))
    finish(without, [add(without, twins, REPEATING, GREEDY, plan)])
    assert {source for _, source in without.speculator.counters.by_source} == {"ngram"}


def test_passes_have_a_cost_after_warm_up(twins: EngineParts) -> None:
    """Warm-up measures what passes cost, and leaves nothing in the cache."""
    engine = make_engine(twins)
    model = model_of(engine)
    model.costs.frozen = False
    engine.warm_up()
    assert model.costs.predict(1, 1, 50) > 1e-6
    assert model.costs.cost.coefficients != StepCost().coefficients
    assert model.cache.pool.num_used == 0
