"""Speculation against none, by kind of traffic and batch size, on the real model.

    make bench-speculation
    python -m surefoot.backends.engine.speculation.bench_kinds --help

Sixty prompts in six kinds, and long edits with a prediction. Two engines on the same weights answer every
group of requests, one with drafts and one without, a step of each in turn; both must give the same tokens.
A batch is kept full while there are requests left, and only steps in which the whole of it decodes are
timed. One group that is not measured goes before: shapes of steps are met, and acceptance is learnt. The
exit status is 0 if every bar is kept, 1 if one is missed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter
from msgspec import Struct

from surefoot.backends.types import SamplingParams

from ..backend import EngineParts
from ..bench_engine import MIB, load_bench_parts, make_bench_engine, say
from ..engine import Engine
from ..settings import EngineSettings
from .bench_group import answer_group, run_in_turns
from .bench_prompts import LONG_EDIT, BenchPrompt, long_edits, plan_of, prompts

NEVER_SLOWER, NEVER_SLOWER_LOW = 0.98, 0.95
BATCH_ONE_BARS = {"code editing": 1.5, "JSON extraction": 1.5, LONG_EDIT: 2.5}
BATCHES = (1, 4, 16, 32)
GROUPS = {1: (20, 1), 4: (6, 12), 16: (5, 32), 32: (5, 64)}
"""By batch size: groups, and how many requests each has. Prompts are taken in turn."""
TIMES_AS_LONG = {"code editing": 2, "JSON extraction": 2, LONG_EDIT: 6}
"""Answers that repeat what is given are longer."""
NUM_RESAMPLES = 2000


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Job:
    """What to measure, and how long."""

    model: Annotated[str, Parameter(help="What to serve")] = "smollm2"
    cache_dir: Annotated[Path, Parameter(help="Folder of prepared weights")] = Path("~/.cache/surefoot")
    threads: Annotated[int | None, Parameter(help="CPU threads [as many as there are]")] = None
    output_tokens: Annotated[int, Parameter(help="Longest answers, of kinds that are not repetitions")] = 48
    more_groups: Annotated[int, Parameter(help="Groups more than the usual five to twenty")] = 0
    kinds: Annotated[tuple[str, ...], Parameter(help="Only these")] = ()
    batches: Annotated[tuple[int, ...], Parameter(help="Only these")] = BATCHES
    output: Annotated[Path | None, Parameter(help="Store everything in this file, as JSON")] = None


class Pair(Struct, frozen=True, kw_only=True):
    """One group of requests, answered in both ways."""

    num_tokens: int
    none_s: float
    drafts_s: float
    """Seconds of as many tokens."""
    num_drafted: int
    num_accepted: int


class Row(Struct, frozen=True, kw_only=True):
    """A kind at a batch size: tokens per second without drafts, and how many times as many with them, with an
    interval of 95 %. With one request at a time the ratio is that of the TPOTs.
    """

    kind: str
    batch: int
    none_tokens_per_s: float
    ratio: float
    low: float
    high: float
    accepted_share: float | None
    """Of draft tokens; None without any."""
    pairs: list[Pair]

    @property
    def bar(self) -> float:
        """The least `ratio`."""
        return BATCH_ONE_BARS.get(self.kind, NEVER_SLOWER) if self.batch == 1 else NEVER_SLOWER

    @property
    def is_kept(self) -> bool:
        """Whether the ratio is at its bar, and the interval not below what noise may do."""
        return self.ratio >= self.bar and self.low >= NEVER_SLOWER_LOW


DEFAULT_JOB = Job()


def main(*, job: Job = DEFAULT_JOB) -> int:
    """Measure speculation against none in six kinds of traffic at four batch sizes."""
    parts = load_bench_parts(job.model, job.cache_dir, job.threads)
    rows = measure(job, parts)
    sys.stdout.write(text_of(rows))
    if job.output is not None:
        job.output.write_bytes(msgspec.json.encode(rows) + b"\n")
    return 0 if all(row.is_kept for row in rows) else 1


def measure(job: Job, parts: EngineParts) -> list[Row]:
    """All kinds at all batch sizes; long edits one at a time."""
    settings = EngineSettings(cache_bytes=512 * MIB, max_sequences=max(job.batches), headroom=0.0)
    arms = Arms(parts, make_bench_engine(parts, settings), make_bench_engine(parts, settings))
    rows = []
    for kind, asked in {**prompts(), LONG_EDIT: long_edits()}.items():
        if job.kinds and kind not in job.kinds:
            continue
        # Their blocks are then found in the prefix cache, so that both ways begin alike and soon.
        arms.run([(prompt, prompt.params(2, 0)) for prompt in asked], kind, at_once=1)
        for batch in job.batches if kind != LONG_EDIT else (1,):
            row = _measure_kind(job, arms, kind, asked, batch)
            say(_line(row))
            rows.append(row)
    return rows


def _measure_kind(job: Job, arms: Arms, kind: str, asked: Sequence[BenchPrompt], batch: int) -> Row:
    max_tokens = job.output_tokens * TIMES_AS_LONG.get(kind, 1)
    num_groups, size = GROUPS.get(batch, (5, 2 * batch))
    requests = ((prompt, prompt.params(max_tokens, seed)) for seed, prompt in enumerate(cycle(asked)))
    pairs = [
        arms.run(list(islice(requests, size)), kind, at_once=batch)
        for _ in range(1 + num_groups + job.more_groups)
    ]
    return _row(kind, batch, pairs[1:])


class Arms(Struct, frozen=True):
    """An engine that drafts and one that does not, on the same weights."""

    parts: EngineParts
    none: Engine
    drafts: Engine

    def run(self, group: Sequence[tuple[BenchPrompt, SamplingParams]], kind: str, *, at_once: int) -> Pair:
        """Answer a group on both, a step of each in turn. Raises `SystemExit` if the answers differ."""
        none, drafts = run_in_turns(
            answer_group(self.none, self.parts, group, kind, None, at_once),
            answer_group(self.drafts, self.parts, group, kind, plan_of(kind), at_once),
        )
        if drafts.token_ids != none.token_ids:
            raise SystemExit(f"{kind}: drafts changed an answer, which must never be")
        return Pair(
            num_tokens=none.num_tokens,
            none_s=none.seconds,
            drafts_s=drafts.token_s * none.num_tokens,
            num_drafted=drafts.num_drafted,
            num_accepted=drafts.num_accepted,
        )


def _row(kind: str, batch: int, pairs: list[Pair]) -> Row:
    low, high = bootstrap(pairs)
    num_drafted = sum(pair.num_drafted for pair in pairs)
    return Row(
        kind=kind,
        batch=batch,
        none_tokens_per_s=sum(pair.num_tokens for pair in pairs) / sum(pair.none_s for pair in pairs),
        ratio=ratio_of(pairs),
        low=low,
        high=high,
        accepted_share=sum(pair.num_accepted for pair in pairs) / num_drafted if num_drafted else None,
        pairs=pairs,
    )


def ratio_of(pairs: Sequence[Pair]) -> float:
    """Tokens per second with drafts over those without, of all groups together."""
    return sum(pair.none_s for pair in pairs) / sum(pair.drafts_s for pair in pairs)


def bootstrap(pairs: Sequence[Pair]) -> tuple[float, float]:
    """The middle 95 % of the ratio over groups drawn again with replacement, always the same draws."""
    source = random.Random(0)
    ratios = sorted(ratio_of(source.choices(pairs, k=len(pairs))) for _ in range(NUM_RESAMPLES))
    return ratios[round(0.025 * NUM_RESAMPLES)], ratios[round(0.975 * NUM_RESAMPLES) - 1]


def text_of(rows: Sequence[Row]) -> str:
    """The result for people."""
    head = f"{'kind':<22}{'batch':>6}{'none tok/s':>12}{'ratio':>8}{'95 %':>15}{'accepted':>10}{'bar':>7}"
    kept = "every bar is kept" if all(row.is_kept for row in rows) else "A BAR IS MISSED"
    return "\n".join([head, *(_line(row) for row in rows), kept, ""])


def _line(row: Row) -> str:
    accepted = "-" if row.accepted_share is None else f"{row.accepted_share:.0%}"
    return (
        f"{row.kind:<22}{row.batch:>6}{row.none_tokens_per_s:>12.1f}{row.ratio:>8.3f}"
        f"{row.low:>8.3f}-{row.high:<6.3f}{accepted:>10}{row.bar:>7.2f}{'' if row.is_kept else '  missed'}"
    )


if __name__ == "__main__":
    app = App(name="bench-speculation", help_format="plaintext", version_flags=[], default_command=main)
    sys.exit(app(sys.argv[1:], result_action="return_value"))
