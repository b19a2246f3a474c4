"""Whether a draft model is asked, how far it runs ahead, what it keeps of a draft, whose tokens it knows."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import gguf
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from surefoot.backends.engine.cost_model import StepCost
from surefoot.backends.engine.model_errors import DraftMismatch, ModelError
from surefoot.backends.engine.speculation.acceptance import Acceptance
from surefoot.backends.engine.speculation.base import Draft
from surefoot.backends.engine.speculation.controller import Controller, StepBounds
from surefoot.backends.engine.speculation.draft_cache import DraftCache
from surefoot.backends.engine.speculation.drafting import AHEAD, Prospect, Runner, ahead, choose_depth
from surefoot.backends.engine.speculation.settings import SpeculationSettings
from surefoot.backends.engine.speculation.vocabulary import check_vocabularies
from surefoot.backends.engine.start import EngineOptions, load_parts
from surefoot.backends.engine.tokenizer import Tokenizer, TokenizerSpec
from surefoot.backends.engine.weight_mode import WeightMode

from ..tiny_models import tiny_hf_model, write_gguf
from .sequences import sequence

PASS_S = 0.2


def step_cost(num_rows: int) -> float:
    """A second, and little more for rows."""
    return 1.0 + 0.01 * num_rows


def pass_cost(num_rows: int, num_sequences: int) -> float:
    """A fifth of a step, and little more for rows."""
    return PASS_S + 0.002 * num_rows


def geometric(chance: float, length: int = 16) -> list[float]:
    """Survival where each token is right with the same chance."""
    return [chance ** (j + 1) for j in range(length)]


@given(
    chances=st.lists(st.floats(0.05, 0.99), min_size=1, max_size=4),
    pass_s=st.floats(0.0, 1.0),
    first_rows=st.floats(1.0, 50.0),
)
def test_the_depth_is_the_best_there_is(chances: list[float], pass_s: float, first_rows: float) -> None:
    """No other depth brings more tokens per second, drafting counted."""
    runners = [Runner(geometric(chance, 6), first_rows) for chance in chances]
    num = len(runners)

    def rate(depth: int) -> float:
        tokens = num + sum(sum(runner.survival[:depth]) for runner in runners)
        first_s = pass_s + 0.002 * round(num * first_rows) if depth else 0.0
        return tokens / (step_cost(num * depth) + first_s + max(depth - 1, 0) * (pass_s + 0.002 * num))

    chosen = choose_depth(runners, num, step_cost, lambda rows, _: pass_s + 0.002 * rows, max_rows=1000)
    assert rate(chosen.num_tokens) == pytest.approx(max(rate(depth) for depth in range(7)))


def test_passes_are_part_of_the_cost() -> None:
    """The dearer a pass, the shorter the draft, down to none."""
    depths = [
        choose_depth(
            [Runner(geometric(0.7), 1)], 1, step_cost, lambda rows, _, s=pass_s: s, max_rows=99
        ).num_tokens
        for pass_s in (0.01, 0.1, 0.3, 0.8)
    ]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > 5
    assert depths[-1] == 0


def test_bounds_hold() -> None:
    """Neither the step's rows nor its time are exceeded, however much more would pay."""
    runners = [Runner(geometric(0.95), 1)] * 2
    by_rows = choose_depth(runners, 2, step_cost, pass_cost, max_rows=7)
    assert by_rows.num_tokens == 3
    by_time = choose_depth(runners, 2, step_cost, pass_cost, max_rows=99, max_step_s=1.6)
    assert by_time.num_tokens == 2


def test_a_probe_costs_no_more_than_its_budget() -> None:
    """Where drafting does not pay, one token is drafted if the loss is within the budget, which it names."""
    runners = [Runner(geometric(0.1), 1)]
    assert choose_depth(runners, 1, step_cost, pass_cost, max_rows=9, probe_budget_s=0.1).num_tokens == 0
    probe = choose_depth(runners, 1, step_cost, pass_cost, max_rows=9, probe_budget_s=0.2)
    assert probe.num_tokens == 1
    assert probe.probe_s == pytest.approx(step_cost(1) + pass_cost(1, 1) - 1.1 * step_cost(0))


def controller_for(chance: float, kind: str = "") -> Controller:
    """A controller that knows how often the draft model is right in a kind of traffic."""
    controller = Controller(SpeculationSettings())
    for number in range(1000):
        controller.acceptance.observe(sequence([1], kind=kind), ahead((0,)), number % 100 < 100 * chance)
    return controller


def test_what_is_given_up_is_probed_within_a_share_of_time() -> None:
    """A draft model that is never right runs, but in few steps, which take less than 1 % of the time."""
    controller = controller_for(0.0)
    passes, bounds = StepCost(fixed_s=PASS_S, row_s=0.002), StepBounds(num_sampled=1, max_rows=99)
    prospect = Prospect(sequence([1, 2, 3]), 8, 1)
    num_runs = sum(
        bool(controller.plan_drafting([prospect], bounds, step_cost, passes).wanted) for _ in range(1000)
    )
    assert num_runs >= 10
    assert num_runs * (PASS_S + 0.012) < 0.01 * 1000


def test_what_is_right_again_is_drafted_again() -> None:
    """Probes that turn out right bring drafting back."""
    controller = controller_for(0.0)
    passes, bounds = StepCost(fixed_s=0.05, row_s=0.002), StepBounds(num_sampled=1, max_rows=99)
    seq, depths = sequence([1, 2, 3]), []
    for _ in range(1000):
        wanted = controller.plan_drafting([Prospect(seq, 8, 1)], bounds, step_cost, passes).wanted
        depths.append(wanted[0][1] if wanted else 0)
        if wanted:
            controller.acceptance.observe(seq, ahead((0,) * depths[-1]), depths[-1])
    assert not any(depths[:5])
    assert depths[-1] == 8


def test_catching_up_must_be_earned() -> None:
    """A long prompt is caught up with where an answer has long to go, and not for its last few tokens."""
    controller = controller_for(0.9)
    passes, bounds = StepCost(fixed_s=0.05, row_s=0.02), StepBounds(num_sampled=2, max_rows=99)
    near, far = sequence([1] * 1000, max_tokens=3), sequence([1] * 1000, max_tokens=500)
    drafting = controller.plan_drafting(
        [Prospect(near, 2, 1000), Prospect(far, 8, 1000)], bounds, step_cost, passes
    )
    assert [seq for seq, _ in drafting.wanted] == [far]


def test_promises_leave_less_to_catch_up_with() -> None:
    """Where a step's time is bounded by a promise, no more is caught up with than fits."""
    controller = controller_for(0.9)
    passes = StepCost(fixed_s=0.05, row_s=0.02, sequence_s=0.0)
    prospects = [Prospect(sequence([1] * 90), 8, 90), Prospect(sequence([2]), 8, 1)]
    free = StepBounds(num_sampled=2, max_rows=99)
    assert controller.plan_drafting(prospects, free, step_cost, passes).max_catch_up == 64
    bound = StepBounds(num_sampled=2, max_rows=99, max_step_s=1.3)
    assert controller.plan_drafting(prospects, bound, step_cost, passes).max_catch_up == 12


def test_a_cut_draft_tells_of_one_token_more() -> None:
    """What was drafted is compared with all that came, verified or not, and no further."""
    cache, seq = DraftCache(4), sequence([1, 2, 3])
    cached = cache.hold(seq, 6, ())
    assert cached is not None
    cached.num_committed, cached.num_before, cached.drafted = 6, 3, (7, 8, 9, 4)
    for token_id in (7, 8):
        seq.append(token_id)
    assert cache.settle(seq) == ((7, 8), 2)
    assert cache.num_missing(seq) == 1
    assert cache.settle(seq) is None


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.lists(st.booleans(), min_size=1, max_size=6), st.integers(0, 4)),
        max_size=25,
    )
)
def test_the_cache_holds_what_the_sequence_says(rounds: list[tuple[int, list[bool], int]]) -> None:
    """After any drafts, rejections and pauses, what counts as cached is the sequence's own tokens: all that
    were drafted and came, but not the newest.
    """
    cache, seq = DraftCache(64), sequence([1, 2, 3])
    held: list[int] = []
    for length, rights, pause in rounds:
        cache.settle(seq)
        missing = cache.num_missing(seq)
        assert missing >= 1
        assert held[: len(seq.token_ids) - missing] == seq.token_ids[:-missing]
        cached = cache.hold(seq, missing + length - 1, ())
        assert cached is not None
        drafted = tuple(range(100, 100 + length))
        held = [*seq.token_ids, *drafted[:-1]]
        cached.num_committed, cached.num_before, cached.drafted = len(held), len(seq.token_ids), drafted
        num_right = 0
        for token_id, right in zip(drafted, rights, strict=False):
            seq.append(token_id if right else 5)
            if not right:
                break
            num_right += 1
        for _ in range(pause):
            seq.append(6)
        cache.settle(seq)
        num_kept = cached.num_before + min(num_right, length - 1)
        assert cache.num_missing(seq) == max(1, len(seq.token_ids) - num_kept)
        cache.pool.check_integrity()
    cache.drop(seq)
    assert cache.pool.num_used == 0


def test_learning_ahead_is_apart_from_real_drafts() -> None:
    """How often the model is right is learnt beside what its tokens are worth by their probability."""
    acceptance, seq = Acceptance(), sequence([1])
    for _ in range(100):
        acceptance.observe(seq, Draft(AHEAD, (0,), (2,)), 0)
    assert acceptance.survival(seq, Draft("draft", (0,), (2,)))[0] > 0.5
    assert acceptance.survival(seq, ahead((0,)))[0] < 0.1


def tokenizer_of(tokens: list[str], special: list[str]) -> Tokenizer:
    """A vocabulary with special tokens behind it."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    return Tokenizer(backend, TokenizerSpec())


OURS = MappingProxyType({"tokens": ["a", "b", "c"], "special": ["<end>"]})


@pytest.mark.parametrize(
    ("tokens", "special", "reason"),
    [
        (["a", "x", "c"], ["<end>"], "token 1 is 'x' in small and 'b' in big"),
        (["a", "b", "c"], ["<stop>"], "token 3 is special '<stop>' in small and special '<end>' in big"),
        (["a", "b", "c", "<end>"], [], "token 3 is '<end>' in small and special '<end>' in big"),
        (["a", "b", "c"], ["<end>", "<more>"], "token 4 is special '<more>' in small and no token in big"),
        (["a", "b", "c"], [], "token 3 is no token in small and special '<end>' in big"),
    ],
    ids=["token", "special", "not-special", "more", "fewer"],
)
def test_another_language_is_refused(tokens: list[str], special: list[str], reason: str) -> None:
    """Where a token means something else to the draft model, the message says which one, and names both."""
    with pytest.raises(DraftMismatch, match=rf"small cannot draft for big.*{reason}"):
        check_vocabularies(tokenizer_of(**OURS), tokenizer_of(tokens, special), "big", "small")


def test_padding_is_no_difference() -> None:
    """Vocabularies that are filled up to different sizes are the same."""
    padded = tokenizer_of(OURS["tokens"], [*OURS["special"], "[PAD4]", "[PAD5]", "[unused6]"])
    check_vocabularies(tokenizer_of(**OURS), padded, "big", "small")
    check_vocabularies(padded, tokenizer_of(**OURS), "big", "small")


def test_a_draft_model_is_loaded_at_start(tmp_path: Path, cache_dir: Path) -> None:
    """A start with a draft model loads both, and refuses one of another vocabulary."""
    tiny = tmp_path / "tiny.gguf"
    write_gguf(tiny, tiny_hf_model("qwen3"))
    options = {"cache_dir": cache_dir, "weights": WeightMode.FLOAT32, "threads": 1, "model_id": "tiny"}
    parts = load_parts(EngineOptions(model=tiny, draft_model=tiny, **options), print)  # type: ignore[arg-type]
    assert parts.draft is not None
    assert parts.draft.fingerprint == parts.loaded.fingerprint
    other = tmp_path / "other.gguf"
    write_gguf(other, tiny_hf_model("qwen3"))
    data = other.read_bytes()
    other.write_bytes(data.replace(b"<|im_end|>", b"<|im_fin|>"))
    assert gguf.GGUFReader(other)
    with pytest.raises(ModelError, match=r"other.gguf cannot draft for tiny.gguf.*im_fin"):
        load_parts(EngineOptions(model=tiny, draft_model=other, **options), print)  # type: ignore[arg-type]
