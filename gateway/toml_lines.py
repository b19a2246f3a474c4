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
    end = 0
    for number, line in enumerate(lines):
        if number >= end and name in line:
            begin, end = _statement(lines, number)
            if has_path(_parse(lines[:end]), path) and not has_path(_parse(lines[:begin]), path):
                return begin + 1
    return None


def _statement(lines: Sequence[str], number: int) -> tuple[int, int]:
    """Where the statement of a line begins and ends: the text before is whole, and so is that with it."""
    begin, end = number, number + 1
    while _parse(lines[:begin]) is None:
        begin -= 1
    while end < len(lines) and _parse(lines[:end]) is None:
        end += 1
    return begin, end


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
