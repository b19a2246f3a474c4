"""A result as text."""

from __future__ import annotations

from collections.abc import Sequence

from .metrics import Distribution, Summary
from .results import BenchResult

STATISTICS = ("mean", "p50", "p90", "p95", "p99", "min", "max")
MAX_SEND_LAG_S = 0.01
"""An open loop that sends later than this at p99 did not offer the load it was asked for."""


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells; the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        right = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *right]).rstrip())
    return "\n".join(lines) + "\n"


def report(result: BenchResult) -> str:
    """The result for people."""
    parts = [_head(result), _latencies(result.summary), _rates(result.summary), *_notes(result)]
    return "\n".join(parts)


def _head(result: BenchResult) -> str:
    summary = result.summary
    ended = ", interrupted" if result.interrupted else ""
    failures = "".join(f", {count} {kind}" for kind, count in sorted(summary.errors.items()))
    return (
        f"{result.target.model} at {result.server.url}\n"
        f"{summary.num_ok} good requests in {summary.duration_s:.2f} s"
        f" ({summary.mean_concurrency:.1f} at once on average);"
        f" {summary.num_failed} failed{failures}{ended}\n"
    )


def _latencies(summary: Summary) -> str:
    rows = [
        ["", *STATISTICS],
        _row("TTFT ms", summary.ttft_s, 1000),
        _row("TPOT ms", summary.tpot_s, 1000),
        _row("ITL ms", summary.itl_s, 1000),
        _row("end to end ms", summary.e2e_s, 1000),
        _row("prompt tokens", summary.prompt_tokens, 1),
        _row("output tokens", summary.output_tokens, 1),
    ]
    return table(rows)


def _row(name: str, values: Distribution | None, scale: float) -> list[str]:
    if values is None:
        return [name, *("-" for _ in STATISTICS)]
    return [name, *(f"{getattr(values, statistic) * scale:.2f}" for statistic in STATISTICS)]


def _rates(summary: Summary) -> str:
    rows = [
        ["requests/s", f"{summary.requests_per_s:.3f}"],
        ["output tokens/s", f"{summary.output_tokens_per_s:.1f}"],
        ["total tokens/s", f"{summary.total_tokens_per_s:.1f}"],
    ]
    if (goodput := summary.goodput) is not None:
        rows.append(["goodput requests/s", f"{goodput.requests_per_s:.3f}"])
        rows.append(["within the limits", f"{goodput.fraction_good:.1%}"])
    return table(rows)


def _notes(result: BenchResult) -> list[str]:
    """What one must know to read the figures right."""
    summary, notes = result.summary, []
    if summary.num_ok and not summary.all_counted_by_server:
        notes.append("The server gives no token counts: each chunk with text was counted as one token.")
    elif summary.tokens_per_chunk > 1.05:
        notes.append(
            f"Chunks carry {summary.tokens_per_chunk:.2f} tokens on average, so ITL is the time between"
            " chunks, not tokens; TPOT is per token."
        )
    if result.arguments.get("ignore_eos") and not result.target.knows_ignore_eos:
        notes.append("The server does not know ignore_eos: answers may be shorter than asked for.")
    if (lag := summary.send_lag_s) is not None and lag.p99 > MAX_SEND_LAG_S:
        notes.append(f"Requests were sent late (p99 {lag.p99 * 1000:.0f} ms): this client could not keep up.")
    notes.extend(_failures(result))
    notes.append(f"The client took {result.client.cpu_us_per_chunk:.0f} us of CPU time per chunk.")
    return [f"{note}\n" for note in notes]


def _failures(result: BenchResult) -> list[str]:
    """One example of each kind of error."""
    examples = {record.error: record.error_message for record in result.records if record.error is not None}
    return [f"{kind}: {message}" for kind, message in sorted(examples.items())]
