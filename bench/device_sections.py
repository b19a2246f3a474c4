"""Sections of the device benchmark, each in a process of its own: a fault on a GPU spoils all that its
process does afterwards, and kernels of several checks are compiled at once.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
from msgspec import Struct

from .device_rows import Fault, Row
from .device_setup import Setup


class Section(Struct, frozen=True):
    """Something to find out, by a function that another process can import."""

    name: str
    run: Callable[[Setup], Iterator[Row]]


def rows_of(section: Section, setup: Setup) -> Iterator[Row]:
    """What a section finds. An exception ends it and is a row of its own."""
    torch.manual_seed(0)
    try:
        yield from section.run(setup)
    except Exception as error:
        traceback.print_exc()
        lines = str(error).splitlines() or [""]
        yield Fault(name=section.name, what=f"{type(error).__name__}: {lines[0]}")


class Here:
    """A section in this process."""

    def __init__(self, section: Section, setup: Setup) -> None:
        self._section, self._setup = section, setup

    def begin(self) -> None:
        """Nothing waits."""

    def rows(self, ends_s: float) -> Iterator[Row]:
        """What it finds, however long it takes."""
        return rows_of(self._section, self._setup)

    def stop(self) -> None:
        """Nothing is left."""


class Apart:
    """A section in another process. It starts at once, and waits with its imports done."""

    def __init__(self, section: Section, setup: Setup) -> None:
        context = get_context("spawn")
        self._section = section
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, section, setup), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self) -> None:
        """Let it run. One that has died already says so among its rows."""
        with contextlib.suppress(OSError):
            self._connection.send(None)

    def rows(self, ends_s: float) -> Iterator[Row]:
        """What it finds, as it comes, until `time.monotonic()` is `ends_s`; then it is stopped."""
        try:
            while self._connection.poll(max(ends_s - time.monotonic(), 0.0)):
                if (row := self._connection.recv()) is None:
                    return
                yield row
            yield Fault(name=self._section.name, what="stopped, as the time was up")
        except (EOFError, OSError):
            self._process.join()
            yield Fault(name=self._section.name, what=f"ended with status {self._process.exitcode}")
        finally:
            self.stop()

    def stop(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(connection: Connection, section: Section, setup: Setup) -> None:
    connection.recv()
    for row in rows_of(section, setup):
        connection.send(row)
    connection.send(None)
