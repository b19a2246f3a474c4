"""What is freed goes back, and what stays is not looked through."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.backends.engine.process_memory import spare_collector, unwritten_library_mappings

_PROGRAM = """
import os
from surefoot.backends.engine.process_memory import give_back_freed_memory
import torch

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

pieces = [torch.zeros(60_000, dtype=torch.uint8) for _ in range(2000)]
kept = pieces[::8]
before = resident()
del pieces
give_back_freed_memory()
print(before - resident())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_pages_between_what_is_kept_go_back() -> None:
    """Of 114 MiB in pieces of which every eighth is kept, most is the system's again."""
    done = subprocess.run([sys.executable, "-P", "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 70


_LIBRARIES = """
import torch
from surefoot.backends.engine.process_memory import let_go_of_library_pages

def resident_file_pages():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssFile:")) >> 10

rows = torch.arange(12.0).view(3, 4)
expected = torch.linalg.svdvals(rows @ rows.T).tolist()
before = resident_file_pages()
let_go_of_library_pages()
left = resident_file_pages()
assert torch.linalg.svdvals(rows @ rows.T).tolist() == expected
print(before, left)
"""


def _mapping(ends: str, rights: str, file: str, *, anonymous_kb: int = 0, swap_kb: int = 0) -> list[str]:
    return [
        f"{ends} {rights} 00000000 fe:00 11                      {file}",
        "Size:                  4 kB",
        f"Anonymous:             {anonymous_kb} kB",
        f"Swap:                  {swap_kb} kB",
        "VmFlags: rd ex mr mw me",
    ]


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system has no /proc")
def test_library_pages_that_starting_took_go_and_come_back() -> None:
    """Most of torch's pages are let go of, and what needs them again computes what it did."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _LIBRARIES], capture_output=True, text=True, check=True
    )
    before, left = map(int, done.stdout.split())
    assert left < before / 2


def test_only_pages_that_are_as_in_a_library_s_file_are_let_go_of() -> None:
    """What may be written, what the linker has written, in swap or not, and what is no library's stays."""
    smaps = [
        *_mapping("1000-2000", "r-xp", "/lib/libtorch_cpu.so"),
        *_mapping("2000-3000", "r--p", "/lib/libtorch_cpu.so", anonymous_kb=4),
        *_mapping("3000-4000", "r--p", "/lib/libtorch_cpu.so", swap_kb=4),
        *_mapping("4000-5000", "rw-p", "/lib/libtorch_cpu.so"),
        *_mapping("5000-8000", "r--p", "/a folder/libz.so.1.2"),
        *_mapping("8000-9000", "r--p", "/models/weights.safetensors"),
        *_mapping("9000-a000", "r-xp", ""),
        *_mapping("a000-b000", "r-xp", "[vdso]"),
    ]
    assert list(unwritten_library_mappings(smaps)) == [(0x1000, 0x2000), (0x5000, 0x8000)]


def test_collections_pass_over_what_stays() -> None:
    """Once a server is ready its libraries are never looked through again: that took a tenth of a second."""
    try:
        spare_collector()
        assert gc.get_freeze_count() > 10_000
        assert len(gc.get_objects()) < 1000
    finally:
        gc.unfreeze()
