"""Resident memory of a process and all its descendants, from /proc."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")


def resident_bytes(root: int) -> int | None:
    """Of the process `root` and its descendants; pages that they share count once for each.

    None where the system does not tell.
    """
    parents = _parents()
    if root not in parents:
        return None
    tree, grown = {root}, True
    while grown:
        children = {pid for pid, parent in parents.items() if parent in tree} - tree
        tree |= children
        grown = bool(children)
    return sum(_resident_pages(pid) for pid in tree) * os.sysconf("SC_PAGE_SIZE")


def _parents() -> dict[int, int]:
    """The parent of every process there is."""
    parents = {}
    for folder in PROC.glob("[0-9]*"):
        try:
            # The name stands in parentheses and may hold any character.
            after_name = (folder / "stat").read_text().rpartition(")")[2]
        except OSError:  # It has ended.
            continue
        parents[int(folder.name)] = int(after_name.split()[1])
    return parents


def _resident_pages(pid: int) -> int:
    try:
        return int((PROC / str(pid) / "statm").read_text().split()[1])
    except OSError:
        return 0
