"""Runs `surefoot serve` as a user would: a process of its own on a free port."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

START_LIMIT_S = 900
"""A first start prepares weights and compiles kernels, perhaps beside other tests."""


class ServerProcess:
    """A context manager: ready on entry, gone on exit. `log` gets all that it prints."""

    def __init__(self, cache_dir: Path, *flags: str, log: Path) -> None:
        self.log = log
        self._command = [
            str(Path(sys.executable).with_name("surefoot")),
            "serve",
            "--port=0",
            f"--cache-dir={cache_dir}",
            "--cache-memory=256MiB",
            "--threads=1",  # test processes share the cores
            *flags,
        ]
        self.url = ""

    def __enter__(self) -> Self:
        """Start, and wait for the line that names the URL."""
        with self.log.open("w") as out:
            self.process = subprocess.Popen(self._command, stderr=out, stdout=out)
        deadline_s = time.monotonic() + START_LIMIT_S
        while not (
            found := re.search(r"^Serving .* at (http\S+)\. Try it", self.log.read_text(), re.MULTILINE)
        ):
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise AssertionError(f"the server did not start:\n{self.log.read_text()}")
            time.sleep(0.05)  # a file has no event to wait for
        self.url = found[1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server."""
        self.process.send_signal(number)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples, as `/metrics` says now."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        samples = [line for line in lines if line.split("{")[0].split(" ")[0] == name]
        assert samples, f"no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in samples)
