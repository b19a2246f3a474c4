"""Linear layers: weights in panels of 16 outputs, rows in register tiles, one chain of additions per output.

Group formats multiply 4- or 8-bit codes with activations quantised per row and group of 32 to int16 (8 bits
cost 0.003 nat a token on SmolLM2-135M, see docs/measurements.md). A group's dot product is an exact integer;
then `acc = fma(float(dot), d * s, acc)` and, where the format has a minimum m, `acc = fma(m, sum(x), acc)`,
groups in order. So a row's result depends neither on the rows beside it nor on the form. 16- and 32-bit
weights take `acc = fma(x, w, acc)` over k in order.

A panel of a group format holds the codes of all groups, then the scales: 16 float16 d a group (and 16 m).
Nibbles: 4 vectors of 64 bytes a group; byte 4 * o + j of vector v has output o's codes of k = 8 * v + j (low
half) and k = 8 * v + 4 + j (high half). Bytes: 8 vectors, byte 4 * o + j of vector v has k = 4 * v + j. A
panel of 16- or 32-bit weights is `[in, 16]`.

An activation group is 80 bytes: 32 int16, float32 scale s, float32 sum of the group, int32 -8 * sum of codes
(Q4_0's are 8 too large), 4 bytes unused. Every four int16 lie in the order 0, 2, 1, 3, since shifting 16-bit
lanes brings the codes of k and k + 2 side by side. A group's rows follow one another (a tile's rows then lie
at fixed offsets), groups are `rows * 80 + 64` bytes apart.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types

from .dot import add_pairs
from .forms import FLOAT, INT16, INT32, LANES, Emitter
from .vector import (
    ADDRESS,
    F32,
    I32,
    absolute,
    add_to_rows,
    compiled,
    fma,
    linear_tile,
    load,
    max_lanes,
    maximum,
    mul,
    op,
    prefetch,
    splat,
    store_rows,
    store_rows_part,
    sum_lanes,
    tile,
    words,
    zeros,
)

Q4_0, Q4_1, Q8_0, F32_, BF16, F16 = range(6)
"""Kinds of weights, as the kernel's argument."""

ACTIVATION_BYTES = 80
"""Bytes of a quantised activation group."""

TOP = 32767.0
"""The largest activation code."""


CHAINS = 4
"""Independent integer sums in a tile, at least: fewer would wait for the multiply-add's latency."""


class Weights(NamedTuple):
    """What the weights are; `width` is in groups, or in inputs where there are none."""

    kind: int
    width: int
    panel_bytes: int


ROW_BLOCK = 256
"""Rows that pass a panel before the next panel is read: their activations stay in the second-level cache."""


# Activations.


@op(types.none, ADDRESS, F32, F32, F32)
def _store_activation_group(e: Emitter, out: Any, first: Any, second: Any, scale: Any) -> None:
    """Divide 32 numbers by a scale, round to even, write codes, scale, sum and offset."""
    b, total = e.b, e.constant(INT32, 0)
    quads = [lane & ~3 | (0, 2, 1, 3)[lane & 3] for lane in range(LANES)]
    for half, x in enumerate((first, second)):
        codes = b.fptosi(e.nearest_even(_clamp(e, b.fdiv(x, scale))), I32.llvm)
        total = b.add(total, codes)
        ordered = b.shuffle_vector(codes, codes, ir.Constant(I32.llvm, quads))
        e.store(out, b.trunc(ordered, ir.VectorType(INT16, LANES)), 2 * LANES * half)
    count = LANES
    while count > 1:
        count //= 2
        total = b.add(e.lanes(total, 0, count), e.lanes(total, count, count))
    sum_, s = b.extract_element(total, INT32(0)), b.extract_element(scale, INT32(0))
    e.store(out, s, 64)
    e.store(out, b.fmul(s, b.sitofp(sum_, FLOAT)), 68)
    e.store(out, b.mul(sum_, INT32(-8)), 72)


def _clamp(e: Emitter, x: Any) -> Any:
    """To [-32767, 32767]; what is not a number becomes -32767 (its scale is not a number either)."""
    low, high = e.constant(FLOAT, -TOP), e.constant(FLOAT, TOP)
    x = e.b.select(e.b.fcmp_ordered(">", x, low), x, low)
    return e.b.select(e.b.fcmp_ordered("<", x, high), x, high)


def quantise_rows(args: int, part: int, parts: int) -> None:
    """Quantise rows of float32: scale = max |x| / 32767 per group of 32.

    Args: x, its row stride, rows, groups, out, bytes from one group's rows to the next's.
    """
    x, stride, rows, groups, out, group_bytes = words(args, 6)
    zero = splat(0.0)
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        source, target = x + row * stride, out + row * ACTIVATION_BYTES
        for g in range(groups):
            first, second = load(source + g * 128), load(source + g * 128 + 64)
            top = max_lanes(maximum(absolute(first), absolute(second)))
            # 0 for finite numbers, else not a number: so that no fault upstream is rounded away.
            fault = sum_lanes(fma(first, zero, mul(second, zero)))
            scale = top / TOP + fault if top > 0.0 else 1.0 + fault
            _store_activation_group(target + g * group_bytes, first, second, splat(scale))


# Register tiles: what one group, or one k, adds to the sums of a few rows.


@tile
def _q4_0_group(e: Emitter, sums: Any, x: Any, stride: Any, codes: Any, scales: Any) -> Any:
    return _add_group(e, sums, x, stride, codes, scales, _nibbles, offset=True)


@tile
def _q4_1_group(e: Emitter, sums: Any, x: Any, stride: Any, codes: Any, scales: Any) -> Any:
    return _add_group(e, sums, x, stride, codes, scales, _nibbles, minimum=True)


@tile
def _q8_0_group(e: Emitter, sums: Any, x: Any, stride: Any, codes: Any, scales: Any) -> Any:
    return _add_group(e, sums, x, stride, codes, scales, _bytes)


def _add_group(
    e: Emitter,
    sums: Any,
    x: Any,
    stride: Any,
    codes: Any,
    scales: Any,
    unpack: Any,
    *,
    offset: bool = False,
    minimum: bool = False,
) -> Any:
    """Emit one group for every row of a tile; native vectors one after another, so that their sums fit
    registers.
    """
    halves = ir.VectorType(INT16, LANES)
    rows = [e.row(x, stride, m) for m in range(len(sums))]
    d = e.from_f16(e.load(scales, halves))
    least = e.from_f16(e.load(scales, halves, 2 * LANES)) if minimum else None
    width = LANES // e.form.pieces
    pieces: list[list[Any]] = [[] for _ in rows]
    for first in range(0, LANES, width):
        zero = e.constant(INT32, 0, width)
        starts = [e.splat(e.load(row, INT32, 72), width) if offset else zero for row in rows]
        chains = [[start] + [zero] * (CHAINS // len(rows) - 1) for start in starts]
        for i, (at, pairs) in enumerate(unpack(e, codes, first, width)):
            for row, chain in zip(rows, chains, strict=True):
                own = i % len(chain)
                chain[own] = add_pairs(e, chain[own], pairs, e.load(row, INT32, at))
        dots = [functools.reduce(e.b.add, chain) for chain in chains]
        for m, (row, dot) in enumerate(zip(rows, dots, strict=True)):
            scale = e.b.fmul(e.lanes(d, first, width), e.splat(e.load(row, FLOAT, 64), width))
            acc = e.fma(e.b.sitofp(dot, scale.type), scale, e.lanes(sums[m], first, width))
            if least is not None:
                acc = e.fma(e.lanes(least, first, width), e.splat(e.load(row, FLOAT, 68), width), acc)
            pieces[m].append(acc)
    return [e.concat(p) for p in pieces]


def _nibbles(e: Emitter, codes: Any, first: int, width: int) -> Iterator[tuple[int, Any]]:
    """Pairs of 4-bit codes of outputs `first` to `first + width`, each with its place in a row's group."""
    lanes = 2 * width
    mask = e.constant(INT16, 15, lanes)
    for v in range(4):
        stored = e.load(codes, ir.VectorType(INT16, lanes), 64 * v + 4 * first)
        for shift, at in ((0, 0), (8, 4), (4, 8), (12, 12)):
            moved = e.b.lshr(stored, e.constant(INT16, shift, lanes)) if shift else stored
            yield 16 * v + at, e.b.and_(moved, mask) if shift < 12 else moved


def _bytes(e: Emitter, codes: Any, first: int, width: int) -> Iterator[tuple[int, Any]]:
    """The same of 8-bit codes."""
    eight = e.constant(INT16, 8, 2 * width)
    for v in range(8):
        stored = e.load(codes, ir.VectorType(INT16, 2 * width), 64 * v + 4 * first)
        yield 8 * v, e.b.ashr(e.b.shl(stored, eight), eight)
        yield 8 * v + 4, e.b.ashr(stored, eight)


@tile
def _f32_step(e: Emitter, sums: Any, x: Any, stride: Any, weights: Any) -> Any:
    return _add_step(e, sums, x, stride, e.load(weights, F32.llvm))


@tile
def _bf16_step(e: Emitter, sums: Any, x: Any, stride: Any, weights: Any) -> Any:
    return _add_step(e, sums, x, stride, e.from_bf16(e.load(weights, ir.VectorType(INT16, LANES))))


@tile
def _f16_step(e: Emitter, sums: Any, x: Any, stride: Any, weights: Any) -> Any:
    return _add_step(e, sums, x, stride, e.from_f16(e.load(weights, ir.VectorType(INT16, LANES))))


def _add_step(e: Emitter, sums: Any, x: Any, stride: Any, weights: Any) -> Any:
    return [e.fma(e.splat(e.load(e.row(x, stride, m), FLOAT)), weights, acc) for m, acc in enumerate(sums)]


@compiled
def _prefetch_group(address: int, size: int) -> None:
    """Ask for a group of the next panel: from memory a panel comes slower than one row is multiplied."""
    for line in range(0, size, 64):
        prefetch(address + line)


@compiled
def _panel_rows(
    sums: Any,
    weights: Weights,
    x: int,
    step: int,
    panel: int,
    bias: int,
    out: int,
    out_stride: int,
    count: int,
) -> None:
    """One panel for one tile of rows; `bias` is 0 for none; `count` outputs are written.

    `step` is from one group of x to the next, or from one row to the next where x is not quantised.
    """
    kind, width, panel_bytes = weights.kind, weights.width, weights.panel_bytes
    for row in range(len(sums)):
        prefetch(out + row * out_stride)
    if kind == Q4_0:
        for g in range(width):
            _prefetch_group(panel + panel_bytes + g * 288, 288)
            sums = _q4_0_group(
                sums, x + g * step, ACTIVATION_BYTES, panel + g * 256, panel + width * 256 + g * 32
            )
    elif kind == Q4_1:
        for g in range(width):
            _prefetch_group(panel + panel_bytes + g * 320, 320)
            sums = _q4_1_group(
                sums, x + g * step, ACTIVATION_BYTES, panel + g * 256, panel + width * 256 + g * 64
            )
    elif kind == Q8_0:
        for g in range(width):
            _prefetch_group(panel + panel_bytes + g * 544, 544)
            sums = _q8_0_group(
                sums, x + g * step, ACTIVATION_BYTES, panel + g * 512, panel + width * 512 + g * 32
            )
    elif kind == F32_:
        for k in range(width):
            sums = _f32_step(sums, x + k * 4, step, panel + k * 64)
    elif kind == BF16:
        for k in range(width):
            sums = _bf16_step(sums, x + k * 4, step, panel + k * 32)
    else:
        for k in range(width):
            sums = _f16_step(sums, x + k * 4, step, panel + k * 32)
    if bias != 0:
        sums = add_to_rows(sums, bias)
    if count == 16:
        store_rows(sums, out, out_stride)
    else:
        store_rows_part(sums, out, out_stride, count)


@compiled
def _last_rows(
    rows: int,
    weights: Weights,
    x: int,
    step: int,
    panel: int,
    bias: int,
    out: int,
    out_stride: int,
    count: int,
) -> None:
    """The rows that are too few for the tallest tile, in one of their own: each tile unpacks the weights."""
    if rows == 1:
        _panel_rows(zeros(1), weights, x, step, panel, bias, out, out_stride, count)
    elif rows == 2:
        _panel_rows(zeros(2), weights, x, step, panel, bias, out, out_stride, count)
    elif rows == 3:
        _panel_rows(zeros(3), weights, x, step, panel, bias, out, out_stride, count)
    elif rows == 4:
        _panel_rows(zeros(4), weights, x, step, panel, bias, out, out_stride, count)
    elif rows == 5:
        _panel_rows(zeros(5), weights, x, step, panel, bias, out, out_stride, count)
    elif rows == 6:
        _panel_rows(zeros(6), weights, x, step, panel, bias, out, out_stride, count)
    elif rows == 7:
        _panel_rows(zeros(7), weights, x, step, panel, bias, out, out_stride, count)


def linear(args: int, part: int, parts: int) -> None:
    """Multiply: each part has its share of the panels, and goes through them once for each block of rows.

    Args: those of `quantise_rows` (x, its row stride, rows, width, quantised x or 0, bytes between groups),
    then panels, bytes of a panel, outputs, bias, out, its row stride, kind of weights.
    """
    dense, stride, rows, width, x, step = words(args, 6)
    panels, panel_bytes, outputs, bias, out, out_stride, kind = words(args + 48, 7)
    row_bytes = ACTIVATION_BYTES
    if x == 0:
        x, step, row_bytes = dense, stride, stride
    weights = Weights(kind, width, panel_bytes)
    num_panels = (outputs + 15) // 16
    first = num_panels * part // parts
    share = num_panels * (part + 1) // parts - first
    tallest = linear_tile()
    for unit in range(share * ((rows + ROW_BLOCK - 1) // ROW_BLOCK)):
        index = first + unit % share
        panel = panels + index * panel_bytes
        own_bias = bias + index * 64 if bias != 0 else 0
        count = min(16, outputs - index * 16)
        row = unit // share * ROW_BLOCK
        end = min(rows, row + ROW_BLOCK)
        source, target = x + row * row_bytes, out + index * 64 + row * out_stride
        while row + len(tallest) <= end:
            _panel_rows(tallest, weights, source, step, panel, own_bias, target, out_stride, count)
            row += len(tallest)
            source, target = source + len(tallest) * row_bytes, target + len(tallest) * out_stride
        _last_rows(end - row, weights, source, step, panel, own_bias, target, out_stride, count)


def group_bytes(rows: int) -> int:
    """Bytes from one group's rows to the next's; a cache line more, lest they all fall on the same cache
    sets.
    """
    return rows * ACTIVATION_BYTES + 64
