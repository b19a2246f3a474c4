"""Launches that are written down once and run again and again: a step without Python between its kernels.

While a program is recorded, an op writes down what it would have run (`Program.add`) and takes the memory for
its result from a `Workspace`, which stays where it is. `LaunchesOnly` sees to it that nothing but launches
happens meanwhile, so that a replay leaves nothing out.
"""

from __future__ import annotations

import math
import struct
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .launch import MAX_ARGS, Launcher

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_SMALLEST = 4096
_CACHE_LINE = 64


class NotLaunches(Exception):
    """What is being recorded does more than launch kernels and take views."""


class Workspace:
    """Memory for results of recorded ops: pieces of 2^n bytes, taken again as soon as no tensor holds them.

    Programs share it, since they run one at a time; so it takes no more than the largest one needs, times 2
    for the rounding and 2 for the smaller pieces.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, list[_Bytes]] = defaultdict(list)
        self._holders: dict[int, weakref.ref[Any]] = {}

    def release(self) -> None:
        """All pieces are free: what was recorded before is not running."""
        self._holders.clear()

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """As `torch.empty`."""
        num_bytes = math.prod(shape) * dtype.itemsize
        # A tensor over a numpy array keeps the array alive as long as any view of the tensor lives.
        held = self._free_piece(max(_SMALLEST, 1 << (num_bytes - 1).bit_length()))[:]
        self._holders[held.ctypes.data] = weakref.ref(held)
        return torch.from_numpy(held)[:num_bytes].view(dtype).view(shape)

    def _free_piece(self, size: int) -> _Bytes:
        pieces = self._pieces[size]
        for piece in pieces:
            holder = self._holders.get(piece.ctypes.data)
            if holder is None or holder() is None:
                return piece
        memory = np.empty(size + _CACHE_LINE, dtype=np.uint8)
        pieces.append(memory[-memory.ctypes.data % _CACHE_LINE :][:size])
        return pieces[-1]


class LaunchesOnly(TorchDispatchMode):
    """While it is on, torch may take views and nothing else."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is ever compiled: to say so spares the import of torch's compiler, some 200 MB."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raise `NotLaunches` unless the result lies in an argument's memory, which is left as it was."""
        if func._schema.is_mutable:
            raise NotLaunches(str(func))
        result = func(*args, **(kwargs or {}))
        given = {_memory(x) for x in args if isinstance(x, Tensor)}
        results = result if isinstance(result, (list, tuple)) else [result]
        if not all(isinstance(x, Tensor) and _memory(x) in given for x in results):
            raise NotLaunches(str(func))
        return result


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Program:
    """What a function of tensors launches, and its result."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._rows: list[tuple[int, ...]] = []
        self.kept: list[Any] = []
        """What the launches refer to and nobody else holds."""

    def add(self, tape: int, *args: int, value: float = 0.0) -> None:
        """Write down what `Launcher.run` would run."""
        (bits,) = struct.unpack("q", struct.pack("d", value))
        self._rows.append((*args, *(0,) * (MAX_ARGS - len(args)), bits, tape))

    def finish(self, forward: Callable[[], Tensor]) -> None:
        """Record a function; it is kept, since what it refers to has to stay."""
        self._forward, self._result = forward, forward()
        self._launches = np.array(self._rows, dtype=np.int64)
        self._rows.clear()  # Python's integers take several times what the array does.

    def replay(self) -> Tensor:
        """Run the launches in one call."""
        self._launcher.replay(self._launches)
        return self._result
