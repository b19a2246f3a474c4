"""What is freed goes back, and what stays is not looked through."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys

import pytest

from surefoot.backends.engine.process_memory import spare_collector

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


def test_collections_pass_over_what_stays() -> None:
    """Once a server is ready its libraries are never looked through again: that took a tenth of a second."""
    try:
        spare_collector()
        assert gc.get_freeze_count() > 10_000
        assert len(gc.get_objects()) < 1000
    finally:
        gc.unfreeze()
