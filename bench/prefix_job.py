"""The prefix cache's bars: what a hit saves, and that one tenant cannot time what another one asked.

    make bench-prefix
    python -m surefoot.bench.prefix_job --help

Starts `surefoot serve` with two tenants and asks it one request at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median

from cyclopts import App
from msgspec import Struct

from .bars import EXIT_FAILED, VERDICTS, run_job
from .command_line import run_app
from .prefix_rounds import Answered, PrefixJob, PrefixResult, measure
from .report import table
from .two_samples import compare_samples

SPEEDUP_BAR = 5.0
P_BAR = 0.01
"""Each of the two tests calls equal distributions different this often."""

DEFAULT_JOB = PrefixJob()


class Row(Struct, frozen=True, kw_only=True):
    """A line of the table: a figure, and the bar that it is held against, if any."""

    title: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def kept(self) -> bool | None:
        """Whether the bar is kept; None without one."""
        if self.at_least is not None:
            return self.value >= self.at_least
        return None if self.at_most is None else self.value <= self.at_most

    def cells(self) -> list[str]:
        """As text."""
        bar = "" if self.at_least is None else f">= {self.at_least:g}"
        bar = bar if self.at_most is None else f"<= {self.at_most:g}"
        return [self.title, f"{self.value:.3f}", bar, VERDICTS[self.kept]]


def main(*, job: PrefixJob = DEFAULT_JOB) -> int:
    """Measure the prefix cache's bars: a hit's time to first token, and whether tenants can be timed.

    The exit status is 0 if every bar is kept, 1 if one is missed, 2 if the measurement failed.
    """
    return run_job("bench-prefix", lambda tell: measure(job, tell), rows_of, text_of, job.output)


def rows_of(result: PrefixResult) -> list[Row]:
    """The table's lines. The speed-up is taken prompt by prompt."""
    ratios = [cold.ttft_s / hit.ttft_s for cold, hit in zip(result.cold, result.hits, strict=True)]
    others, never_seen = _seconds(result.others), _seconds(result.never_seen)
    tests = compare_samples(others, never_seen)
    leaked = sum(each.num_cached_tokens for each in (*result.others, *result.never_seen))
    return [
        Row(title="new prompt, ms", value=1000 * median(_seconds(result.cold))),
        Row(title="the same again, ms", value=1000 * median(_seconds(result.hits))),
        Row(title="tokens of it in the cache", value=median(each.num_cached_tokens for each in result.hits)),
        Row(title="new / again", value=median(ratios), at_least=SPEEDUP_BAR),
        Row(title="another tenant's prompt, ms", value=1000 * median(others)),
        Row(title="never-seen prompt, ms", value=1000 * median(never_seen)),
        Row(title="share of pairs with the other's faster", value=tests.share_below),
        Row(title="Mann-Whitney p", value=tests.mann_whitney_p, at_least=P_BAR),
        Row(title="Kolmogorov-Smirnov p", value=tests.kolmogorov_smirnov_p, at_least=P_BAR),
        Row(title="tokens found across tenants", value=leaked, at_most=0),
    ]


def text_of(result: PrefixResult, rows: list[Row]) -> str:
    """The result for people; times are medians."""
    machine = f"{result.machine.cpu}, {result.machine.num_cpus} CPUs, {result.threads} threads"
    what = (
        f"{len(result.cold)} prompts of {result.prompt_tokens} tokens asked twice; {len(result.others)} and"
        f" {len(result.never_seen)} of {result.probe_tokens} tokens to tell tenants apart"
    )
    lines = [["TTFT", "median", "bar", ""], *(row.cells() for row in rows)]
    return f"{result.model} on {machine}\n{what}\n\n{table(lines)}"


def _seconds(answers: Sequence[Answered]) -> list[float]:
    return [each.ttft_s for each in answers]


def run(arguments: list[str]) -> int:
    """Run one command line; returns the process's exit status."""
    app = App(name="bench-prefix", help_format="plaintext", version_flags=[], default_command=main)
    return run_app(app, arguments, bad_usage=EXIT_FAILED)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
