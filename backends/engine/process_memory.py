"""What the process does about its memory once everything is loaded."""

from __future__ import annotations

import ctypes
import gc
import mmap
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ *(.*)")
"""The first line of a mapping in `/proc/PID/smaps`: its ends, what may be done with it, and its file."""

_LIBRARY = re.compile(r"\.so(\.|$)")


def give_back_freed_memory() -> None:
    """To the system, after much was freed between pieces that stay: glibc keeps pages for what may come.

    It takes milliseconds. Other C libraries have no such function.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def let_go_of_library_pages() -> None:
    """Of code and constants that starting took, most of which are not needed again.

    They stay in the system's own memory as long as it has no better use for it, and are mapped anew, 16 at a
    time and within microseconds, by whoever needs them. A system without `/proc` keeps them as they are.
    """
    try:
        smaps = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    madvise = ctypes.CDLL(None).madvise
    for start, end in unwritten_library_mappings(smaps.splitlines()):
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def unwritten_library_mappings(smaps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Where libraries' pages are that cannot be written and are as in the file: the linker has written to
    some, which may lie in swap by now.
    """
    mapping: re.Match[str] | None = None
    num_written = 0
    for line in smaps:
        if (begun := _MAPPING.match(line)) is not None:
            mapping, num_written = begun, 0
        elif line.startswith(("Anonymous:", "Swap:")):
            num_written += int(line.split()[1])
        elif line.startswith("VmFlags:") and mapping is not None:
            start, end, rights, file = mapping.groups()
            if "w" not in rights and _LIBRARY.search(file) and not num_written:
                yield int(start, 16), int(end, 16)


def spare_collector() -> None:
    """Let the cyclic garbage collector pass over what is there now and stays: libraries and the engine.

    Otherwise all threads stand still now and then while it looks through some 300,000 objects for garbage.
    What was passed over before and is garbage by now goes first.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
