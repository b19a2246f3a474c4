"""The engine with a quantised cache: an answer depends on its own prompt and plan, and on nothing else."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from surefoot.backends.engine.backend import EngineParts
from surefoot.backends.engine.cache_rule import format_name
from surefoot.backends.engine.cache_use import formats_of, totals_of
from surefoot.backends.engine.cost_model import StepCost
from surefoot.backends.engine.first_come import FirstComeScheduler
from surefoot.backends.engine.loss_text import default_documents
from surefoot.backends.engine.promise_scheduler import PromiseScheduler
from surefoot.backends.engine.quality.recall import make_haystack
from surefoot.backends.engine.quality.texts import cut_windows
from surefoot.backends.engine.scheduler import MakeScheduler
from surefoot.backends.engine.sequence import Sequence as EngineSequence
from surefoot.backends.engine.sequence import SequenceStatus
from surefoot.backends.errors import ContextTooLong, RequestError
from surefoot.backends.types import (
    CachePlan,
    CacheUsage,
    Finished,
    GenerateRequest,
    SamplingParams,
    ServingPlan,
    SpeculationPlan,
)
from surefoot.kernels.layout import FORMATS as CACHE_FORMATS
from surefoot.kernels.layout import FULL

from .serving import Served, Server, blocks, load_tiny, message, prompt_of
from .speculation.test_reported_faults import CALL, TALK

GREEDY = SamplingParams(temperature=0.0, max_tokens=140, ignore_eos=True, logprobs=0)
SEEDED = SamplingParams(temperature=0.9, seed=7, max_tokens=140, ignore_eos=True, logprobs=0)
FORMATS = ("k8v8", "k8v4", "mixed", "k4v4")
DRAFTS = SpeculationPlan(max_draft=8, proposers=("prediction", "ngram"))


def plan(cache_format: str, *, drafts: bool = False, **cache: int) -> ServingPlan:
    """A plan in a format, with a window short enough for short prompts."""
    return ServingPlan(
        name=cache_format,
        cache=CachePlan(**{"format": cache_format, "sinks": 4, "recent": 32, **cache}),  # type: ignore[arg-type]
        speculation=DRAFTS if drafts else SpeculationPlan(),
    )


@pytest.fixture(scope="module")
def tiny_parts(parts: EngineParts, tmp_path_factory: pytest.TempPathFactory) -> EngineParts:
    """A tiny model, for what does not depend on numbers."""
    return load_tiny("qwen3", parts, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["mistral", "real"])
def some_parts(
    request: pytest.FixtureRequest, parts: EngineParts, tmp_path_factory: pytest.TempPathFactory
) -> EngineParts:
    """A tiny model, and the real one."""
    if request.param == "real":
        return parts
    return load_tiny(request.param, parts, tmp_path_factory.mktemp(request.param))


def serve(parts: EngineParts, request: GenerateRequest, **limits: int) -> Served:
    """One request on an engine of its own, which drafts whenever there is an idea."""
    server = Server(parts, **limits)
    draft_always(server)
    return server.serve_all([request])[0]


def draft_always(server: Server) -> None:
    """Set costs that make every draft pay."""
    server.engine.costs.frozen = True
    server.engine.costs.refit(StepCost(fixed_s=1.0, row_s=1e-9, further_row_s=1e-9, sequence_s=0.0))


def last(served: Served) -> Finished:
    """The event that ends a request."""
    assert isinstance(served.events[-1], Finished)
    return served.events[-1]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("cache_format", FORMATS)
def test_drafts_change_nothing(some_parts: EngineParts, cache_format: str, params: SamplingParams) -> None:
    """A format with speculation gives the tokens and log-probabilities of the format alone."""
    prompt = prompt_of(120)
    alone = serve(some_parts, message(prompt, params, plan=plan(cache_format)))
    server = Server(some_parts)
    draft_always(server)
    asked = server.add(message(prompt, params, plan=plan(cache_format, drafts=True)))
    asked.prediction_token_ids = tuple(alone.choices[0][0])
    drafted = server.finish({asked.key: Served([], [])})[0]
    assert drafted.choices == alone.choices
    usage = last(drafted).speculation
    assert usage is not None
    assert usage.num_accepted_tokens > 100
    assert last(drafted).cache == last(alone).cache


@pytest.mark.parametrize("cache_format", FORMATS)
def test_decoding_is_replayed(tiny_parts: EngineParts, cache_format: str) -> None:
    """Steps of a quantised cache are recorded as others are, and replayed to the bits of steps op by op."""
    requests = [
        message(prompt_of(90, seed), GREEDY, plan=plan(each, drafts=seed > 1))
        for seed, each in enumerate(("k16v16", cache_format, "k4v4"))
    ]
    server, by_op = Server(tiny_parts), Server(tiny_parts)
    by_op.engine._runner._replay.run = lambda step: None  # type: ignore[method-assign]  # records nothing
    assert [each.choices for each in server.serve_all(requests)] == [
        each.choices for each in by_op.serve_all(requests)
    ]
    programs = server.engine._runner._replay._programs
    assert None not in programs.values()
    assert any(len(shape.formats) > 1 and shape.num_rotated < shape.num_rows for shape in programs)


@pytest.mark.parametrize("cache_format", FORMATS)
def test_drafts_change_nothing_after_a_long_prompt(
    parts: EngineParts, cache_format: str, tmp_path: Path
) -> None:
    """After 4,000 tokens, too, a format with speculation gives what it gives alone (vLLM 40831, 53180)."""
    tiny = load_tiny("llama-head-dim", parts, tmp_path, head_dim=32, max_position_embeddings=8192)
    prompt = prompt_of(400) * 10
    alone, drafted = (
        serve(tiny, message(prompt, GREEDY, plan=plan(cache_format, drafts=drafts, recent=64)))
        for drafts in (False, True)
    )
    assert drafted.choices == alone.choices
    assert last(drafted).speculation is not None


def test_drafts_change_nothing_about_an_early_fact_or_a_call(parts: EngineParts) -> None:
    """The real model finds what 4,000 tokens of text told it early, and calls a tool after them; under each
    format it says with drafts what it says without, token for token (vLLM 40831, 53180).
    """
    tokenizer = parts.loaded.tokenizer
    text = cut_windows(tokenizer, default_documents(), 2, 4000)[0]
    haystack = make_haystack(tokenizer, text, ["retrieval"], seed=1)
    question = haystack.questions[1]
    call = tuple(tokenizer.encode(f"\n\n{TALK}", add_special_tokens=False))
    server = Server(parts)
    draft_always(server)
    params = replace(GREEDY, max_tokens=70)

    def answer(asked: tuple[int, ...], cache_format: str, *, drafts: bool) -> Served:
        own = plan(cache_format, drafts=drafts, recent=64)
        return server.serve_all([message([*haystack.token_ids, *asked], params, plan=own)])[0]

    for cache_format in FORMATS:
        # The first one computes the prompt; the others find it in the cache.
        for asked in (question.question_ids, call):
            alone, drafted = (answer(asked, cache_format, drafts=drafts) for drafts in (False, True))
            assert drafted.choices == alone.choices
            usage = last(drafted).speculation
            assert usage is not None
            assert usage.num_accepted_tokens > 0
            if asked is call:
                said = tokenizer.decode(alone.choices[0][0]).split("\n")[0]
                arguments = json.loads(CALL + said)["arguments"]
                assert arguments.keys() == {"origin", "destination", "day"}
            elif cache_format != "k4v4":
                assert tuple(alone.choices[0][0][: len(question.answer_ids)]) == question.answer_ids


@pytest.mark.parametrize("cache_format", FORMATS)
def test_within_a_sliding_window_nothing_is_different(
    parts: EngineParts, cache_format: str, tmp_path: Path
) -> None:
    """A model that sees 256 tokens back is served up to so many in every format, as it would be without a
    window; what is longer is refused.
    """
    windowed = load_tiny("mistral-window", parts, tmp_path / "windowed", head_dim=32)
    endless = load_tiny("mistral-window", parts, tmp_path / "endless", head_dim=32, sliding_window=None)
    asked = message(prompt_of(150), replace(GREEDY, max_tokens=106), plan=plan(cache_format, drafts=True))
    assert serve(windowed, asked).choices == serve(endless, asked).choices
    with pytest.raises(ContextTooLong, match="maximum context length is 256 tokens"):
        serve(windowed, replace(asked, params=replace(GREEDY, max_tokens=107)))


def test_a_format_changes_what_is_computed(tiny_parts: EngineParts) -> None:
    """The equalities here are not vacuous: each format gives numbers of its own."""
    choices = [
        serve(tiny_parts, message(prompt_of(150), GREEDY, plan=plan(each))).choices
        for each in ("k16v16", *FORMATS)
    ]
    assert len({repr(each) for each in choices}) == 5


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_chunks_and_company_change_nothing(tiny_parts: EngineParts, params: SamplingParams) -> None:
    """An answer is the same alone, in a batch with every other format, and however its prompt is cut."""
    requests = [
        message(prompt_of(100 + 37 * i, seed=i), params, plan=plan(each, drafts=i % 2 > 0))
        for i, each in enumerate((*FORMATS, "k16v16"))
    ]
    server = Server(tiny_parts, max_batched_tokens=160)
    draft_always(server)
    together = [each.choices for each in server.serve_all(requests)]
    alone = [serve(tiny_parts, request).choices for request in requests]
    assert together == alone
    cut = [serve(tiny_parts, request, max_prefill_chunk=23).choices for request in requests[:2]]
    assert cut == alone[:2]


@pytest.mark.parametrize("cache_format", FORMATS)
def test_a_hit_gives_the_bits_of_a_miss(tiny_parts: EngineParts, cache_format: str) -> None:
    """Prompts are found again by requests of any quantised format; what followed a demotion never is."""
    server, prompt = Server(tiny_parts), prompt_of(150)
    cold = server.serve_all([message(prompt, GREEDY, plan=plan(cache_format))])[0]
    warm = server.serve_all([message(prompt, GREEDY, plan=plan(cache_format))])[0]
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 144)
    assert warm.choices == cold.choices
    turn = [*prompt, *cold.choices[0][0], *prompt_of(30, seed=1)]
    followed = server.serve_all([message(turn, SEEDED, plan=plan(cache_format))])[0]
    assert followed.num_cached_tokens == 144
    assert followed.choices == serve(tiny_parts, message(turn, SEEDED, plan=plan(cache_format))).choices
    plain = server.serve_all([message(prompt, GREEDY)])[0]
    assert plain.num_cached_tokens == 0, "keys of quantised plans are rotated, those of others are not"


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("cache_format", FORMATS)
def test_choices_are_what_they_are_alone(
    tiny_parts: EngineParts, cache_format: str, prefix_cache: bool
) -> None:
    """Four choices of one prompt share its demoted blocks, and are what they are when they share nothing."""
    params, prompt = replace(SEEDED, n=4), prompt_of(200)
    request = message(prompt, params, plan=plan(cache_format))
    server = Server(tiny_parts, prefix_cache=prefix_cache)
    asked = server.add(request)
    while not all(choice.num_demoted for choice in asked.sequences):
        server.engine.step()
    rule = asked.cache_rule
    assert rule is not None
    num_shared = rule.split(200 - 36).low // rule.capacity
    tables = [choice.low_table[:num_shared] for choice in asked.sequences]
    assert num_shared > 0
    assert tables == [tables[0]] * 4
    assert {server.engine.pool.ref_count(block) for block in tables[0]} <= {4}
    server.engine.abort(asked.key)
    together = serve(tiny_parts, request, prefix_cache=prefix_cache)
    apart = Server(tiny_parts, prefix_cache=False)
    apart.engine._prefix_cache.enter = lambda request: None  # type: ignore[method-assign]  # shares nothing
    apart.engine.scheduler._demoter._shared = lambda sequence: []  # type: ignore[attr-defined]  # not even these
    assert together.choices == apart.serve_all([request])[0].choices


@pytest.mark.parametrize("make", [FirstComeScheduler, PromiseScheduler])
def test_preemption_changes_nothing(tiny_parts: EngineParts, make: MakeScheduler) -> None:
    """Sequences that lose their blocks in the middle are computed again to the same bits."""
    requests = [
        message(prompt_of(60, seed), replace(SEEDED, n=2), plan=plan(each, drafts=drafts))
        for seed, (each, drafts) in enumerate([("mixed", False), ("k8v4", True), ("k16v16", False)])
    ]
    roomy = Server(tiny_parts).serve_all(requests)
    tight = Server(tiny_parts, make, cache_bytes=blocks(tiny_parts, 26))
    draft_always(tight)
    tight.serve_all([message(prompt_of(30), replace(GREEDY, max_tokens=1))] * 3)
    served = tight.serve_all(requests)
    assert tight.engine.counters.num_preemptions > 0
    assert [each.choices for each in served] == [each.choices for each in roomy]
    assert sum(last(each).num_preemptions for each in served) == tight.engine.counters.num_preemptions


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5, 20, 70, 140])
def test_an_abort_leaves_no_block(tiny_parts: EngineParts, num_steps: int) -> None:
    """Whenever a client leaves, all its blocks in all formats are free."""
    server = Server(tiny_parts, max_prefill_chunk=64)
    requests = [
        server.add(message(prompt_of(150, seed), replace(SEEDED, n=3), plan=plan(each, drafts=True)))
        for seed, each in enumerate(FORMATS)
    ]
    for _ in range(num_steps):
        server.engine.step()
    for request in requests:
        server.engine.abort(request.key)
    server.engine.pool.check_integrity()
    assert server.engine.pool.num_used == 0
    assert not server.engine.has_work


def test_what_is_reported_is_what_is_held(tiny_parts: EngineParts) -> None:
    """The last event, the statistics and the counter tell how many tokens lie in which format."""
    server = Server(tiny_parts)
    asked = server.add(message(prompt_of(150), GREEDY, plan=plan("k4v4")))
    sequence = asked.sequences[0]
    while sequence.num_output_tokens < 100:
        server.engine.step()
    full, demoted = sorted(formats_of(server.engine.scheduler.running), key=lambda each: each.format)
    assert (full.format, full.num_tokens, full.num_blocks) == ("k16v16", sequence.num_full, 5)
    assert (demoted.format, demoted.num_tokens, demoted.num_blocks) == ("k4v4", 214 - 36, 4)
    assert server.engine.counters.num_demoted_tokens == {"k4v4": 178}
    while server.engine.has_work:
        outputs = server.engine.step()
    usage = outputs[-1].event.cache  # type: ignore[union-attr]
    assert usage == CacheUsage(tokens={"k16v16": 289 - 242, "k4v4": 242}, num_demoted_tokens=242)
    assert usage.reproducible
    assert last(serve(tiny_parts, message(prompt_of(50), GREEDY))).cache is None
    mixed = last(serve(tiny_parts, message(prompt_of(150), GREEDY, plan=plan("mixed")))).cache
    tokens = {"k16v16": 289 - 242, "k8v4": round(242 / 4), "k4v4": 242 - round(242 / 4)}
    assert mixed == CacheUsage(tokens=tokens, num_demoted_tokens=242)


def places_of(running: Sequence[EngineSequence]) -> dict[str, set[tuple[int, int]]]:
    """Block and slot of every token that lies in the cache, by format."""
    places: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for seq in running:
        for cache_format, part in seq.held.items():
            slots = (divmod(token, part.capacity) for token in range(part.num_tokens))
            places[format_name(cache_format)] |= {(part.table[block], slot) for block, slot in slots}
    return places


def test_totals_are_what_blocks_hold(tiny_parts: EngineParts) -> None:
    """In all, a block and a token that several share count once, and what is left of blocks is empty."""
    server = Server(tiny_parts)
    for number, each in enumerate(("k16v16", "k8v4", "mixed", "k8v4")):
        params = replace(SEEDED, n=1 + number % 3, max_tokens=70)
        server.add(message(prompt_of(200, number // 3), params, plan=plan(each, drafts=number == 1)))
    capacity = {format_name(each): server.engine.cache_space.layout.capacity(each) for each in CACHE_FORMATS}
    seen = set()
    while server.engine.has_work:
        server.engine.step()
        totals = totals_of(server.engine.scheduler.running)
        places = places_of(server.engine.scheduler.running)
        for total in totals:
            assert total.num_tokens == len(places[total.format])
            room = total.num_blocks * capacity[total.format]
            assert total.fragmentation == pytest.approx(1 - total.num_tokens / room)
            seen.add(total.format)
        assert sum(total.num_blocks for total in totals) == server.engine.pool.num_used
    assert seen == {"k16v16", "k8v4", "k4v4"}


@pytest.mark.parametrize(("cache_format", "times"), [("k4v4", 3.5), ("k8v4", 2.4), ("k8v8", 1.8)])
def test_blocks_hold_more_tokens(parts: EngineParts, cache_format: str, times: float) -> None:
    """At the default model's shape a block holds that many times the tokens of full precision."""
    space = Server(parts).engine.cache_space
    rule = space.rule(CachePlan(format=cache_format), 100)
    assert rule is not None
    assert rule.capacity >= round(times * space.layout.capacity(FULL), 6) - 2 * (cache_format == "k8v8")


def test_more_fits(tiny_parts: EngineParts) -> None:
    """A cache in which full-precision contexts of 200 tokens end takes longer ones in 4 bits."""
    engine = Server(tiny_parts, cache_bytes=blocks(tiny_parts, 30)).engine
    longest = engine.cache_space.longest(CachePlan(format="k4v4", recent=32), 100)
    assert engine.max_model_len == 480
    assert longest == 512, "what the model takes"
    request = message(prompt_of(100), replace(GREEDY, max_tokens=412), plan=plan("k4v4"))
    served = serve(tiny_parts, request, cache_bytes=blocks(tiny_parts, 30))
    assert len(served.choices[0][0]) == 412
    assert served.choices == serve(tiny_parts, request).choices


@pytest.mark.parametrize(
    ("num_prompt", "cache", "said"),
    [
        (120, {"max_context": 200}, "is 200 tokens by the request's plan"),
        (400, {"format": "k4v4", "recent": 380}, "the whole cache"),
        (
            120,
            {"format": "k4v4", "max_context": 200},
            "is 200 tokens by the request's plan",
        ),
    ],
)
def test_what_cannot_fit_is_refused(
    tiny_parts: EngineParts, num_prompt: int, cache: dict[str, object], said: str
) -> None:
    """A context beyond the plan's limit, or one whose demotion the cache has no room for, is refused."""
    server = Server(tiny_parts, cache_bytes=blocks(tiny_parts, 26))
    asked = ServingPlan(name="p", cache=CachePlan(**cache))  # type: ignore[arg-type]
    with pytest.raises(ContextTooLong, match=said):
        server.add(message(prompt_of(num_prompt), replace(GREEDY, max_tokens=100), plan=asked))


def test_an_unknown_format_is_refused(tiny_parts: EngineParts) -> None:
    """A plan with a format that no kernel has is refused by name."""
    with pytest.raises(RequestError, match="k2v2"):
        Server(tiny_parts).add(message(prompt_of(5), GREEDY, plan=plan("k2v2")))


def test_a_prompt_that_does_not_fit_is_demoted_on_the_way(parts: EngineParts, tmp_path: Path) -> None:
    """A prompt beyond the cache in full precision is served, with the same answer however it is cut."""
    parts = load_tiny("llama-head-dim", parts, tmp_path, head_dim=32, max_position_embeddings=2048)
    prompt, room = prompt_of(1500), blocks(parts, 80)
    params = replace(GREEDY, max_tokens=70)
    assert Server(parts, cache_bytes=room).engine.max_model_len < len(prompt)
    request = message(prompt, params, plan=plan("k4v4"))
    whole = serve(parts, request, cache_bytes=room)
    assert len(whole.choices[0][0]) == 70
    assert serve(parts, request, cache_bytes=room, max_prefill_chunk=100).choices == whole.choices


def pressed(cache_format: str = "k4v4", *, drafts: bool = False) -> ServingPlan:
    """A plan that demotes when blocks run out."""
    eager = plan(cache_format, drafts=drafts)
    return replace(eager, name="pressed", cache=replace(eager.cache, demote="pressure"))


def test_without_pressure_nothing_is_demoted(tiny_parts: EngineParts) -> None:
    """With blocks to spare an answer is what it is in full precision, up to the rotation of keys."""
    served = serve(tiny_parts, message(prompt_of(150), GREEDY, plan=pressed()))
    usage = last(served).cache
    assert usage == CacheUsage(tokens={"k16v16": 289, "k4v4": 0}, num_demoted_tokens=0)


@pytest.mark.parametrize("make", [FirstComeScheduler, PromiseScheduler])
def test_pressure_makes_room_before_anyone_is_preempted(tiny_parts: EngineParts, make: MakeScheduler) -> None:
    """Where full precision would not fit, tokens are demoted, the lowest priority's first; and the answer
    says that it depends on that.
    """
    server = Server(tiny_parts, make, cache_bytes=blocks(tiny_parts, 44), max_batched_tokens=96)
    low, high = (
        server.add(replace(message(prompt_of(200, seed), GREEDY, plan=pressed()), priority=priority))
        for seed, priority in ((0, 0), (1, 100))
    )
    served = {low.key: Served([], []), high.key: Served([], [])}
    first_demoted = None
    while server.engine.has_work:
        for output in server.engine.step():
            served[output.key].events.append(output.event)
        if first_demoted is None:
            demoted = [each for each in (low, high) if each.sequences[0].num_demoted]
            first_demoted = demoted[0] if demoted else None
    assert first_demoted is low, (low.sequences[0].num_demoted, server.engine.counters)
    assert server.engine.counters.num_preemptions == 0
    usage = last(served[low.key]).cache
    assert usage is not None
    assert usage.num_demoted_tokens > 0
    assert not usage.reproducible
    assert server.engine.pool.num_used == 0


def test_a_seed_is_never_under_pressure(tiny_parts: EngineParts) -> None:
    """A seeded request with such a plan is demoted at boundaries, and its answer repeats."""
    params = replace(SEEDED, max_tokens=80)
    calm = serve(tiny_parts, message(prompt_of(150), params, plan=pressed()))
    eager = serve(tiny_parts, message(prompt_of(150), params, plan=plan("k4v4")))
    assert calm.choices == eager.choices
    usage = last(calm).cache
    assert usage is not None
    assert usage.reproducible


@pytest.mark.parametrize("seed", range(4))
def test_estimates_are_what_is_freed(tiny_parts: EngineParts, seed: int) -> None:
    """Whatever is shared or cached, demoting a sequence frees as many blocks as was said."""
    random = Random(seed)
    server = Server(tiny_parts, (FirstComeScheduler, PromiseScheduler)[seed % 2], max_batched_tokens=96)
    server.serve(prompt_of(100), GREEDY)
    draft_always(server)
    for cache_format in ("k4v4", "mixed", "k8v4", "mixed"):
        params = replace(GREEDY, n=random.choice((1, 2)), temperature=1.0)
        server.add(
            message(
                prompt_of(random.choice((100, 180)), seed=random.randrange(2)),
                params,
                plan=pressed(cache_format, drafts=cache_format == "mixed"),
            )
        )
    demoter, pool = server.engine.scheduler._demoter, server.engine.pool  # type: ignore[attr-defined]
    num_freed = 0
    while server.engine.has_work:
        server.engine.step()
        if random.random() < 0.2 and server.engine.scheduler.running:
            sequence = random.choice(server.engine.scheduler.running)
            said, before = demoter.gain(sequence), pool.num_free
            if said > 0:
                demoter.reclaim([sequence], pool.num_blocks)
                assert pool.num_free - before == said
                num_freed += said
        pool.check_integrity()
    assert num_freed > 0
    assert pool.num_used == 0


@pytest.mark.parametrize("seed", range(6))
def test_a_storm_comes_to_an_end(tiny_parts: EngineParts, seed: int) -> None:
    """Choices, formats, drafts, hits, aborts and preemptions at random in a full cache: all that stay are
    served what they are served alone, every step does something, and no block is left.
    """
    random = Random(seed)
    make = (FirstComeScheduler, PromiseScheduler)[seed % 2]
    server = Server(tiny_parts, make, cache_bytes=blocks(tiny_parts, 24), max_batched_tokens=96)
    draft_always(server)
    requests = [_random_request(random) for _ in range(10)]
    asked = {server.add(request).key: request for request in requests}
    events = {key: Served([], []) for key in asked}
    while server.engine.has_work:
        num_rows, is_busy = server.engine.counters.num_rows, bool(server.engine.scheduler.running)
        outputs = server.engine.step()
        assert server.engine.counters.num_rows > num_rows or not is_busy, "nothing moves"
        for output in outputs:
            events[output.key].events.append(output.event)
        server.engine.pool.check_integrity()
        _check_holders(server)
        if random.random() < 0.01 and events:
            gone = random.choice(list(events))
            server.engine.abort(gone)
            del events[gone]
    assert server.engine.pool.num_used == 0
    repeatable = [key for key in events if asked[key].params.seed is not None]
    for key in random.sample(repeatable, min(3, len(repeatable))):
        assert events[key].choices == serve(tiny_parts, asked[key]).choices


def _random_request(random: Random) -> GenerateRequest:
    prompt = prompt_of(random.choice((20, 70, 100, 130)), seed=random.randrange(2))
    params = replace(SEEDED, n=random.choice((1, 1, 3)), max_tokens=random.choice((5, 80)))
    kind = plan(random.choice((*FORMATS, "k16v16")), drafts=random.random() < 0.5)
    if random.random() < 0.2:
        under_pressure = pressed(random.choice(("k4v4", "mixed")), drafts=random.random() < 0.5)
        return message(prompt, replace(params, seed=None), plan=under_pressure)
    return message(prompt, params, plan=kind)


def _check_holders(server: Server) -> None:
    """Every used block is held as often as the running sequences list it."""
    pool = server.engine.pool
    held: list[int] = [
        block
        for sequence in server.engine.scheduler.running
        for block in (*sequence.block_table, *sequence.low_table, *sequence.high_table)
    ]
    assert all(seq.status is SequenceStatus.RUNNING for seq in server.engine.scheduler.running)
    assert sorted(held) == _as_listed(pool.ref_count, pool.num_blocks)


def _as_listed(ref_count: object, num_blocks: int) -> Sequence[int]:
    return [block for block in range(num_blocks) for _ in range(ref_count(block))]  # type: ignore[operator]
