"""What happens to memory that was freed."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

_PROGRAM = """
import os
from surefoot.backends.engine.freed_memory import give_back_freed_memory
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
