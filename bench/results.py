"""A run's result as it is stored. The schema is documented in docs/benchmarking.md."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from .errors import BadArgument, BenchError
from .machine import Machine
from .metrics import Summary
from .prompts import Calibration
from .records import RequestRecord
from .requester import Target
from .server import ServerInfo

SCHEMA = "surefoot.bench/1"


class ClientCost(Struct, frozen=True, kw_only=True):
    """CPU time that the load generator itself took during the load."""

    cpu_s: float
    cpu_us_per_chunk: float


class BenchResult(Struct, frozen=True, kw_only=True):
    """One run. `date` is when the load began, in UTC; `interrupted`: the run was ended early by hand."""

    schema: str = SCHEMA
    date: str
    interrupted: bool
    arguments: dict[str, Any]
    server: ServerInfo
    target: Target
    calibration: Calibration | None
    machine: Machine
    client: ClientCost
    summary: Summary
    records: list[RequestRecord]


def check_storable(file: Path) -> None:
    """Before the run: `BadArgument` if no result could be written to `file` after it."""
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise BadArgument(f"--output {file}: no file can be written there")


def store(result: BenchResult, file: Path) -> None:
    """Write the result as JSON. `BenchError` if that cannot be done."""
    try:
        file.write_bytes(msgspec.json.encode(result) + b"\n")
    except OSError as error:
        raise BenchError(f"the result cannot be written to {file}: {error}") from error


def load(file: Path) -> BenchResult:
    """Read a stored result. `BadArgument` if it is none, or of another schema."""
    try:
        result = msgspec.json.decode(file.read_bytes(), type=BenchResult)
    except OSError as error:
        raise BadArgument(f"{file} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise BadArgument(f"{file} is not a result of `surefoot bench`: {error}") from error
    if result.schema != SCHEMA:
        raise BadArgument(f"{file} has the schema {result.schema!r}, and {SCHEMA!r} is what can be read")
    return result
