"""What the process does about its memory once everything is loaded."""

from __future__ import annotations

import ctypes
import gc


def give_back_freed_memory() -> None:
    """To the system, after much was freed between pieces that stay: glibc keeps pages for what may come.

    It takes milliseconds. Other C libraries have no such function.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def spare_collector() -> None:
    """Let the cyclic garbage collector pass over what is there now and stays: libraries and the engine.

    Otherwise all threads stand still now and then while it looks through some 300,000 objects for garbage.
    What was passed over before and is garbage by now goes first.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
