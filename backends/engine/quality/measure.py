"""`surefoot quality`: an operator's plans against full precision, on their model and text."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import msgspec
from msgspec import Struct

from surefoot.kernels.layout import BLOCK_TOKENS, BlockLayout

from ..backend import EngineParts
from ..cache_rule import PLAN_FORMATS
from ..device import CPU
from ..loss_errors import LossError
from ..loss_text import read_documents
from ..start import EngineOptions, Progress, load_parts
from ..weight_mode import WeightMode
from .branch import Branch
from .forcing import Forced, compare, read_prompt
from .generate import generate, repetition
from .plans import FULL_PRECISION, QualityPlan, num_blocks, window_of_equal_bytes
from .reader import Reader
from .recall import TASKS, Answered, Haystack, asked_later, make_haystack
from .statistics import Estimate, difference, estimate
from .texts import cut_windows


class QualitySettings(Struct, frozen=True, kw_only=True):
    """What is compared, and on how much. `LossError` if a value is of no use.

    Every format comes with every `recent`. A text is read up to `context` before the first demotion.
    """

    files: tuple[Path, ...] = ()
    formats: tuple[str, ...] = ("k8v8", "k8v4", "mixed", "k4v4")
    sinks: int = 4
    recent: tuple[int, ...] = (64,)
    context: int = 2048
    texts: int = 6
    tokens: int = 128
    tasks: tuple[str, ...] = tuple(TASKS)
    haystacks: int = 2
    generated: int = 96
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.formats:
            if name not in PLAN_FORMATS:
                raise LossError(f"no cache format {name!r}: {', '.join(PLAN_FORMATS)}")
        for name in self.tasks:
            if name not in TASKS:
                raise LossError(f"no task {name!r}: {', '.join(TASKS)}")
        least = {
            "context": BLOCK_TOKENS + 1,
            "texts": 2,
            "tokens": 2,
            "haystacks": 0,
            "generated": 0,
            "sinks": 0,
        }
        for name, limit in least.items():
            if getattr(self, name) < limit:
                raise LossError(f"{name} is {limit} or more, got {getattr(self, name)}")
        if not self.formats or not self.recent:
            raise LossError("at least one format and one number of recent tokens are needed")
        if min(self.recent) < 0:
            raise LossError(f"recent is 0 or more, got {min(self.recent)}")

    @property
    def plans(self) -> list[QualityPlan]:
        """Without the window that drops."""
        return [
            QualityPlan.served(name, self.sinks, recent)
            for name, recent in product(self.formats, self.recent)
        ]


class TaskQuality(Struct, frozen=True, kw_only=True):
    """A plan on a task of ten depths: answers' log-probability and share right, less full precision's."""

    task: str
    num_answers: int
    logprob: Estimate
    right: Estimate
    share_right: float
    full_share_right: float
    tokens_right: float
    full_tokens_right: float


class PlanQuality(Struct, frozen=True, kw_only=True):
    """A plan against full precision. `more_repetition` is the share of repeated runs of four tokens in what
    it writes, less full precision's; None if nothing was written.
    """

    name: str
    tokens_per_byte: float
    loss: Estimate
    divergence: Estimate
    equal_argmax: Estimate
    tasks: list[TaskQuality]
    repetition: float | None
    more_repetition: Estimate | None


class QualityReport(Struct, frozen=True, kw_only=True):
    """All plans, and what they were measured on; `text_digest` says whether two reports had one text."""

    model: str
    weights: WeightMode
    ops: str
    context: int
    num_texts: int
    num_tokens: int
    seed: int
    text_digest: str
    plans: list[PlanQuality]
    seconds: float


def measure_quality(options: EngineOptions, settings: QualitySettings, progress: Progress) -> QualityReport:
    """Everything, in minutes. Raises `LossError` and `ModelError`."""
    documents = read_documents(settings.files)
    if options.device != CPU:
        raise LossError(f"quality is measured on the CPU, not on {options.device}: set device = cpu")
    parts = load_parts(options, progress)
    started_s = time.monotonic()
    windows = _windows(parts, settings, documents)
    context, tokenizer = settings.context, parts.loaded.tokenizer
    haystacks = [
        make_haystack(tokenizer, window[:context], settings.tasks, settings.seed + number)
        for number, window in enumerate(windows[settings.texts :])
    ]
    reader = Reader(parts, _num_blocks(settings))
    plans = [*settings.plans, _window(settings, reader.store.layout)]
    forced, written = _read_texts(reader, settings, plans, windows[: settings.texts], progress)
    answered = _ask(reader, plans, haystacks, progress)
    return QualityReport(
        model=options.model_id,
        weights=options.weights,
        ops=parts.ops.name,
        context=settings.context,
        num_texts=settings.texts,
        num_tokens=settings.texts * settings.tokens,
        seed=settings.seed,
        text_digest=hashlib.blake2b(repr(windows).encode(), digest_size=6).hexdigest(),
        plans=[
            _plan_quality(
                plan, forced[place], answered[0], answered[place + 1], written[0], written[place + 1]
            )
            for place, plan in enumerate(plans)
        ],
        seconds=time.monotonic() - started_s,
    )


def make_report_folder(folder: Path) -> None:
    """Before the minutes of measuring: raises `LossError` if nothing could be written there after them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LossError(f"the report cannot be written to {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise LossError(f"the report cannot be written to {folder}: no permission")


def write_report(report: QualityReport, folder: Path, text: str, plot: str) -> None:
    """`quality.json`, `quality.md` and `quality.svg`; `LossError` if they cannot be written."""
    try:
        (folder / "quality.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
        (folder / "quality.md").write_text(
            f"{text}\n![Quality against bytes](quality.svg)\n", encoding="utf-8"
        )
        (folder / "quality.svg").write_text(plot, encoding="utf-8")
    except OSError as error:
        raise LossError(f"the report cannot be written to {folder}: {error.strerror}") from error


def _windows(parts: EngineParts, settings: QualitySettings, documents: Sequence[str]) -> list[list[int]]:
    length = settings.context + max(settings.tokens + 1, settings.generated)
    longest = parts.loaded.config.max_model_len
    if length > longest:
        raise LossError(
            f"a context of {settings.context} tokens and what is predicted after it take {length}, but the"
            f" model takes {longest}"
        )
    return cut_windows(parts.loaded.tokenizer, documents, settings.texts + settings.haystacks, length)


def _num_blocks(settings: QualitySettings) -> int:
    """For all texts' prompts, which are written on from together, and a fork of each."""
    length = settings.context + settings.tokens + settings.generated
    return (settings.texts + 1) * 2 * (length // BLOCK_TOKENS + 8)


def _window(settings: QualitySettings, layout: BlockLayout) -> QualityPlan:
    smallest = min(settings.plans, key=lambda plan: num_blocks(plan, layout, settings.context))
    return window_of_equal_bytes(smallest, layout, settings.context)


def _read_texts(
    reader: Reader,
    settings: QualitySettings,
    plans: Sequence[QualityPlan],
    windows: Sequence[Sequence[int]],
    progress: Progress,
) -> tuple[list[list[Forced]], list[list[list[int]]]]:
    """By plan, its loss on each text; by plan, full precision first, what it wrote after each."""
    context, by_text, prompts = settings.context, [], []
    with ExitStack() as stack:
        for number, window in enumerate(windows):
            progress(
                f"Text {number + 1} of {len(windows)}: {settings.tokens} tokens under {len(plans)} plans."
            )
            branch = stack.enter_context(Branch(reader.store))
            prompts.append(read_prompt(reader, branch, window[:context]))
            by_text.append(
                compare(reader, prompts[-1], plans, window[context : context + settings.tokens + 1])
            )
        written = []
        last_ids = [window[context] for window in windows]
        for plan in (FULL_PRECISION, *plans):
            if settings.generated:
                progress(f"Writing {settings.generated} tokens after each text under {plan.name}.")
            written.append(generate(reader, prompts, plan, last_ids, settings.generated, settings.seed))
    return [list(forced) for forced in zip(*by_text, strict=True)], written


def _ask(
    reader: Reader, plans: Sequence[QualityPlan], haystacks: Sequence[Haystack], progress: Progress
) -> list[list[Answered]]:
    """By plan, full precision first, every answer."""
    answered: list[list[Answered]] = [[] for _ in range(len(plans) + 1)]
    for number, haystack in enumerate(haystacks):
        progress(f"Facts in text {number + 1} of {len(haystacks)}.")
        with Branch(reader.store) as branch:
            prompt = read_prompt(reader, branch, haystack.token_ids)
            for own, plan in zip(answered, (FULL_PRECISION, *plans), strict=True):
                own += asked_later(reader, prompt, plan, haystack.questions)
    return answered


def _plan_quality(
    plan: QualityPlan,
    forced: Sequence[Forced],
    full_answers: Sequence[Answered],
    answers: Sequence[Answered],
    full_written: Sequence[Sequence[int]],
    written: Sequence[Sequence[int]],
) -> PlanQuality:
    rates, full_rates = ([repetition(text) for text in texts] for texts in (written, full_written))
    tasks = dict.fromkeys(answer.task for answer in answers)
    has_written = any(written)
    return PlanQuality(
        name=plan.name,
        tokens_per_byte=sum(own.tokens_per_byte for own in forced) / len(forced),
        loss=estimate([own.loss for own in forced]),
        divergence=estimate([own.divergence for own in forced]),
        equal_argmax=estimate([own.equal_argmax for own in forced]),
        tasks=[
            _task_quality(task, *([a for a in group if a.task == task] for group in (answers, full_answers)))
            for task in tasks
        ],
        repetition=sum(rates) / len(rates) if has_written else None,
        more_repetition=difference(rates, full_rates) if has_written else None,
    )


def _task_quality(task: str, own: Sequence[Answered], full: Sequence[Answered]) -> TaskQuality:
    return TaskQuality(
        task=task,
        num_answers=len(own),
        logprob=difference([a.logprob for a in own], [a.logprob for a in full]),
        right=difference([a.is_right for a in own], [a.is_right for a in full]),
        share_right=sum(a.is_right for a in own) / len(own),
        full_share_right=sum(a.is_right for a in full) / len(full),
        tokens_right=sum(a.share_right for a in own) / len(own),
        full_tokens_right=sum(a.share_right for a in full) / len(full),
    )
