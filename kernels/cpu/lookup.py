"""Rows by number: of a plain table, and of a weight that is packed for linear layers (see `linear.py`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from .forms import INT8, INT16, INT32, INT64, Emitter
from .kinds import F16, F32_, Q4_0, Q4_1, Q8_0
from .vector import ADDRESS, compiled, copy_u32, op, read, read_f16, read_i64, words, write


@op(types.int64, ADDRESS)
def _read_byte(e: Emitter, address: Any) -> Any:
    return e.b.zext(e.load(address, INT8), INT64)


@op(types.float32, ADDRESS)
def _read_bf16(e: Emitter, address: Any) -> Any:
    return e.b.extract_element(e.from_bf16(e.load(address, ir.VectorType(INT16, 1))), INT32(0))


@compiled
def _nibble(codes: int, k: int) -> int:
    """Code k of a group, of the output whose first byte is at `codes`."""
    byte = _read_byte(codes + k // 8 * 64 + k % 4)
    return byte & 15 if k % 8 < 4 else byte >> 4


@compiled
def _grouped_row(panel: int, lane: int, kind: int, groups: int, out: int) -> None:
    """`d * c`, `d * (c - 8)` or `d * c + m`, rounded after each operation."""
    code_bytes = 512 if kind == Q8_0 else 256
    scale_bytes = 64 if kind == Q4_1 else 32
    for g in range(groups):
        codes = panel + g * code_bytes + 4 * lane
        scales = panel + groups * code_bytes + g * scale_bytes + 2 * lane
        d = read_f16(scales)
        least = read_f16(scales + 32) if kind == Q4_1 else np.float32(0.0)
        for k in range(32):
            if kind == Q8_0:
                byte = _read_byte(codes + k // 4 * 64 + k % 4)
                value = np.float32(byte - 256 if byte > 127 else byte) * d
            elif kind == Q4_0:
                value = np.float32(_nibble(codes, k) - 8) * d
            else:
                value = np.float32(_nibble(codes, k)) * d + least
            write(out + 4 * (32 * g + k), value)


@compiled
def _dense_row(panel: int, lane: int, kind: int, width: int, out: int) -> None:
    for k in range(width):
        if kind == F32_:
            value = read(panel + 64 * k + 4 * lane)
        elif kind == F16:
            value = read_f16(panel + 32 * k + 2 * lane)
        else:
            value = _read_bf16(panel + 32 * k + 2 * lane)
        write(out + 4 * k, value)


def embed(args: int, part: int, parts: int) -> None:
    """Args: row numbers (int64), how many, panels, bytes of a panel, kind of weights, groups (or inputs,
    where there are none), out, bytes of its rows.
    """
    numbers, rows, panels, panel_bytes, kind, width, out, out_bytes = words(args, 8)
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        number = read_i64(numbers + 8 * row)
        panel, lane, target = panels + number // 16 * panel_bytes, number % 16, out + row * out_bytes
        if kind <= Q8_0:
            _grouped_row(panel, lane, kind, width, target)
        else:
            _dense_row(panel, lane, kind, width, target)


def take(args: int, part: int, parts: int) -> None:
    """Args: table, bytes of its rows, row numbers (int64), how many, out."""
    table, row_bytes, numbers, rows, out = words(args, 5)
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        source = table + read_i64(numbers + 8 * row) * row_bytes
        for i in range(0, row_bytes, 4):
            copy_u32(source + i, out + row * row_bytes + i)
