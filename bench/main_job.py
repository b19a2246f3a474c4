"""The main job's bars, measured side by side in one run.

    make bench-main
    python -m surefoot.bench.main_job --help

Starts `surefoot serve` and transformers' `generate` on the same model file, one after the other in
interleaved rounds, and holds the medians against the bars.
"""

from __future__ import annotations

import sys
from statistics import median

from cyclopts import App
from msgspec import Struct

from .bars import EXIT_FAILED, VERDICTS, run_job
from .command_line import run_app
from .main_rounds import NUM_STREAMS, NUM_WAITING, Job, JobResult, measure
from .report import table

ONE_STREAM_BAR = 1.5
STREAMS_BAR = 4.0
LAG_BAR_MS = 10.0
KEEP_ALIVE_BAR_MS = 100.0
"""What "on time" means for a comment line that is due every second."""
READY_BAR_S = 10.0

DEFAULT_JOB = Job()


class Row(Struct, frozen=True, kw_only=True):
    """A line of the table: a value per round, and a bar for their median."""

    title: str
    values: list[float]
    bar: float | None = None
    at_most: bool = False

    @property
    def kept(self) -> bool | None:
        """Whether the median keeps the bar; None without one."""
        if self.bar is None:
            return None
        return median(self.values) <= self.bar if self.at_most else median(self.values) >= self.bar

    def cells(self) -> list[str]:
        """As text."""
        sign = "<=" if self.at_most else ">="
        bar = "" if self.bar is None else f"{sign} {self.bar:g}"
        values = [f"{value:.2f}" for value in (*self.values, median(self.values))]
        return [self.title, *values, bar, VERDICTS[self.kept]]


def main(*, job: Job = DEFAULT_JOB) -> int:
    """Measure the main job's bars: one stream, eight streams, event loop lag, keep-alives, time to ready.

    The exit status is 0 if every bar is kept, 1 if one is missed, 2 if the measurement failed.
    """
    return run_job("bench-main", lambda tell: measure(job, tell), rows_of, text_of, job.output)


def rows_of(result: JobResult) -> list[Row]:
    """The table's lines. Ratios are round by round, against the faster of transformers' dtypes."""
    one = [each.one_stream_tokens_per_s for each in result.ours]
    streams = [each.streams_tokens_per_s for each in result.ours]
    rows = [
        Row(title="one stream, tok/s", values=one),
        Row(title=f"{NUM_STREAMS} streams, tok/s", values=streams),
        *(
            Row(title=f"transformers {dtype}, tok/s", values=values)
            for dtype, values in result.transformers.items()
        ),
    ]
    if result.transformers:
        best = [max(values) for values in zip(*result.transformers.values(), strict=True)]
        for title, ours, bar in (
            ("one stream / transformers", one, ONE_STREAM_BAR),
            (f"{NUM_STREAMS} streams / transformers", streams, STREAMS_BAR),
        ):
            ratios = [mine / theirs for mine, theirs in zip(ours, best, strict=True)]
            rows.append(Row(title=title, values=ratios, bar=bar))
    cpu = [each.loop_cpu_per_token_s * 1e6 for each in result.ours if each.loop_cpu_per_token_s is not None]
    if len(cpu) == len(result.ours):
        rows.append(Row(title=f"event loop's CPU with {NUM_STREAMS} streams, us a token", values=cpu))
    return [*rows, *_rows_of_time(result)]


def _rows_of_time(result: JobResult) -> list[Row]:
    def at_most(title: str, values: list[float], bar: float) -> Row:
        return Row(title=title, values=values, bar=bar, at_most=True)

    own_lag = [each.own_lag_p99_s * 1000 for each in result.ours if each.own_lag_p99_s is not None]
    rows = [
        at_most(
            f"ping p99 with {NUM_STREAMS} streams, ms",
            [each.ping_p99_s * 1000 for each in result.ours],
            LAG_BAR_MS,
        ),
        at_most(
            f"keep-alives of {NUM_WAITING} late p99, ms",
            [each.keep_alive_late_p99_s * 1000 for each in result.ours],
            KEEP_ALIVE_BAR_MS,
        ),
        at_most("ready at a later start, s", [each.ready_s for each in result.ours], READY_BAR_S),
    ]
    if len(own_lag) == len(result.ours):
        rows.insert(1, at_most("event loop lag p99, its own, ms", own_lag, LAG_BAR_MS))
    return rows


def text_of(result: JobResult, rows: list[Row]) -> str:
    """The result for people."""
    rounds = [f"round {number + 1}" for number in range(len(result.ours))]
    lines = [["", *rounds, "median", "bar", ""], *(row.cells() for row in rows)]
    machine = f"{result.machine.cpu}, {result.machine.num_cpus} CPUs, {result.threads} threads each"
    first = f"first start ready in {result.first_ready_s:.1f} s"
    return f"{result.model} on {machine}; {first}\n\n{table(lines)}"


def run(arguments: list[str]) -> int:
    """Run one command line; returns the process's exit status."""
    app = App(name="bench-main", help_format="plaintext", version_flags=[], default_command=main)
    return run_app(app, arguments, bad_usage=EXIT_FAILED)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
