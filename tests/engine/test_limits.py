"""CPU and memory limits of the machine, its control groups and their nesting."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from surefoot.backends.engine.limits import available_memory_bytes, cpu_count

GiB = 1024**3


def write(root: Path, files: dict[str, str]) -> Path:
    """Lay `files` under `root`, which stands in for `/`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(total_kib: int, available_kib: int) -> dict[str, str]:
    """A `/proc/meminfo` of a machine."""
    return {"proc/meminfo": f"MemTotal: {total_kib} kB\nMemFree: 1 kB\nMemAvailable: {available_kib} kB\n"}


V2_GROUP = {"proc/self/cgroup": "0::/box\n"}
V1_GROUP = {"proc/self/cgroup": "4:memory:/box\n2:cpu,cpuacct:/box\n1:name=systemd:/\n"}


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("1000 100000", 1),
        ("1600000 100000", 8),
    ],
)
def test_v2_quota(tmp_path: Path, quota: str, expected: int) -> None:
    """A v2 quota is rounded up to whole CPUs, never above the machine's and never below 1."""
    root = write(tmp_path, {**V2_GROUP, "sys/fs/cgroup/box/cpu.max": quota + "\n"})
    assert cpu_count(root, num_cpus=8) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", 8), ("250000", 3), ("10000", 1)])
@pytest.mark.parametrize("mount", ["cpu,cpuacct", "cpu"])
def test_v1_quota(tmp_path: Path, mount: str, quota: str, expected: int) -> None:
    """A v1 quota is read from the `cpu` tree, under either name that it is mounted by; -1 is none."""
    folder = f"sys/fs/cgroup/{mount}/box"
    root = write(
        tmp_path,
        {**V1_GROUP, f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000\n"},
    )
    assert cpu_count(root, num_cpus=8) == expected


def test_least_limit_on_the_way_up(tmp_path: Path) -> None:
    """A parent group's limit holds for the groups below it."""
    root = write(
        tmp_path,
        {
            **meminfo(16 * 1024**2, 12 * 1024**2),
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/cpu.max": "300000 100000",
            "sys/fs/cgroup/outer/memory.max": str(2 * GiB),
            "sys/fs/cgroup/outer/inner/cpu.max": "max 100000",
            "sys/fs/cgroup/outer/inner/memory.max": str(4 * GiB),
        },
    )
    assert cpu_count(root, num_cpus=8) == 3
    assert available_memory_bytes(root) == 2 * GiB


def test_container_that_sees_its_hosts_path(tmp_path: Path) -> None:
    """Where the named group is not mounted, the limits at the top of the mount are read."""
    root = write(
        tmp_path,
        {
            **meminfo(16 * 1024**2, 12 * 1024**2),
            "proc/self/cgroup": "0::/../../docker/abc\n",
            "sys/fs/cgroup/cpu.max": "100000 100000",
            "sys/fs/cgroup/memory.max": str(GiB),
        },
    )
    assert cpu_count(root, num_cpus=8) == 1
    assert available_memory_bytes(root) == GiB


def test_v2_tree_beside_v1_trees(tmp_path: Path) -> None:
    """On a hybrid machine the v2 tree lies under `unified`, and both versions' limits hold."""
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu:/box\n0::/box\n",
            "sys/fs/cgroup/unified/box/cpu.max": "400000 100000",
            "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "500000",
            "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
        },
    )
    assert cpu_count(root, num_cpus=8) == 4


def test_no_control_groups(tmp_path: Path) -> None:
    """Without control groups the machine's own numbers hold."""
    root = write(tmp_path, meminfo(1024**2, 1024))
    assert cpu_count(root, num_cpus=6) == 6
    assert available_memory_bytes(root) == 1024**2


def test_v1_memory_without_a_limit(tmp_path: Path) -> None:
    """A v1 group without a limit names a number beyond any memory, which the machine's total overrules."""
    root = write(
        tmp_path,
        {
            **meminfo(1024**2, 512 * 1024),
            **V1_GROUP,
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "4096\n",
        },
    )
    assert available_memory_bytes(root) == GiB // 2


@pytest.mark.parametrize(
    ("version", "files"),
    [
        (
            V2_GROUP,
            {
                "sys/fs/cgroup/box/memory.max": str(2 * GiB),
                "sys/fs/cgroup/box/memory.current": str(GiB),
                "sys/fs/cgroup/box/memory.stat": f"anon 1\ninactive_file {GiB // 2}\n",
            },
        ),
        (
            V1_GROUP,
            {
                "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(2 * GiB),
                "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(GiB),
                "sys/fs/cgroup/memory/box/memory.stat": f"inactive_file 7\ntotal_inactive_file {GiB // 2}\n",
            },
        ),
    ],
    ids=["v2", "v1"],
)
def test_available_memory(tmp_path: Path, version: dict[str, str], files: dict[str, str]) -> None:
    """What a group can still take is its limit less what it holds, droppable file pages not counted."""
    root = write(tmp_path, {**meminfo(16 * 1024**2, 12 * 1024**2), **version, **files})
    assert available_memory_bytes(root) == GiB + GiB // 2


def test_full_group_has_nothing_left(tmp_path: Path) -> None:
    """Available memory is never negative."""
    root = write(
        tmp_path,
        {
            **meminfo(1024**2, 1024**2),
            **V2_GROUP,
            "sys/fs/cgroup/box/memory.max": "4096",
            "sys/fs/cgroup/box/memory.current": "8192",
        },
    )
    assert available_memory_bytes(root) == 0


def test_this_machine() -> None:
    """The real files of this machine give sane numbers."""
    assert 1 <= cpu_count() <= (os.cpu_count() or 1)
    assert available_memory_bytes() > 0
