"""A quality report for people: Markdown, and a plot of quality against bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from .measure import QualityReport
from .statistics import Estimate

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 80, 260, 56, 64
COLOURS = ("#1b6ca8", "#d1603d", "#7a9e5b", "#8d6cab", "#222222", "#b08900")
LEAST = 1e-4
"""Divergences below it are drawn there: the scale has no 0."""


def report_text(report: QualityReport) -> str:
    """Markdown."""
    lines = [
        f"# Quality of cache plans: {report.model}",
        "",
        f"Against full precision on the same tokens, weights {report.weights}, ops {report.ops}:"
        f" {report.num_texts} texts read to {report.context} tokens, {report.num_tokens} tokens predicted"
        f" after them, text {report.text_digest}, seed {report.seed}, {report.seconds:.0f} s. In brackets"
        " intervals of 95 %.",
        "",
        "| plan | tokens per byte | loss, nat per token | divergence, nat | equal argmax | repetition |",
        "|---|---|---|---|---|---|",
        *(
            f"| {plan.name} | {plan.tokens_per_byte:.2f} x | {plan.loss} | {plan.divergence} |"
            f" {_percent(plan.equal_argmax)} | {_repetition(plan.repetition, plan.more_repetition)} |"
            for plan in report.plans
        ),
        "",
    ]
    if any(plan.tasks for plan in report.plans):
        lines += [
            "Answers at ten depths, asked for after the demotion; differences to full precision:",
            "",
            "| task | plan | answers | log-probability, nat | right | tokens right |",
            "|---|---|---|---|---|---|",
        ]
    by_task = sorted(
        ((task, plan.name) for plan in report.plans for task in plan.tasks), key=lambda pair: pair[0].task
    )
    lines += [
        f"| {task.task} | {name} | {task.num_answers} | {task.logprob} |"
        f" {task.share_right:.0%} (full precision {task.full_share_right:.0%}) |"
        f" {task.tokens_right:.0%} ({task.full_tokens_right:.0%}) |"
        for task, name in by_task
    ]
    return "\n".join(lines) + "\n"


def report_plot(report: QualityReport) -> str:
    """Divergence, on a logarithmic scale, over the bytes of a token, in percent of full precision's: SVG."""
    points = [(plan.name, 100 / plan.tokens_per_byte, plan.divergence) for plan in report.plans]
    return plot(f"{report.model}, context {report.context}: divergence over bytes", points)


def plot(title: str, points: Sequence[tuple[str, float, Estimate]]) -> str:
    """A point with its interval for each name; numbers tell those of one colour apart."""
    top = 10.0 ** math.ceil(math.log10(max(LEAST * 10, *(point.high for _, _, point in points))))
    decades = round(math.log10(top / LEAST))
    most = max(50.0, 10 * math.ceil(max(share for _, share, _ in points) / 10))
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x_of(share: float) -> float:
        return LEFT + (right - LEFT) * share / most

    def y_of(value: float) -> float:
        return bottom - (bottom - TOP) * math.log10(max(value, LEAST) / LEAST) / decades

    parts = [_text(20, 28, title, size=15, weight="bold")]
    for decade in range(decades + 1):
        y, value = y_of(LEAST * 10**decade), LEAST * 10**decade
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{value:g}", anchor="end"))
    parts += [
        _text(x_of(tens), bottom + 18, f"{tens} %", anchor="middle") for tens in range(0, round(most) + 1, 10)
    ]
    parts.append(
        _text((LEFT + right) / 2, bottom + 42, "bytes per token, of full precision's", anchor="middle")
    )
    parts.append(_text(LEFT, TOP - 10, "nat per token (low is good)"))
    for place, (name, share, value) in enumerate(points):
        colour, x = COLOURS[place % len(COLOURS)], x_of(share)
        parts += [
            f'<line x1="{x:.1f}" y1="{y_of(value.low):.1f}" x2="{x:.1f}" y2="{y_of(value.high):.1f}"'
            f' stroke="{colour}" stroke-width="2"/>',
            f'<circle cx="{x:.1f}" cy="{y_of(value.mean):.1f}" r="5" fill="{colour}"/>',
            f'<circle cx="{right + 20}" cy="{TOP + 18 * place}" r="5" fill="{colour}"/>',
            _text(x + (9 if place % 2 else -16), y_of(value.mean) + 4, f"{place + 1}"),
            _text(right + 32, TOP + 18 * place + 4, f"{place + 1}  {name}"),
        ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"'
        f' viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" fill="#222222">\n'
        '<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _percent(share: Estimate) -> str:
    return f"{share.mean:.1%} [{share.low:.1%}, {share.high:.1%}]"


def _repetition(share: float | None, more: Estimate | None) -> str:
    if share is None or more is None:
        return "-"
    return f"{share:.1%} ({more.mean:+.1%} [{more.low:+.1%}, {more.high:+.1%}])"


def _text(
    x: float, y: float, text: str, *, size: int = 11, weight: str = "normal", anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )
