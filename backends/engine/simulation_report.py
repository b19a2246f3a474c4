"""What a simulation shows, class by class, for people and for programs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from .simulator import Outcome, SimulationResult


class ClassReport(Struct, frozen=True, kw_only=True):
    """One class. Times in seconds, None where there is none; `goodput` is the share of all its requests that
    were served within both targets, refused ones included among all."""

    sla_class: str
    num_requests: int
    num_served: int
    refusals: dict[str, int]
    goodput: float
    queue_p50_s: float | None
    queue_p99_s: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    output_tokens_per_s: float
    num_preemptions: int


class SimulationReport(Struct, frozen=True, kw_only=True):
    """All classes, and the machine's use. `mean_step_tokens` counts prefill, decodes and recomputation."""

    scheduler: str
    speed: float
    duration_s: float
    num_steps: int
    mean_step_tokens: float
    busy: float
    """Share of the time in steps."""
    mean_resident: float
    """Sequences in the cache, the mean over steps' time; and the most at once."""
    max_resident: int
    output_tokens_per_s: float
    classes: list[ClassReport]


def report_of(result: SimulationResult, scheduler: str, speed: float) -> SimulationReport:
    """Sum a run up."""
    by_class: dict[str, list[Outcome]] = {}
    for outcome in result.outcomes:
        by_class.setdefault(outcome.request.sla_class, []).append(outcome)
    ordered = sorted(by_class.items(), key=lambda each: (-each[1][0].promise.priority, each[0]))
    classes = [_class_report(name, outcomes, result.end_s) for name, outcomes in ordered]
    return SimulationReport(
        scheduler=scheduler,
        speed=speed,
        duration_s=result.end_s,
        num_steps=result.num_steps,
        mean_step_tokens=result.num_rows / max(result.num_steps, 1),
        busy=result.busy_s / result.end_s if result.end_s else 0.0,
        mean_resident=result.mean_resident,
        max_resident=result.max_resident,
        output_tokens_per_s=sum(each.output_tokens_per_s for each in classes),
        classes=classes,
    )


def report_text(report: SimulationReport) -> str:
    """The report as a table."""
    heads = ("class", "requests", "refused", "goodput", "queue p50", "p99", "TTFT p50", "p99", "TPOT p50")
    rows: list[tuple[str, ...]] = [(*heads, "p99", "tokens/s", "preempted")]
    for each in report.classes:
        times = (each.queue_p50_s, each.queue_p99_s, each.ttft_p50_s, each.ttft_p99_s)
        rows.append(
            (
                each.sla_class,
                str(each.num_requests),
                str(sum(each.refusals.values())),
                f"{100 * each.goodput:.1f} %",
                *(_milliseconds(value) for value in (*times, each.tpot_p50_s, each.tpot_p99_s)),
                f"{each.output_tokens_per_s:.1f}",
                str(each.num_preemptions),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    ]
    head = (
        f"{report.scheduler}, speed {report.speed:g}: {report.duration_s:.1f} s in {report.num_steps} steps"
        f" of {report.mean_step_tokens:.1f} tokens, busy {100 * report.busy:.0f} %\n"
        f"{report.output_tokens_per_s:.1f} tokens/s from {report.mean_resident:.1f} sequences in the cache,"
        f" {report.max_resident} at most; times in ms\n\n"
    )
    return head + "\n".join(lines) + "\n"


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that `percent` % of the values do not exceed; None without values."""
    ordered = sorted(values)
    return ordered[max(math.ceil(percent / 100 * len(ordered)) - 1, 0)] if ordered else None


def _class_report(name: str, outcomes: Sequence[Outcome], end_s: float) -> ClassReport:
    timings = [outcome.timings for outcome in outcomes if outcome.timings is not None]
    queue_s = [each.queue_s for each in timings]
    ttft_s = [each.ttft_s for each in timings if each.ttft_s is not None]
    tpot_s = [each.tpot_s for each in timings if each.tpot_s is not None]
    num_tokens = sum(outcome.request.output_tokens for outcome in outcomes if outcome.timings is not None)
    return ClassReport(
        sla_class=name,
        num_requests=len(outcomes),
        num_served=len(timings),
        refusals=dict(Counter(outcome.refusal for outcome in outcomes if outcome.refusal is not None)),
        goodput=sum(outcome.is_good for outcome in outcomes) / len(outcomes),
        queue_p50_s=percentile(queue_s, 50),
        queue_p99_s=percentile(queue_s, 99),
        ttft_p50_s=percentile(ttft_s, 50),
        ttft_p99_s=percentile(ttft_s, 99),
        tpot_p50_s=percentile(tpot_s, 50),
        tpot_p99_s=percentile(tpot_s, 99),
        output_tokens_per_s=num_tokens / end_s if end_s else 0.0,
        num_preemptions=sum(outcome.num_preemptions for outcome in outcomes),
    )


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"
