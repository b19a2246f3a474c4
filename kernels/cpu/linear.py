"""Linear layers: weights in panels of 16 outputs, rows in register tiles, one chain of additions per output.

Group formats multiply 4- or 8-bit codes with quantised activations (`activations.py`): a group's dot product
is an exact integer; then `acc = fma(float(dot), d * s, acc)` and, where the format has a minimum m, `acc =
fma(m, sum(x), acc)`, groups in order. So a row's result depends neither on the rows beside it nor on the
form. 16- and 32-bit weights take `acc = fma(x, w, acc)` over k in order.

A panel of a group format holds the codes of all groups, then the scales: 16 float16 d a group (and 16 m).
Nibbles: 4 vectors of 64 bytes a group; byte 4 * o + j of vector v has output o's codes of k = 8 * v + j (low
half) and k = 8 * v + 4 + j (high half). Bytes: 8 vectors, byte 4 * o + j of vector v has k = 4 * v + j. A
panel of 16- or 32-bit weights is `[in, 16]`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from llvmlite import ir

from .activations import ACTIVATION_BYTES, OFFSET, OUTLIERS, PLACES, SCALE, SUM, TURNS
from .dot import ByteDot, byte_excess
from .forms import FLOAT, INT8, INT16, INT32, INT64, LANES, Emitter
from .kinds import BF16, F32_, Q4_0, Q4_1, Q8_0
from .vector import (
    F32,
    add_to_rows,
    compiled,
    linear_tile,
    prefetch,
    store_rows,
    store_rows_part,
    tile,
    words,
    zeros,
)

CHAINS = 4
"""Independent integer sums in a tile, at least: fewer would wait for the multiply-add's latency."""


class Weights(NamedTuple):
    """What the weights are; `width` is in groups, or in inputs where there are none."""

    kind: int
    width: int
    panel_bytes: int


ROW_BLOCK = 256
"""Rows that pass a panel before the next panel is read: their activations stay in the second-level cache."""


# Register tiles: what one group, or one k, adds to the sums of a few rows.


@tile
def _q4_0_group(e: Emitter, sums: Any, x: Any, stride: Any, codes: Any, scales: Any) -> Any:
    return _add_group(e, sums, x, stride, codes, scales, _Nibbles, shifted=True)


@tile
def _q4_1_group(e: Emitter, sums: Any, x: Any, stride: Any, codes: Any, scales: Any) -> Any:
    return _add_group(e, sums, x, stride, codes, scales, _Nibbles, minimum=True)


@tile
def _q8_0_group(e: Emitter, sums: Any, x: Any, stride: Any, codes: Any, scales: Any) -> Any:
    return _add_group(e, sums, x, stride, codes, scales, _Bytes, shifted=byte_excess(e.form) > 0)


def _add_group(
    e: Emitter,
    sums: Any,
    x: Any,
    stride: Any,
    codes: Any,
    scales: Any,
    kind: type[_Nibbles | _Bytes],
    *,
    shifted: bool = False,
    minimum: bool = False,
) -> Any:
    """Emit one group for every row of a tile; native vectors one after another, so that their sums fit
    registers. `shifted` codes are too large by what the activations' offset takes off.
    """
    halves = ir.VectorType(INT16, LANES)
    rows = [e.row(x, stride, m) for m in range(len(sums))]
    d = e.from_f16(e.load(scales, halves))
    least = e.from_f16(e.load(scales, halves, 2 * LANES)) if minimum else None
    width = LANES // e.form.pieces
    pieces: list[list[Any]] = [[] for _ in rows]
    for first in range(0, LANES, width):
        for m, dot in enumerate(_group_dots(e, rows, kind(e, codes, first, width), shifted=shifted)):
            scale = e.b.fmul(e.lanes(d, first, width), e.splat(e.load(rows[m], FLOAT, SCALE), width))
            acc = e.fma(e.b.sitofp(dot, scale.type), scale, e.lanes(sums[m], first, width))
            if least is not None:
                acc = e.fma(e.lanes(least, first, width), e.splat(e.load(rows[m], FLOAT, SUM), width), acc)
            pieces[m].append(acc)
    return [e.concat(p) for p in pieces]


def _group_dots(e: Emitter, rows: list[Any], weights: _Nibbles | _Bytes, *, shifted: bool) -> Iterator[Any]:
    """Each row's dot products with the codes of one group."""
    dot, b = weights.dot, e.b
    chains = [[dot.zero()] * max(1, CHAINS // len(rows)) for _ in rows]
    for i, quads in enumerate(weights.quads()):
        for row, chain in zip(rows, chains, strict=True):
            own = i % len(chain)
            chain[own] = dot.add(chain[own], quads, e.load(row, INT32, 4 * i))
    for row, chain in zip(rows, chains, strict=True):
        total = dot.total(functools.reduce(b.add, chain))
        total = dot.add_pair(total, weights.of_outliers(row), e.load(row, INT32, OUTLIERS))
        if shifted:
            total = b.add(total, e.splat(e.load(row, INT32, OFFSET), weights.width))
        yield total


class _Nibbles:
    """4-bit codes of a group, of outputs `first` to `first + width`."""

    signed, code_mask = False, 15

    def __init__(self, e: Emitter, codes: Any, first: int, width: int) -> None:
        self.e, self._codes, self._first, self.width = e, codes, first, width
        self.dot = ByteDot(e, width, signed=self.signed)

    def quads(self) -> Iterator[Any]:
        """Four codes of each output after the other."""
        lanes = 4 * self.width
        for v in range(4):
            stored = self.stored(INT64(64 * v))
            yield self.e.b.and_(stored, self.e.constant(INT8, 15, lanes))
            yield self.e.b.lshr(stored, self.e.constant(INT8, 4, lanes))

    def of_outliers(self, row: Any) -> Any:
        """Two of each output, as int16: those that a row's outliers are multiplied with."""
        e, b, kind = self.e, self.e.b, ir.VectorType(INT32, self.width)
        found = []
        for place, turn, half in zip(PLACES, TURNS, (0, 16), strict=True):
            vector = b.bitcast(self.stored(b.sext(e.load(row, INT32, place), INT64)), kind)
            turned = e.rotate(vector, e.load(row, INT32, turn))
            found.append(b.and_(turned, e.constant(INT32, self.code_mask << half, self.width)))
        return self.dot.widened(b.bitcast(b.or_(*found), ir.VectorType(INT16, 2 * self.width)))

    def stored(self, place: Any) -> Any:
        """The vector at a place, as it is."""
        kind = ir.VectorType(INT8, 4 * self.width)
        return self.e.load(self.e.b.add(self._codes, place), kind, 4 * self._first)


class _Bytes(_Nibbles):
    """The same of 8-bit codes."""

    signed, code_mask = True, 255

    def quads(self) -> Iterator[Any]:
        """Four codes of each output after the other."""
        for v in range(8):
            yield self.stored(INT64(64 * v))

    def stored(self, place: Any) -> Any:
        """The vector at a place, as its form multiplies it."""
        return self.dot.codes(super().stored(place))


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
