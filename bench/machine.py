"""What a result says of the machine that made it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from msgspec import Struct


class Machine(Struct, frozen=True, kw_only=True):
    """The client's machine, which is the server's too where both run side by side."""

    system: str
    cpu: str
    num_cpus: int
    memory_bytes: int | None
    python: str


def describe_machine() -> Machine:
    """Of the machine that this runs on."""
    return Machine(
        system=platform.platform(),
        cpu=_first("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1),
        memory_bytes=_memory(),
        python=platform.python_version(),
    )


def _memory() -> int | None:
    total = _first("/proc/meminfo", "MemTotal")
    return int(total.split()[0]) * 1024 if total else None


def _first(file: str, name: str) -> str | None:
    """The value of the first `name: value` line; None where there is no such file or line."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
