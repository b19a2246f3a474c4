"""The plot of `peers`: a panel for each load, a bar for each server, as SVG."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from msgspec import Struct

COLOURS = ("#1b6ca8", "#d1603d", "#7a9e5b", "#8d6cab")
BACKGROUND = "#ffffff"
TEXT = "#222222"
WIDTH = 760
MARGIN = 20
LABEL_WIDTH = 110
VALUE_WIDTH = 150
BAR_HEIGHT = 18
BAR_GAP = 6
TITLE_HEIGHT = 30
PANEL_GAP = 14


class Panel(Struct, frozen=True, kw_only=True):
    """Values by server, best read against each other, and a note (a ratio, a bar) at the title's right."""

    title: str
    values: Mapping[str, float]
    note: str = ""

    @property
    def height(self) -> int:
        """In pixels, title included."""
        return TITLE_HEIGHT + len(self.values) * (BAR_HEIGHT + BAR_GAP)


def plot(title: str, panels: list[Panel], footer: str) -> str:
    """An SVG document. A server has the same colour in every panel; each panel has its own scale."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.values))
    colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
    parts = [_text(MARGIN, MARGIN + 14, title, size=16, weight="bold")]
    top = MARGIN + 34
    for panel in panels:
        parts += _panel(panel, colours, top)
        top += panel.height + PANEL_GAP
    parts.append(_text(MARGIN, top + 8, footer, size=11))
    height = top + 8 + MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"'
        f' viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" fill="{TEXT}">\n'
        f'<rect width="100%" height="100%" fill="{BACKGROUND}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _panel(panel: Panel, colours: Mapping[str, str], top: int) -> list[str]:
    parts = [
        _text(MARGIN, top + 14, panel.title, size=13, weight="bold"),
        _text(WIDTH - MARGIN, top + 14, panel.note, size=12, anchor="end"),
    ]
    room = WIDTH - 2 * MARGIN - LABEL_WIDTH - VALUE_WIDTH
    most = max(panel.values.values(), default=0.0)
    left = MARGIN + LABEL_WIDTH
    for place, (name, value) in enumerate(panel.values.items()):
        y = top + TITLE_HEIGHT - 6 + place * (BAR_HEIGHT + BAR_GAP)
        width = room * value / most if most else 0.0
        parts += [
            _text(left - 8, y + 14, name, size=12, anchor="end"),
            f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT}" fill="{colours[name]}"/>',
            _text(round(left + width) + 6, y + 14, f"{value:,.{int(value < 100)}f} tok/s", size=12),
        ]
    return parts


def _text(x: int, y: int, text: str, *, size: int, weight: str = "normal", anchor: str = "start") -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )
