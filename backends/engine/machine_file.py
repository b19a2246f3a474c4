"""What a machine's steps cost, kept in a file between the engine that measured it and the simulator."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from .cost_model import StepCost


class MachineCost(Struct, frozen=True, kw_only=True):
    """A model's steps on a machine, and the blocks that its cache had."""

    num_blocks: int
    cost: StepCost


def save_machine(file: Path, machine: MachineCost) -> None:
    """Write the file as a whole; raises `OSError`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_bytes(msgspec.json.encode(machine))
    partial.replace(file)


def load_machine(file: Path) -> MachineCost | None:
    """None if there is no such file, or nothing of use in it."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=MachineCost)
    except (OSError, msgspec.MsgspecError):
        return None
