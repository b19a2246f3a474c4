"""The plot of `bench_lengths`: tokens per second over acceptance, a panel for each batch size, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from msgspec import Struct

COLOURS = ("#222222", "#7a9e5b", "#d1603d", "#8d6cab", "#1b6ca8")
BACKGROUND = "#ffffff"
TEXT = "#222222"
GRID = "#dddddd"
MARGIN = 20
PANEL_WIDTH = 230
PANEL_HEIGHT = 200
PANEL_GAP = 46
TITLE_HEIGHT = 78
FOOT_HEIGHT = 56


class Panel(Struct, frozen=True, kw_only=True):
    """Lines by name, each as values at even steps of x from 0 to 1."""

    title: str
    lines: Mapping[str, Sequence[float]]


def plot(title: str, panels: Sequence[Panel], x_label: str) -> str:
    """An SVG document. A line has the same colour in every panel; each panel has its own scale from 0 on."""
    width = 2 * MARGIN + len(panels) * (PANEL_WIDTH + PANEL_GAP)
    height = TITLE_HEIGHT + PANEL_HEIGHT + FOOT_HEIGHT
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
    parts = [_text(MARGIN, MARGIN + 10, title, size=15, weight="bold")]
    left = MARGIN
    for name in names:
        parts.append(
            f'<line x1="{left}" y1="46" x2="{left + 18}" y2="46" stroke="{colours[name]}" stroke-width="3"/>'
        )
        parts.append(_text(left + 24, 50, name, size=12))
        left += 44 + 7 * len(name)
    for place, panel in enumerate(panels):
        parts += _panel(panel, colours, MARGIN + PANEL_GAP + place * (PANEL_WIDTH + PANEL_GAP), x_label)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" font-family="sans-serif" fill="{TEXT}">\n'
        f'<rect width="100%" height="100%" fill="{BACKGROUND}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _panel(panel: Panel, colours: Mapping[str, str], left: int, x_label: str) -> list[str]:
    top, bottom = TITLE_HEIGHT, TITLE_HEIGHT + PANEL_HEIGHT
    most = max(max(values) for values in panel.lines.values())
    parts = [_text(left, top - 6, panel.title, size=12, weight="bold")]
    for quarter in range(5):
        y = bottom - quarter * PANEL_HEIGHT // 4
        parts.append(f'<line x1="{left}" y1="{y}" x2="{left + PANEL_WIDTH}" y2="{y}" stroke="{GRID}"/>')
        parts.append(_text(left - 6, y + 4, f"{quarter * most / 4:,.0f}", size=11, anchor="end"))
    for tenths in (0, 5, 10):
        x = left + tenths * PANEL_WIDTH // 10
        parts.append(_text(x, bottom + 16, f"{tenths / 10:g}", size=11, anchor="middle"))
    parts.append(_text(left + PANEL_WIDTH // 2, bottom + 36, x_label, size=11, anchor="middle"))
    for name, values in panel.lines.items():
        points = " ".join(
            f"{left + PANEL_WIDTH * place / (len(values) - 1):.1f},{bottom - PANEL_HEIGHT * value / most:.1f}"
            for place, value in enumerate(values)
        )
        # The last line lies over the others, and must not hide them.
        dashes = ' stroke-dasharray="6 4"' if name == list(panel.lines)[-1] else ""
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colours[name]}" stroke-width="2"{dashes}/>'
        )
    return parts


def _text(x: int, y: int, text: str, *, size: int, weight: str = "normal", anchor: str = "start") -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )
