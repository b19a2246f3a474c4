"""How many CPUs and how much memory this process may use: the machine's, or its container's if that is less.

Control groups come in two versions with the same meaning: v2 has one tree (`cpu.max`, `memory.max`), v1 one
tree a controller (`cpu.cfs_quota_us`, `memory.limit_in_bytes`). A group's limit binds all groups below it, so
the least limit on the way from the process's own group to the top is the one that holds. `root` stands in
for `/` in tests.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def cpu_count(root: Path = ROOT, num_cpus: int | None = None) -> int:
    """CPUs worth a thread: those this process may be scheduled on, at most its quota, rounded up; at least 1.

    `num_cpus` replaces what the scheduler says.
    """
    usable = num_cpus or _num_schedulable()
    quotas = [quota for folder in _folders(root, "cpu") if (quota := _cpu_quota(folder)) is not None]
    return max(1, min([usable, *(math.ceil(quota) for quota in quotas)]))


def available_memory_bytes(root: Path = ROOT) -> int:
    """Memory that can still be taken: what the limits leave, counting file pages that can be dropped."""
    left = [
        limit - _memory_held(folder)
        for folder in _folders(root, "memory")
        if (limit := _memory_limit(folder)) is not None
    ]
    return max(0, min([_meminfo(root, "MemAvailable"), *left]))


def _num_schedulable() -> int:
    # Only Linux knows affinity.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders that may hold `controller`'s limits, from the process's own group to the top."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        base = _mount(root / "sys/fs/cgroup", controllers, controller)
        if base is None:
            continue
        # Inside a container the path may be the host's, which is not there: then the top is all there is.
        own = base / path.strip().lstrip("/")
        inside = own if ".." not in own.parts and own.is_dir() else base
        while inside != base:
            yield inside
            inside = inside.parent
        yield base


def _mount(cgroups: Path, controllers: str, controller: str) -> Path | None:
    """Where the tree of a line in /proc/self/cgroup is mounted, None if it does not have `controller`."""
    if controllers == "":
        # Beside v1 trees the v2 one lies a folder deeper.
        return cgroups / "unified" if (cgroups / "unified").is_dir() else cgroups
    if controller not in controllers.split(","):
        return None
    joined = cgroups / controllers
    return joined if joined.is_dir() else cgroups / controller


def _cpu_quota(folder: Path) -> float | None:
    """CPUs' worth of time that a group may use, None for no limit."""
    if v2 := _read(folder / "cpu.max"):
        quota, period = v2.split()
        return None if quota == "max" else int(quota) / int(period)
    v1_quota, v1_period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if not v1_quota or not v1_period or int(v1_quota) <= 0:
        return None
    return int(v1_quota) / int(v1_period)


def _memory_limit(folder: Path) -> int | None:
    """Bytes that a group may hold, None for no limit (which v1 writes as a number beyond any memory)."""
    text = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
    return int(text) if text and text.strip() != "max" else None


def _memory_held(folder: Path) -> int:
    """Bytes that a group holds and cannot drop at once."""
    current = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
    stat = dict(line.split() for line in (_read(folder / "memory.stat") or "").splitlines())
    droppable = stat.get("total_inactive_file", stat.get("inactive_file", "0"))
    return max(0, int(current or 0) - int(droppable))


def _meminfo(root: Path, name: str) -> int:
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        key, _, rest = line.partition(":")
        if key == name:
            return int(rest.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
