"""Which tokens may go to which format: the study behind the default plans.

    make study-cache
    python -m surefoot.backends.engine.quality.study --help

Whole documents are read in full precision up to some contexts, forked there, and predicted on under each
plan, whose tokens are demoted at the fork and at every 64th token after. Facts are hidden at ten depths of
other windows, and asked for after the demotion, and at the end of the prompt. Everything is paired with full
precision on the same tokens; intervals are of 95 %, over texts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_job
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter
from msgspec import Struct
from msgspec.structs import replace

from surefoot.backends.catalog import default_model_id, locate_model
from surefoot.kernels.layout import FULL, INT4, INT8, K8V4, BlockLayout

from ..loss_text import read_documents
from ..start import EngineOptions, load_parts
from .branch import Branch
from .forcing import Forced, compare, read_prompt
from .plans import FULL_PRECISION, Choice, QualityPlan, full_share_of_equal_bytes, window_of_equal_bytes
from .reader import Reader
from .recall import Answered, asked_in_prompt, asked_later, make_haystack
from .statistics import Estimate, difference, estimate
from .texts import cut_windows

CHOICES = tuple(Choice)
TASKS = ("retrieval", "look-alikes")
MAIN_CONTEXT = 4096
"""Where all plans are tried; elsewhere the main ones."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Job:
    """What to study, and how long."""

    model: Annotated[str, Parameter(help="Whose cache")] = "smollm2"
    cache_dir: Annotated[Path, Parameter(help="Folder of prepared weights")] = Path("~/.cache/surefoot")
    threads: Annotated[int | None, Parameter(help="CPU threads [as many as there are]")] = None
    contexts: Annotated[tuple[int, ...], Parameter(help="Tokens before the first demotion")] = (
        1024,
        4096,
        7680,
    )
    texts: Annotated[int, Parameter(help="Windows of text; every other one up to the longest context")] = 8
    tokens: Annotated[int, Parameter(help="Tokens that are predicted at each context")] = 256
    haystacks: Annotated[int, Parameter(help="Texts of facts at 4k; a third of them elsewhere")] = 10
    quick: Annotated[bool, Parameter(negative="", help="3 texts, 2 of them up to 4k, and 1 haystack")] = False
    output: Annotated[Path | None, Parameter(help="Store everything in this file, as JSON")] = None


class LossRow(Struct, frozen=True, kw_only=True):
    """A plan at a context. `samples` has a value for each text."""

    context: int
    plan: str
    tokens_per_byte: float
    loss: Estimate
    divergence: Estimate
    equal_argmax: Estimate
    samples: list[Forced]


class AnswerRow(Struct, frozen=True, kw_only=True):
    """A plan on a task. `logprob` and `right` are differences to full precision, paired by answer."""

    context: int
    task: str
    asked: str
    plan: str
    num_answers: int
    logprob: Estimate
    right: Estimate
    share_right: float
    full_share_right: float
    samples: list[Answered]


class ContrastRow(Struct, frozen=True, kw_only=True):
    """Importance against another choice at equal bytes: its loss less the other's, by text."""

    context: int
    plan: str
    against: str
    loss: Estimate
    divergence: Estimate


class AnswerContrastRow(Struct, frozen=True, kw_only=True):
    """Importance against another choice at equal bytes: its answers' log-probability less the other's."""

    context: int
    task: str
    asked: str
    plan: str
    against: str
    logprob: Estimate
    right: Estimate


class Study(Struct, frozen=True, kw_only=True):
    """All that was found."""

    losses: list[LossRow]
    contrasts: list[ContrastRow]
    answers: list[AnswerRow]
    answer_contrasts: list[AnswerContrastRow]
    seconds: float


Progress = Callable[[str], None]
DEFAULT_JOB = Job()


def main(*, job: Job = DEFAULT_JOB) -> int:
    """Study which tokens of the KV cache may go to which format."""
    if job.quick:
        job = replace_job(job, texts=3, haystacks=1, contexts=job.contexts[:2])
    options = EngineOptions(
        model=locate_model(job.model),
        model_id=default_model_id(job.model),
        cache_dir=job.cache_dir.expanduser(),
        threads=job.threads,
    )
    study = run_study(job, options, _tell)
    sys.stdout.write(text_of(study))
    if job.output is not None:
        job.output.write_bytes(msgspec.json.encode(study) + b"\n")
    return 0


def run_study(job: Job, options: EngineOptions, progress: Progress) -> Study:
    """Everything, in minutes."""
    parts = load_parts(options, progress)
    longest = max(job.contexts) + job.tokens + 1
    # A prompt, its fork, which shares most of it, and a fork of that.
    reader = Reader(parts, 3 * (longest // 16 + 16))
    num_windows = job.texts + job.haystacks
    windows = cut_windows(reader.tokenizer, read_documents(()), num_windows, longest)
    started_s = time.monotonic()
    losses = _losses(job, reader, windows[: job.texts], progress)
    answers = _answers(job, reader, windows[job.texts :], progress)
    return Study(
        losses=losses,
        contrasts=_contrasts(losses),
        answers=answers,
        answer_contrasts=answer_contrasts(answers),
        seconds=time.monotonic() - started_s,
    )


def plans_at(context: int, layout: BlockLayout) -> list[QualityPlan]:
    """What is compared, full precision left out."""
    k8v4, int4 = QualityPlan(low=K8V4), QualityPlan(low=INT4)
    quarter = [QualityPlan(low=INT4, high=K8V4, share=0.25, choice=choice) for choice in CHOICES]
    window = window_of_equal_bytes(int4, layout, context)
    main = [QualityPlan(low=INT8), k8v4, int4, window, *quarter]
    if context != MAIN_CONTEXT:
        return main
    share = full_share_of_equal_bytes(quarter[0], layout)
    return [
        *main,
        *(replace(plan, recent=recent) for plan in (k8v4, int4) for recent in (0, 16, 32, 256)),
        window_of_equal_bytes(k8v4, layout, context),
        QualityPlan(low=None, recent=256),
        *(replace(plan, share=0.4) for plan in quarter),
        *(replace(plan, high=FULL, share=share) for plan in quarter),
    ]


def answer_plans_at(context: int, layout: BlockLayout) -> list[QualityPlan]:
    """What is asked for facts: the main plans, and at the main context larger shares."""
    plans = [FULL_PRECISION, *plans_at(context, layout)]
    return plans if context != MAIN_CONTEXT else [*plans[:8], *plans[-6:]]


def _losses(job: Job, reader: Reader, windows: Sequence[Sequence[int]], progress: Progress) -> list[LossRow]:
    layout = reader.store.layout
    samples: dict[tuple[int, QualityPlan], list[Forced]] = {}
    for number, window in enumerate(windows):
        contexts = job.contexts if number % 2 == 0 or len(job.contexts) == 1 else job.contexts[:-1]
        with Branch(reader.store) as branch:
            for context in contexts:
                progress(f"Text {number + 1} of {len(windows)}, context {context}.")
                prompt = read_prompt(reader, branch, window[branch.length : context])
                plans = plans_at(context, layout)
                found = compare(reader, prompt, plans, window[context : context + job.tokens + 1])
                for plan, forced in zip(plans, found, strict=True):
                    samples.setdefault((context, plan), []).append(forced)
    return [_loss_row(context, plan, own) for (context, plan), own in samples.items()]


def _loss_row(context: int, plan: QualityPlan, samples: list[Forced]) -> LossRow:
    return LossRow(
        context=context,
        plan=plan.name,
        tokens_per_byte=sum(forced.tokens_per_byte for forced in samples) / len(samples),
        loss=estimate([forced.loss for forced in samples]),
        divergence=estimate([forced.divergence for forced in samples]),
        equal_argmax=estimate([forced.equal_argmax for forced in samples]),
        samples=samples,
    )


def _contrasts(losses: Sequence[LossRow]) -> list[ContrastRow]:
    rows = {(row.context, row.plan): row for row in losses}
    by_importance = [row for row in losses if f"by {Choice.IMPORTANCE}" in row.plan]
    return [
        ContrastRow(
            context=row.context,
            plan=row.plan,
            against=choice,
            loss=difference([f.loss for f in row.samples], [f.loss for f in other.samples]),
            divergence=difference([f.divergence for f in row.samples], [f.divergence for f in other.samples]),
        )
        for row in by_importance
        for choice in (Choice.RECENCY, Choice.RANDOM)
        for other in (rows[row.context, row.plan.replace(Choice.IMPORTANCE, choice)],)
    ]


def answer_contrasts(answers: Sequence[AnswerRow]) -> list[AnswerContrastRow]:
    """Of all plans that go by importance."""
    rows = {(row.context, row.task, row.asked, row.plan): row for row in answers}
    return [
        AnswerContrastRow(
            context=row.context,
            task=row.task,
            asked=row.asked,
            plan=row.plan,
            against=choice,
            logprob=difference([a.logprob for a in row.samples], [a.logprob for a in other.samples]),
            right=difference([a.is_right for a in row.samples], [a.is_right for a in other.samples]),
        )
        for row in answers
        if f"by {Choice.IMPORTANCE}" in row.plan
        for choice in (Choice.RECENCY, Choice.RANDOM)
        for name in (row.plan.replace(Choice.IMPORTANCE, choice),)
        for other in (rows[row.context, row.task, row.asked, name],)
    ]


def _answers(
    job: Job, reader: Reader, windows: Sequence[Sequence[int]], progress: Progress
) -> list[AnswerRow]:
    rows = []
    for context in job.contexts:
        number = job.haystacks if context == MAIN_CONTEXT else -(-job.haystacks // 3)
        plans = answer_plans_at(context, reader.store.layout)
        samples: dict[tuple[str, str, QualityPlan], list[Answered]] = {}
        for seed, window in enumerate(windows[:number]):
            progress(f"Facts in text {seed + 1} of {number}, context {context}.")
            for plan, asked, answered in _ask(reader, window[:context], plans, seed):
                samples.setdefault((answered.task, asked, plan), []).append(answered)
        for (task, asked, plan), own in samples.items():
            full = samples[task, asked, FULL_PRECISION]
            rows.append(_answer_row(context, task, asked, plan, own, full))
    return rows


def _ask(
    reader: Reader, filler: Sequence[int], plans: Sequence[QualityPlan], seed: int
) -> Iterator[tuple[QualityPlan, str, Answered]]:
    """All questions about one text under each plan, asked after the demotion and in the prompt."""
    haystack = make_haystack(reader.tokenizer, filler, TASKS, seed)
    with Branch(reader.store) as branch:
        prompt = read_prompt(reader, branch, haystack.token_ids)
        for plan in plans:
            for answered in asked_later(reader, prompt, plan, haystack.questions):
                yield plan, "later", answered
        for question in haystack.questions:
            if question.task == TASKS[0]:
                found = asked_in_prompt(reader, branch, plans[:8], question)
                for plan, answered in zip(plans, found, strict=False):
                    yield plan, "in the prompt", answered


def _answer_row(
    context: int,
    task: str,
    asked: str,
    plan: QualityPlan,
    samples: list[Answered],
    full: list[Answered],
) -> AnswerRow:
    return AnswerRow(
        context=context,
        task=task,
        asked=asked,
        plan=plan.name,
        num_answers=len(samples),
        logprob=difference([own.logprob for own in samples], [own.logprob for own in full]),
        right=difference([own.is_right for own in samples], [own.is_right for own in full]),
        share_right=sum(own.is_right for own in samples) / len(samples),
        full_share_right=sum(own.is_right for own in full) / len(full),
        samples=samples,
    )


def text_of(study: Study) -> str:
    """The study for people, as Markdown."""
    lines = [
        "| context | plan | tokens per byte | loss, nat | divergence, nat | equal argmax |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row.context} | {row.plan} | {row.tokens_per_byte:.2f} | {row.loss} | {row.divergence} |"
            f" {row.equal_argmax.mean:.2%} |"
            for row in study.losses
        ),
        "",
        "| context | plan | less the loss of | loss, nat | divergence, nat |",
        "|---|---|---|---|---|",
        *(
            f"| {row.context} | {row.plan} | {row.against} | {row.loss} | {row.divergence} |"
            for row in study.contrasts
        ),
        "",
        "| context | task | asked | plan | answers | log-probability, nat | right | of full precision |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {row.context} | {row.task} | {row.asked} | {row.plan} | {row.num_answers} | {row.logprob} |"
            f" {row.share_right:.0%} | {row.full_share_right:.0%} |"
            for row in study.answers
        ),
        "",
        "| context | task | asked | plan | more than | log-probability, nat | right |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {row.context} | {row.task} | {row.asked} | {row.plan} | {row.against} | {row.logprob} |"
            f" {row.right} |"
            for row in study.answer_contrasts
        ),
        "",
        f"{study.seconds:.0f} s.",
        "",
    ]
    return "\n".join(lines)


def _tell(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    app = App(name="study-cache", help_format="plaintext", version_flags=[], default_command=main)
    sys.exit(app(sys.argv[1:], result_action="return_value"))
