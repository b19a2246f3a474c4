"""How a setting's text is read, and the words that say what was expected.

A reader takes what a flag, the environment, a TOML file or code gives (text or the value itself) and returns
the value; `ValueError` says what was expected. Reading a value that was read before returns it unchanged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

Reader = Callable[[object], Any]

UNIT_BYTES = {
    "": 1,
    "B": 1,
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)},
}


class Setting(Struct, frozen=True):
    """What stands beside a field's type: how its value is read, and its line of help."""

    read: Reader
    help: str


class ByteSize(int):
    """A number of bytes that prints as people write it: `512MiB`."""

    def __str__(self) -> str:
        for unit in ("TiB", "GiB", "MiB", "KiB"):
            if self >= UNIT_BYTES[unit] and self % UNIT_BYTES[unit] == 0:
                return f"{int(self) // UNIT_BYTES[unit]}{unit}"
        return str(int(self))


def auto_or(reader: Reader) -> Reader:
    """None, written `auto`, or what `reader` reads."""

    def read(raw: object) -> Any:
        return None if raw is None or raw == "auto" else reader(raw)

    return read


def none_or(reader: Reader) -> Reader:
    """The text `none`, or what `reader` reads."""

    def read(raw: object) -> Any:
        return raw if raw == "none" else reader(raw)

    return read


def text(raw: object) -> str:
    """A text that is not empty."""
    if not isinstance(raw, str) or not raw.strip():
        raise ValueError("a text")
    return raw


def path(raw: object) -> Path:
    """A path; `~` is the home folder."""
    return Path(raw if isinstance(raw, Path) else text(raw)).expanduser()


def key_hash(raw: object) -> str:
    """The hash of a key."""
    if not isinstance(raw, str) or not re.fullmatch("sha256:[0-9a-f]{64}", raw):
        raise ValueError("a hash from `surefoot key new`: sha256: and 64 hexadecimal digits")
    return raw


def one_of(*words: str) -> Reader:
    """One of `words`."""

    def read(raw: object) -> str:
        if not isinstance(raw, str) or raw not in words:
            raise ValueError(" or ".join(words))
        return raw

    return read


def whole(least: int, most: int | None = None) -> Reader:
    """A whole number in a range, both ends included."""
    limits = f"from {least} to {most}" if most is not None else f"of {least} or more"

    def read(raw: object) -> int:
        value = _number(raw, int)
        if value is None or value < least or (most is not None and value > most):
            raise ValueError(f"a whole number {limits}")
        return int(value)

    return read


def seconds(least: float) -> Reader:
    """A finite number of seconds, `least` or more."""

    def read(raw: object) -> float:
        value = _number(raw, float)
        if value is None or not math.isfinite(value) or value < least:
            raise ValueError(f"a number of seconds, {least:g} or more")
        return float(value)

    return read


def share(raw: object) -> float:
    """A share of a whole, less than all of it."""
    value = _number(raw, float)
    if value is None or not 0 <= value < 1:
        raise ValueError("a number from 0 to below 1")
    return float(value)


def rates(raw: object) -> tuple[float, ...]:
    """Numbers from 0 to 1, at least one, with commas between them in a text."""
    values = raw.split(",") if isinstance(raw, str) else raw
    if isinstance(values, (list, tuple)) and values:
        numbers = [_number(each, float) for each in values]
        if all(each is not None and 0 <= each <= 1 for each in numbers):
            return tuple(float(each) for each in numbers if each is not None)
    raise ValueError("numbers from 0 to 1 with commas between them, such as 0.8,0.6")


def byte_size(raw: object) -> ByteSize:
    """A positive number of bytes: `1048576`, `512MiB`, `1.5GiB`, `2GB`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", str(int(raw) if isinstance(raw, ByteSize) else raw))
    if match and match[2] in UNIT_BYTES and (size := int(float(match[1]) * UNIT_BYTES[match[2]])) > 0:
        return ByteSize(size)
    raise ValueError("a number of bytes above 0, such as 1048576, 512MiB or 1.5GiB")


def _number(raw: object, kind: type[int] | type[float]) -> int | float | None:
    """`raw` as a number of `kind`, None if it is none. A bool is none, and neither is 1.5 a whole one."""
    if isinstance(raw, bool) or not isinstance(raw, (str, int, float)):
        return None
    if kind is int and isinstance(raw, float):
        return None
    try:
        return kind(raw)
    except ValueError:
        return None
