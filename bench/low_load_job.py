"""The bar of low load: whoever finds the server at rest waits for nothing but the model.

    make bench-low-load
    python -m surefoot.bench.low_load_job --help

Starts `surefoot serve` twice, as it is and first come, first served, and sends both the same arrivals.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median

from cyclopts import App
from msgspec import Struct

from .bars import EXIT_FAILED, VERDICTS, run_job
from .command_line import run_app
from .low_load_rounds import ALONE, EMPTY, LOAD, TIERS, LowLoadJob, LowLoadResult, Timed, measure
from .metrics import percentile
from .report import table

RATIO_BAR = 1.05
"""Median TTFT at low load over that of an empty server."""

DEFAULT_JOB = LowLoadJob()


class Row(Struct, frozen=True, kw_only=True):
    """A class's line: median times to first token in seconds, and what held at low load."""

    tier: str
    empty_s: float
    alone_s: float
    load_s: float
    load_p95_s: float
    share_beside: float

    @property
    def kept(self) -> bool:
        """Whether the bar is kept."""
        return self.load_s / self.empty_s <= RATIO_BAR

    def cells(self) -> list[str]:
        """As text."""
        times = (self.empty_s, self.alone_s, self.load_s, self.load_p95_s)
        ratios = (self.alone_s / self.empty_s, self.load_s / self.empty_s)
        return [
            self.tier,
            *(f"{1000 * each:.1f}" for each in times),
            f"{self.share_beside:.0%}",
            *(f"{each:.3f}" for each in ratios),
            f"<= {RATIO_BAR:g}",
            VERDICTS[self.kept],
        ]


HEADS = ("TTFT, ms", "empty", "alone", "low load", "p95", "beside", "alone/empty", "load/empty", "bar", "")


def main(*, job: LowLoadJob = DEFAULT_JOB) -> int:
    """Measure what waiting the scheduler adds at low load, in each class.

    The exit status is 0 if every bar is kept, 1 if one is missed, 2 if the measurement failed.
    """
    return run_job("bench-low-load", lambda tell: measure(job, tell), rows_of, text_of, job.output)


def rows_of(result: LowLoadResult) -> list[Row]:
    """A line for each class."""
    return [_row(result, tier) for tier in TIERS]


def text_of(result: LowLoadResult, rows: list[Row]) -> str:
    """The result for people; times are medians but where they say p95."""
    machine = f"{result.machine.cpu}, {result.machine.num_cpus} CPUs, {result.threads} threads"
    what = (
        f"{len(result.arms[LOAD])} requests an arm, {result.prompt_tokens} tokens in and"
        f" {result.output_tokens} out, {result.rate:.2f} a second: {result.load:.0%} of the server's time"
    )
    arms = (
        f"empty: {EMPTY}; alone: {ALONE}; beside: came while another one was there. Both without company\n"
        "send the arrivals of the third, each when the one before has ended.\n"
    )
    return f"{result.model} on {machine}\n{what}\n\n{table([HEADS, *(row.cells() for row in rows)])}\n{arms}"


def _row(result: LowLoadResult, tier: str) -> Row:
    empty, alone, load = (_of_tier(result.arms[arm], tier) for arm in (EMPTY, ALONE, LOAD))
    p95_s = percentile(sorted(each.ttft_s for each in load), 95)
    return Row(
        tier=tier,
        empty_s=_median_s(empty),
        alone_s=_median_s(alone),
        load_s=_median_s(load),
        load_p95_s=p95_s,
        share_beside=sum(each.is_beside for each in load) / len(load),
    )


def _of_tier(answers: Sequence[Timed], tier: str) -> list[Timed]:
    return [each for each in answers if each.tier == tier]


def _median_s(answers: Sequence[Timed]) -> float:
    return median(each.ttft_s for each in answers)


def run(arguments: list[str]) -> int:
    """Run one command line; returns the process's exit status."""
    app = App(name="bench-low-load", help_format="plaintext", version_flags=[], default_command=main)
    return run_app(app, arguments, bad_usage=EXIT_FAILED)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
