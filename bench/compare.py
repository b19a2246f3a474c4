"""Two results side by side."""

from __future__ import annotations

from .report import table
from .results import BenchResult

LATENCIES = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s"), ("end to end", "e2e_s"))
COMPARED_STATISTICS = ("mean", "p50", "p99")
RATES = (
    ("output tokens/s", "output_tokens_per_s"),
    ("total tokens/s", "total_tokens_per_s"),
    ("requests/s", "requests_per_s"),
)


def compare(a: BenchResult, b: BenchResult) -> str:
    """A table of A, B and B / A, and the arguments in which the two runs differ."""
    rows = [["", "A", "B", "B / A"]]
    for title, name in RATES:
        rows.append(_row(title, getattr(a.summary, name), getattr(b.summary, name)))
    for title, name in LATENCIES:
        of_a, of_b = getattr(a.summary, name), getattr(b.summary, name)
        for statistic in COMPARED_STATISTICS:
            values = [None if of is None else getattr(of, statistic) * 1000 for of in (of_a, of_b)]
            rows.append(_row(f"{title} {statistic} ms", *values))
    if a.summary.goodput and b.summary.goodput:
        rows.append(_row("goodput", a.summary.goodput.requests_per_s, b.summary.goodput.requests_per_s))
    rows.append(["good requests", str(a.summary.num_ok), str(b.summary.num_ok), ""])
    rows.append(["failed requests", str(a.summary.num_failed), str(b.summary.num_failed), ""])
    return f"A: {_title(a)}\nB: {_title(b)}\n\n{table(rows)}{_differences(a, b)}"


def _title(result: BenchResult) -> str:
    return f"{result.target.model} at {result.server.url}, {result.date}"


def _row(title: str, a: float | None, b: float | None) -> list[str]:
    ratio = f"{b / a:.3f}" if a and b is not None else "-"
    return [title, *("-" if value is None else f"{value:.2f}" for value in (a, b)), ratio]


def _differences(a: BenchResult, b: BenchResult) -> str:
    names = sorted(a.arguments.keys() | b.arguments.keys())
    pairs = [(name, a.arguments.get(name), b.arguments.get(name)) for name in names]
    lines = [f"  {name}: {of_a} / {of_b}\n" for name, of_a, of_b in pairs if of_a != of_b]
    if a.machine != b.machine:
        of_a, of_b = (f"{machine.cpu}, {machine.system}" for machine in (a.machine, b.machine))
        lines.append(f"  machine: {of_a} / {of_b}\n")
    return "\nThe runs differ in:\n" + "".join(lines) if lines else ""
