"""The safetensors files of a folder, read with `read`, not mapped.

Mapping costs a page fault per 4 KiB, which on virtual machines is the dearer way by far (270 MB: 1.7 s
against 0.2 s), counts twice in resident memory, and kills the process if the file is cut meanwhile. The
safetensors library only maps; the format is a length, a JSON header and the numbers.
"""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
from msgspec import Struct

from surefoot.kernels.base import AnyWeight
from surefoot.kernels.weights import BLOCK_BYTES, GROUP, GroupKind, GroupWeight

from .model_errors import BadModelFiles

INDEX_FILE = "model.safetensors.index.json"
GROUP_MARK = ":"
"""A tensor in groups of 32 is stored as bytes under `name:kind`, which only our own files do."""

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_GROUP_DTYPE = "U8"
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""


class _Entry(Struct):
    """A tensor in a file's header. `data_offsets` count from the header's end; `kind` is set for groups."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
    kind: GroupKind | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """What is stored."""
        return torch.uint8 if self.kind else _DTYPES[self.dtype]

    @property
    def elements(self) -> tuple[int, ...]:
        """The shape in elements, where the stored one counts bytes."""
        if self.kind is None:
            return self.shape
        return (self.shape[0], self.shape[1] // BLOCK_BYTES[self.kind] * GROUP)


class SafetensorsFolder:
    """A folder's `model.safetensors`, or the shards that its index names; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self._tensors: dict[str, tuple[BufferedReader, _Entry, int]] = {}
        try:
            for path in safetensors_files(folder):
                self._open(path)
        except BaseException:
            self._stack.close()
            raise
        self.shapes = {name: entry.elements for name, (_, entry, _) in self._tensors.items()}

    def _open(self, path: Path) -> None:
        file = self._stack.enter_context(path.open("rb"))
        try:
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {header_bytes} bytes")
            header = msgspec.json.decode(file.read(header_bytes), type=dict[str, Any])
            header.pop("__metadata__", None)
            entries = msgspec.convert(header, dict[str, _Entry])
            start, size = 8 + header_bytes, path.stat().st_size
            for stored_name, entry in entries.items():
                name, _, kind = stored_name.partition(GROUP_MARK)
                entry.kind = msgspec.convert(kind, GroupKind) if kind else None
                _check(name, entry, size - start)
                self._tensors[name] = (file, entry, start + entry.data_offsets[0])
        except ValueError as error:  # msgspec's errors are ValueErrors
            raise BadModelFiles(f"{path.name} is not a complete safetensors file: {error}") from error

    def tensor(self, name: str) -> AnyWeight:
        """Read a tensor, in the form it is stored in."""
        file, entry, start = self._tensors[name]
        stored = torch.empty(entry.shape, dtype=entry.torch_dtype)
        file.seek(start)
        if file.readinto(stored.flatten().view(torch.uint8).numpy().data) != stored.nbytes:
            raise BadModelFiles(f"{Path(file.name).name} ends within {name}")
        return GroupWeight(kind=entry.kind, data=stored) if entry.kind else stored

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _check(name: str, entry: _Entry, data_bytes: int) -> None:
    if entry.dtype not in _DTYPES and not (entry.kind in BLOCK_BYTES and entry.dtype == _GROUP_DTYPE):
        raise ValueError(f"{name} has the dtype {entry.dtype}, not one of {', '.join(_DTYPES)}")
    begin, end = entry.data_offsets
    if end - begin != math.prod(entry.shape) * entry.torch_dtype.itemsize:
        raise ValueError(f"{name} has {end - begin} bytes for the shape {list(entry.shape)}")
    if not 0 <= begin <= end <= data_bytes:
        raise ValueError(f"{name} ends at byte {end} of {data_bytes}")


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files of a folder, in a fixed order."""
    index = folder / INDEX_FILE
    if not index.exists():
        single = folder / "model.safetensors"
        if not single.exists():
            raise BadModelFiles(f"{folder.name} has neither model.safetensors nor {INDEX_FILE}")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise BadModelFiles(f"{folder.name}/{INDEX_FILE} is not a safetensors index") from error
    if strays := [name for name in names if Path(name).name != name or not (folder / name).exists()]:
        raise BadModelFiles(f"{folder.name}/{INDEX_FILE} names files that are not there: {', '.join(strays)}")
    return [folder / name for name in names]
