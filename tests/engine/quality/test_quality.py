from __future__ import annotations

import random
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import msgspec
import pytest
import torch

from surefoot.backends.engine.backend import EngineParts
from surefoot.backends.engine.cache_rule import PLAN_FORMATS, CacheSpace
from surefoot.backends.engine.loss_errors import LossError
from surefoot.backends.engine.loss_text import default_documents
from surefoot.backends.engine.quality.branch import BlockStore, Branch, OutOfBlocks
from surefoot.backends.engine.quality.forcing import compare, force, forked, read_prompt
from surefoot.backends.engine.quality.generate import generate, repetition
from surefoot.backends.engine.quality.importance import Importance
from surefoot.backends.engine.quality.measure import QualityReport, QualitySettings
from surefoot.backends.engine.quality.plans import (
    FULL_PRECISION,
    Choice,
    QualityPlan,
    full_share_of_equal_bytes,
    num_blocks,
    window_of_equal_bytes,
)
from surefoot.backends.engine.quality.reader import Piece, Reader
from surefoot.backends.engine.quality.recall import TASKS, asked_in_prompt, asked_later, make_haystack
from surefoot.backends.engine.quality.report import report_plot, report_text
from surefoot.backends.engine.quality.statistics import difference, estimate
from surefoot.backends.engine.quality.texts import cut_windows
from surefoot.backends.types import CachePlan
from surefoot.gateway.cli import run
from surefoot.kernels.layout import FORMATS, FULL, INT4, INT8, K8V4, BlockLayout
from surefoot.kernels.reference import ReferenceOps

LAYOUT = BlockLayout(num_kv_heads=1, head_dim=16, dtype=torch.float32)
SMALL = ("--context", "450", "--texts", "2", "--tokens", "3", "--haystacks", "1", "--generated", "8")


@pytest.fixture(scope="module")
def reader(parts: EngineParts) -> Reader:
    """The real model, with blocks for a few short texts."""
    return Reader(parts, 400)


@pytest.fixture(scope="module")
def window(reader: Reader) -> list[int]:
    """Text of this installation."""
    return cut_windows(reader.tokenizer, default_documents(), 3, 700)[1]


def _store(num_blocks: int = 64) -> BlockStore:
    return BlockStore(ReferenceOps(), LAYOUT, num_layers=2, num_blocks=num_blocks)


def _stored(branch: Branch, store: BlockStore) -> dict[int, float]:
    """The first number of V of each position that is in full precision, in the first layer."""
    held, capacity = branch.held[FULL], LAYOUT.capacity(FULL)
    plane = LAYOUT.v_plane(store.data[0])
    return {
        position: float(plane[held.blocks[place // capacity], 0, place % capacity, 0])
        for place, position in enumerate(held.positions)
    }


def _fill(branch: Branch, store: BlockStore, number: int) -> None:
    """Tokens whose numbers are their position."""
    first = branch.length
    at = branch.extend(number)
    rows = (first + torch.arange(number)).float()[None, :, None, None].expand(2, number, 1, 16)
    store.ops.commit(store.data, LAYOUT, rows, rows, at.blocks, at.slots)


def test_moves_keep_every_token() -> None:
    """Tokens that move at random between formats, in branches that share blocks, are never lost or mixed up,
    and all blocks come back.
    """
    source, store = random.Random(1), _store(256)
    with Branch(store) as branch:
        _fill(branch, store, 111)
        with branch.fork() as other:
            for own in (branch, other, branch, other):
                kept = [p for held in own.held.values() for p in held.positions]
                lowest = {p: f for f, held in own.held.items() for p in held.positions}
                own.move(
                    {
                        p: source.choice(FORMATS[FORMATS.index(lowest[p]) :])
                        for p in source.sample(kept, len(kept) // 3)
                    }
                )
                _fill(own, store, 9)
                tokens = sorted(p for held in own.held.values() for p in held.positions)
                assert tokens == list(range(own.length))
                assert all(value == position for position, value in _stored(own, store).items())
        assert branch.num_blocks == store.num_used
    assert store.num_used == 0


def test_dropped_tokens_free_their_blocks() -> None:
    """Tokens that are dropped take no room, and positions go on."""
    store = _store()
    with Branch(store) as branch:
        _fill(branch, store, 64)
        branch.move(dict.fromkeys(range(60)))
        assert (branch.num_blocks, branch.length, store.num_used) == (1, 64, 1)
        assert _stored(branch, store) == {p: float(p) for p in range(60, 64)}


def test_a_full_store_says_so() -> None:
    """There is no block beyond the last."""
    store = _store(2)
    with Branch(store) as branch, pytest.raises(OutOfBlocks, match="all 2 blocks"):
        _fill(branch, store, 33)


def test_targets_protect() -> None:
    """Sinks and the recent window are in no plan's targets; a share of the others gets the better format, by
    age or by score.
    """
    store = _store()
    with Branch(store) as branch:
        _fill(branch, store, 50)
        scores = torch.arange(50).float().neg()
        plan = QualityPlan(low=INT4, sinks=4, recent=10, high=K8V4, share=0.25)
        by_age = plan.targets(branch, scores)
        assert sorted(by_age) == list(range(4, 40))
        assert [p for p, kind in by_age.items() if kind == K8V4] == list(range(31, 40))
        by_score = QualityPlan(
            low=INT4, sinks=4, recent=10, high=K8V4, share=0.25, choice=Choice.IMPORTANCE
        ).targets(branch, scores)
        assert [p for p, kind in by_score.items() if kind == K8V4] == list(range(4, 13))


def test_the_share_holds_at_every_boundary() -> None:
    """As a text grows, tokens of the better format make room; what was lowered stays so."""
    store, plan = _store(), QualityPlan(low=INT4, sinks=4, recent=8, share=0.25)
    with Branch(store) as branch:
        lowered: set[int] = set()
        for _ in range(4):
            _fill(branch, store, 20)
            branch.move(plan.targets(branch, torch.zeros(branch.length)))
            assert len(branch.held[K8V4].positions) == round(0.25 * (branch.length - 12))
            assert lowered <= set(branch.held[INT4].positions)
            lowered = set(branch.held[INT4].positions)
            assert branch.num_blocks == num_blocks(plan, LAYOUT, branch.length)


@pytest.mark.parametrize("name", PLAN_FORMATS)
def test_what_is_measured_is_what_is_served(name: str) -> None:
    """At every boundary as many tokens have each format as in the engine."""
    store, plan = _store(), QualityPlan.served(name, sinks=4, recent=8)
    space = CacheSpace(layout=LAYOUT, num_layers=2, num_blocks=64, max_context=512)
    rule = space.rule(CachePlan(format=name, sinks=4, recent=8), 70)
    with Branch(store) as branch:
        for number in (70, 64, 64, 64):
            _fill(branch, store, number)
            branch.move(plan.targets(branch, torch.zeros(branch.length)))
            held = {each: len(own.positions) for each, own in branch.held.items() if own.positions}
            if rule is None:
                assert held == {FULL: branch.length}
                continue
            split = rule.split(rule.num_demoted(branch.length))
            served = {FULL: branch.length - split.total, rule.format.low: split.low}
            assert held == (served | {rule.format.high: split.high} if split.high else served)


def test_equal_bytes() -> None:
    """What is compared at equal bytes has them, within a block."""
    layout = BlockLayout(num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    plan = QualityPlan(low=INT4, share=0.25)
    share = full_share_of_equal_bytes(plan, layout)
    in_full = QualityPlan(low=INT4, high=FULL, share=share)
    window = window_of_equal_bytes(plan, layout, 4096)
    for other in (in_full, window):
        assert abs(num_blocks(other, layout, 4096) - num_blocks(plan, layout, 4096)) <= 1
    assert [layout.capacity(kind) for kind in FORMATS] == [16, 30, 39, 56]


def test_importance_by_hand() -> None:
    """A score is the mean over later observed queries of mass times what each could see."""
    importance = Importance()
    importance.add(torch.tensor([[0.5, 0.5, 0.0]]), [1])
    importance.add(torch.tensor([[0.1, 0.2, 0.3, 0.4]]), [3])
    assert importance.scores(5).tolist() == pytest.approx([(0.5 * 2 + 0.1 * 4) / 2, 0.8, 1.2, 0.0, 0.0])


def test_watched_mass_is_a_share(reader: Reader, window: list[int]) -> None:
    """What a row gives all tokens is between 1 (heads that agree) and the number of heads, and later tokens
    get none.
    """
    with Branch(reader.store) as branch:
        reader.read(branch, window[:80])
        branch.move(QualityPlan(low=INT4, recent=20).targets(branch, torch.zeros(80)))
        _, mass = reader.watch(Piece(branch, window[80:96]), [0, 7])
    assert mass.shape == (2, 96)
    assert not mass[0, 81:].any()
    assert not mass[1, 88:].any()
    assert ((mass.sum(1) >= 1.0) & (mass.sum(1) <= 9.0)).all()


def test_losses_are_ordered(reader: Reader, window: list[int]) -> None:
    """Full precision against itself differs in no bit; int8 is nearer to it than int4, and all are nearer
    than a window of int4's bytes that drops.
    """
    int4 = QualityPlan(low=INT4)
    plans = [FULL_PRECISION, QualityPlan(low=INT8), int4]
    plans.append(window_of_equal_bytes(int4, reader.store.layout, 300))
    with Branch(reader.store) as branch:
        prompt = read_prompt(reader, branch, window[:300])
        same, int8, lower, dropped = compare(reader, prompt, plans, window[300:429])
    assert (same.loss, same.divergence, same.equal_argmax, same.tokens_per_byte) == (0.0, 0.0, 1.0, 1.0)
    assert abs(int8.loss) < 0.01
    assert int8.divergence < lower.divergence < dropped.divergence
    assert 1.0 < int8.tokens_per_byte < lower.tokens_per_byte
    assert reader.store.num_used == 0


def test_a_fork_predicts_what_reading_on_does(reader: Reader, window: list[int]) -> None:
    """A full-precision fork gives the bits of a text that was never forked, boundaries or not."""
    with Branch(reader.store) as branch:
        prompt = read_prompt(reader, branch, window[:100])
        forced = torch.cat([rows for rows, _ in force(reader, prompt, FULL_PRECISION, window[100:200])])
    with Branch(reader.store) as branch:
        hidden = reader.run([Piece(branch, window[:200])])
    assert torch.equal(forced, reader.logits(hidden[100:]).log_softmax(-1))


def test_facts_are_found(reader: Reader) -> None:
    """Full precision answers what a text tells, asked for together and later or alone in the prompt; a
    window that drops the facts does not.
    """
    filler = cut_windows(reader.tokenizer, default_documents(), 2, 450)[1]
    haystack = make_haystack(reader.tokenizer, filler, ["retrieval"], seed=3)
    assert len(haystack.token_ids) == 450
    plans = [FULL_PRECISION, QualityPlan(low=None, recent=16)]
    with Branch(reader.store) as branch:
        prompt = read_prompt(reader, branch, haystack.token_ids)
        full, dropped = (asked_later(reader, prompt, plan, haystack.questions) for plan in plans)
        again, worse = asked_in_prompt(reader, branch, plans, haystack.questions[0])
    assert sum(answer.is_right for answer in full) >= 6
    assert sum(answer.is_right for answer in dropped[:9]) <= 1
    assert [answer.depth for answer in full] == list(range(10))
    assert worse.logprob < again.logprob


@pytest.mark.parametrize("task", TASKS)
def test_tasks(reader: Reader, task: str) -> None:
    """Every fact of a task has an answer that its sentence tells; the seed decides them all."""
    facts = TASKS[task](random.Random(0))
    assert len(facts) == 10
    assert all(fact.answer.strip() in fact.told for fact in facts)
    assert len({fact.question for fact in facts}) == 10
    assert facts == TASKS[task](random.Random(0)) != TASKS[task](random.Random(1))
    with pytest.raises(LossError, match=r"context = 30 tokens are too few to hide facts of \d+ in: it takes"):
        make_haystack(reader.tokenizer, range(30), [task], seed=0)


def test_writing(reader: Reader, window: list[int]) -> None:
    """What is written depends on the seed alone, and texts that are written together are as if alone."""
    with Branch(reader.store) as first, Branch(reader.store) as second:
        prompts = [read_prompt(reader, first, window[:64]), read_prompt(reader, second, window[64:128])]
        last_ids, plan = [window[64], window[128]], QualityPlan(low=INT4, recent=8)
        both = generate(reader, prompts, plan, last_ids, 6, seed=1)
        assert both[0] == generate(reader, prompts[:1], plan, last_ids[:1], 6, seed=1)[0]
        assert both != generate(reader, prompts, plan, last_ids, 6, seed=2)
        with forked(prompts[0]) as own:
            assert own.branch.length == 64
    assert repetition([1, 2, 3, 4, 5, 6, 7, 8]) == 0.0
    assert repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)


def test_estimates() -> None:
    """An interval is around its mean, the same each time, and none wide for equal values."""
    assert estimate([0.5] * 4) == difference([1.5] * 4, [1.0] * 4)
    values = [0.0, 1.0, 2.0, 3.0]
    found = estimate(values)
    assert found.mean == 1.5
    assert 0.0 <= found.low < 1.5 < found.high <= 3.0
    assert found == estimate(values)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"formats": ("k2v2",)}, "no cache format 'k2v2'"),
        ({"tasks": ("guessing",)}, "no task 'guessing'"),
        ({"texts": 1}, "texts is 2 or more, got 1"),
        ({"context": 16}, "context is 17 or more, got 16"),
        ({"recent": (64, -1)}, "recent is 0 or more, got -1"),
        ({"recent": ()}, "one number of recent tokens"),
    ],
)
def test_settings_of_no_use(changes: dict[str, object], said: str) -> None:
    """A value that measures nothing is refused, with the value."""
    with pytest.raises(LossError, match=said):
        QualitySettings(**changes)  # type: ignore[arg-type]  # the parameters' types differ


def test_windows_do_not_overlap(reader: Reader) -> None:
    """Windows are spread over the text to its end; more than it has are refused, with both lengths."""
    text = "one two three four " * 50
    token_ids = reader.tokenizer.encode(text)
    windows = cut_windows(reader.tokenizer, [text], 3, 20)
    assert [windows[0], windows[2]] == [token_ids[:20], token_ids[-20:]]
    with pytest.raises(LossError, match=f"{len(token_ids)} tokens, but 9 windows of 100 tokens take 900"):
        cut_windows(reader.tokenizer, [text], 9, 100)


def test_the_command(cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`quality` prints its report, and leaves it with JSON and a plot in a folder; progress is on stderr."""
    arguments = [
        "--tasks",
        "retrieval",
        "--formats",
        "mixed",
        "--output",
        str(tmp_path / "report"),
        "--threads",
        "1",
    ]
    assert run(["quality", *SMALL, *arguments, "--cache-dir", str(cache_dir)], {}) == 0
    printed = capsys.readouterr()
    assert "Text 2 of 2" in printed.err
    folder = tmp_path / "report"
    report = msgspec.json.decode((folder / "quality.json").read_bytes(), type=QualityReport)
    assert report.plans[0].name == "mixed, recent 64"
    assert report.plans[1].name.startswith("drop, recent ")
    assert {task.task for task in report.plans[0].tasks} == {"retrieval"}
    assert printed.out == report_text(report)
    assert (folder / "quality.md").read_text().startswith(printed.out)
    names = [element.text for element in ElementTree.fromstring(report_plot(report)).iter() if element.text]
    assert {"1  mixed, recent 64", f"2  {report.plans[1].name}"} <= set(names)
    assert (folder / "quality.svg").read_text() == report_plot(report)


def test_the_commands_errors(tmp_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing file, a format that is none and too long a context are one sentence and exit status 2."""
    where = ["--cache-dir", str(cache_dir), "--threads", "1"]
    for arguments, said in (
        (["--text", str(tmp_path / "missing")], "missing cannot be read"),
        (["--formats", "int3"], "no cache format 'int3'"),
        (["--context", "9000"], "the model takes 8192"),
    ):
        assert run(["quality", *arguments, *where], {}) == 2
        assert said in capsys.readouterr().err.splitlines()[-1]
