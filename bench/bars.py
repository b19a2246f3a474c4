"""What jobs with bars do alike: measure, print, store, and say by the exit status how the bars fared."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from .errors import BenchError
from .loop import run_async
from .results import check_storable

EXIT_MISSED = 1
EXIT_FAILED = 2

VERDICTS = {None: "", True: "kept", False: "MISSED"}
"""How a line of a table says whether its bar is kept; None is a line without one."""

Progress = Callable[[str], None]


class BarRow(Protocol):
    """A line of a job's table."""

    @property
    def kept(self) -> bool | None:
        """Whether the bar is kept; None without one."""


R = TypeVar("R")
T = TypeVar("T")
Row = TypeVar("Row", bound=BarRow)


def run_job(
    name: str,
    measure: Callable[[Progress], Coroutine[Any, Any, R]],
    rows_of: Callable[[R], list[Row]],
    text_of: Callable[[R, list[Row]], str],
    output: Path | None,
) -> int:
    """Measure, print the table, and store the result as JSON if there is a file for it.

    The exit status is 0 if every bar is kept, 1 if one is missed, 2 if the measurement failed.
    """
    try:
        if output is not None:
            check_storable(output)
        result = run_async(measure(lambda text: say(f"{text} ...\n")))
        rows = rows_of(result)
        sys.stdout.write(text_of(result, rows))
        if output is not None:
            output.write_bytes(msgspec.json.encode(result) + b"\n")
    except (BenchError, OSError) as error:
        say(f"{name}: {error}\n")
        return EXIT_FAILED
    return EXIT_MISSED if any(row.kept is False for row in rows) else 0


def turned(names: Sequence[T], number: int) -> list[T]:
    """The order of a round: it turns, so that nobody always finds the machine in the same state."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def say(text: str) -> None:
    """To whoever waits, beside the result."""
    sys.stderr.write(text)
