"""On which line of a TOML text a value stands, which `tomllib` does not tell.

The text is cut before each line that could be the one, and the parser says whether the value is there
already: no second reading of TOML's grammar, and no time spent on files without a fault.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

Path = tuple[str | int, ...]


def line_of(text: str, path: Path) -> int | None:
    """The line, from 1, on which the value at `path` (keys and places in lists) begins, or None.

    Of what stands within a value of several lines, the line on which that value begins. `text` is valid TOML.
    """
    lines = text.splitlines(keepends=True)
    name = next((part for part in reversed(path) if isinstance(part, str)), "")
    for start, line in enumerate(lines):
        if name in line and not has_path(_parse(lines[:start]), path) and _begins(lines, start, path):
            return start + 1
    return None


def _begins(lines: Sequence[str], start: int, path: Path) -> bool:
    """Whether a statement begins on a line (all before it is whole) and brings the value."""
    if _parse(lines[:start]) is None:
        return False
    whole = (
        parsed for end in range(start + 1, len(lines) + 1) if (parsed := _parse(lines[:end])) is not None
    )
    return has_path(next(whole, None), path)


def _parse(lines: Sequence[str]) -> dict[str, Any] | None:
    try:
        return tomllib.loads("".join(lines))
    except tomllib.TOMLDecodeError:
        return None


def has_path(values: Any, path: Path) -> bool:
    """Whether there is a value at `path`."""
    for part in path:
        if isinstance(part, int):
            found = isinstance(values, list) and part < len(values)
        else:
            found = isinstance(values, dict) and part in values
        if not found:
            return False
        values = values[part]
    return True
