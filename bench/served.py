"""A server started as a process of its own, and ended however the measurement ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from .client import HttpClient
from .errors import BenchError, RequestFailed

READY_POLL_S = 0.1
START_LIMIT_S = 900.0
"""A first start may prepare weights and compile kernels."""
STOP_LIMIT_S = 30.0
LOG_TAIL_CHARS = 2000


def free_port() -> int:
    """A port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class OurServer(Protocol):
    """What a benchmark's job says of the server of ours that it starts."""

    @property
    def surefoot(self) -> Path | None:
        """The command, None for the installed one."""

    @property
    def threads(self) -> int:
        """CPU threads."""

    @property
    def cache_dir(self) -> Path | None:
        """Folder of prepared weights, None for that of `serve`."""


def serve_surefoot(job: OurServer, model: Path, log: Path, *options: str) -> ServedProcess:
    """Our server, on a free port, with some more options."""
    port = free_port()
    command = [
        str(job.surefoot or Path(sys.executable).with_name("surefoot")),
        "serve",
        f"--model={model}",
        f"--port={port}",
        f"--threads={job.threads}",
        *options,
        *([f"--cache-dir={job.cache_dir}"] if job.cache_dir else []),
    ]
    return ServedProcess(command, f"http://127.0.0.1:{port}", log)


class ServedProcess:
    """An async context manager: ready on entry (a 200 at `ready_path`), gone on exit.

    `BenchError`, with the end of its log, if it ends before it is told to.

    `ready_s` is the time from the start of the process to that answer. What it prints goes to `log`.
    """

    def __init__(
        self, command: Sequence[str], url: str, log: Path, ready_path: str = "/health/ready"
    ) -> None:
        self.url = url
        self.ready_s = 0.0
        self._command = command
        self._log = log
        self._ready_path = ready_path

    async def __aenter__(self) -> ServedProcess:
        start = time.perf_counter()
        with self._log.open("ab") as out:
            # A session of its own: Ctrl-C ends the measurement, which then ends the server in order.
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            await self._until_ready(start)
        except BaseException:
            await self._stop()
            raise
        self.ready_s = time.perf_counter() - start
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        died = self._process.returncode
        await self._stop()
        if died is not None and not isinstance(error, asyncio.CancelledError):
            raise BenchError(f"{self._command[0]} ended ({died}) while it was measured:\n{self._log_tail()}")

    @property
    def pid(self) -> int:
        """The process's number, once entered."""
        return self._process.pid

    async def wait(self) -> None:
        """Wait until the process has ended by itself."""
        await self._process.wait()

    async def _until_ready(self, start: float) -> None:
        async with HttpClient(self.url) as client:
            while not await self._is_ready(client):
                if self._process.returncode is not None:
                    raise BenchError(f"{self._command[0]} ended before it was ready:\n{self._log_tail()}")
                if time.perf_counter() - start > START_LIMIT_S:
                    raise BenchError(f"not ready after {START_LIMIT_S:g} s:\n{self._log_tail()}")
                await asyncio.sleep(READY_POLL_S)

    async def _is_ready(self, client: HttpClient) -> bool:
        try:
            head, _ = await client.get(self._ready_path)
        except RequestFailed:
            return False
        return head.status == 200

    async def _stop(self) -> None:
        if self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(STOP_LIMIT_S):
                await self._process.wait()
        except TimeoutError:
            os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    def _log_tail(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARS:]
