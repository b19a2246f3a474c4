"""Memory that was freed goes back to the system, where the C library would keep it."""

from __future__ import annotations

import ctypes


def give_back_freed_memory() -> None:
    """After much was freed between pieces that stay: glibc keeps whole pages for what may come.

    It takes milliseconds. Other C libraries have no such function.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
