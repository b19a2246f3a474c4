"""Norms, rotary embedding, gating and the merge of two partial attentions: each row (and head) by itself.

Sums over a row keep 16 partial sums and add the halves at the end, so the order depends on the width alone.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from .forms import INT8, INT32, INT64, LANES, Emitter
from .launch import real
from .vector import (
    F32,
    add,
    compiled,
    div,
    exp,
    fma,
    load,
    load_part,
    maximum,
    mul,
    op,
    read,
    splat,
    store,
    store_part,
    sub,
    sum_lanes,
    words,
    write,
    zero,
)


@compiled
def _inverse_rms(x: int, width: int, eps: float) -> Any:
    """1 / sqrt(mean(x^2) + eps) of a row, in every lane."""
    whole = width - width % 16
    total = zero()
    for i in range(0, whole, 16):
        value = load(x + 4 * i)
        total = fma(value, value, total)
    if whole < width:
        value = load_part(x + 4 * whole, width - whole)
        total = fma(value, value, total)
    mean = sum_lanes(total) / np.float32(width)
    return splat(np.float32(1.0) / math.sqrt(mean + np.float32(eps)))


@compiled
def _norm_row(x: int, weight: int, out: int, width: int, eps: float) -> None:
    scale = _inverse_rms(x, width, eps)
    whole = width - width % 16
    for i in range(0, whole, 16):
        store(out + 4 * i, mul(mul(load(x + 4 * i), scale), load(weight + 4 * i)))
    if whole < width:
        left = width - whole
        value = mul(mul(load_part(x + 4 * whole, left), scale), load_part(weight + 4 * whole, left))
        store_part(out + 4 * whole, value, left)


def rms_norm(args: int, part: int, parts: int) -> None:
    """Args: x, its row stride, weight, out, rows, width; real: eps."""
    x, stride, weight, out, rows, width = words(args, 6)
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        _norm_row(x + row * stride, weight, out + row * width * 4, width, real(args))


def add_rms_norm(args: int, part: int, parts: int) -> None:
    """Args: residual (added to in place), its row stride, x, its row stride, weight, out, rows, width; real:
    eps.
    """
    residual, stride, x, x_stride, weight, out, rows, width = words(args, 8)
    whole = width - width % 16
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        target, source = residual + row * stride, x + row * x_stride
        for i in range(0, whole, 16):
            store(target + 4 * i, add(load(target + 4 * i), load(source + 4 * i)))
        if whole < width:
            left = width - whole
            value = add(load_part(target + 4 * whole, left), load_part(source + 4 * whole, left))
            store_part(target + 4 * whole, value, left)
        _norm_row(target, weight, out + row * width * 4, width, real(args))


@op(types.none, types.int64, types.int64)
def _write_u8(e: Emitter, address: Any, value: Any) -> None:
    e.store(address, e.b.trunc(value, INT8))


def finite_rows(args: int, part: int, parts: int) -> None:
    """Args: x, its row stride, rows, width, out (a byte a row)."""
    x, stride, rows, width, out = words(args, 5)
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        # 0 times a number is 0, unless it is infinite or not a number.
        first, second = zero(), zero()
        whole = width - width % 32
        for i in range(0, whole, 32):
            first = fma(load(x + row * stride + 4 * i), zero(), first)
            second = fma(load(x + row * stride + 4 * i + 64), zero(), second)
        for i in range(whole, width, 16):
            first = fma(load_part(x + row * stride + 4 * i, min(16, width - i)), zero(), first)
        _write_u8(out + row, 1 if sum_lanes(add(first, second)) == 0.0 else 0)


def norm_heads(args: int, part: int, parts: int) -> None:
    """Args: x (normed in place), its row stride, weight, rows, heads, head_dim; real: eps."""
    x, stride, weight, rows, heads, head_dim = words(args, 6)
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        for head in range(heads):
            own = x + row * stride + head * head_dim * 4
            _norm_row(own, weight, own, head_dim, real(args))


@compiled
def _silu_mul(gate: Any, up: Any) -> Any:
    return mul(div(gate, add(splat(np.float32(1.0)), exp(sub(zero(), gate)))), up)


def silu_mul(args: int, part: int, parts: int) -> None:
    """Args: gate and up side by side, their row stride, out, rows, width of out."""
    gate_up, stride, out, rows, width = words(args, 5)
    whole = width - width % 16
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        gate, target = gate_up + row * stride, out + row * width * 4
        up = gate + width * 4
        for i in range(0, whole, 16):
            store(target + 4 * i, _silu_mul(load(gate + 4 * i), load(up + 4 * i)))
        if whole < width:
            left, end = width - whole, 4 * whole
            store_part(target + end, _silu_mul(load_part(gate + end, left), load_part(up + end, left)), left)


@compiled
def _rotate(first: int, second: int, out_first: int, out_second: int, cos: int, sin: int, count: int) -> None:
    """16 pairs, or the `count` that are left."""
    if count >= 16:
        x, y, c, s = load(first), load(second), load(cos), load(sin)
        store(out_first, sub(mul(x, c), mul(y, s)))
        store(out_second, add(mul(y, c), mul(x, s)))
    else:
        x, y, c, s = (
            load_part(first, count),
            load_part(second, count),
            load_part(cos, count),
            load_part(sin, count),
        )
        store_part(out_first, sub(mul(x, c), mul(y, s)), count)
        store_part(out_second, add(mul(y, c), mul(x, s)), count)


def rope(args: int, part: int, parts: int) -> None:
    """Args: x, its row and head strides, cos, sin, their row stride, out, rows, heads, head_dim, rotary
    pairs.
    """
    x, row_stride, head_stride, cos, sin, table_stride, out, rows, heads, head_dim, pairs = words(args, 11)
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        row_cos, row_sin = cos + row * table_stride, sin + row * table_stride
        for head in range(heads):
            source = x + row * row_stride + head * head_stride
            target = out + (row * heads + head) * head_dim * 4
            for i in range(0, pairs, 16):
                at, beyond = 4 * i, 4 * (pairs + i)
                _rotate(
                    source + at,
                    source + beyond,
                    target + at,
                    target + beyond,
                    row_cos + at,
                    row_sin + at,
                    pairs - i,
                )
            for i in range(2 * pairs, head_dim):
                write(target + 4 * i, read(source + 4 * i))


def merge(args: int, part: int, parts: int) -> None:
    """Args: out_a, lse_a, out_b, lse_b, out, rows times heads, head_dim (all contiguous)."""
    out_a, lse_a, out_b, lse_b, out, rows, head_dim = words(args, 7)
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        a, b = splat(read(lse_a + 4 * row)), splat(read(lse_b + 4 * row))
        top = maximum(a, b)
        weight_a, weight_b = exp(sub(a, top)), exp(sub(b, top))
        total = add(weight_a, weight_b)
        weight_a, weight_b = div(weight_a, total), div(weight_b, total)
        for i in range(0, head_dim, 16):
            at, left = row * head_dim * 4 + 4 * i, min(16, head_dim - i)
            value = fma(load_part(out_b + at, left), weight_b, mul(load_part(out_a + at, left), weight_a))
            store_part(out + at, value, left)


def _butterfly(e: Emitter, x: Any, span: int) -> Any:
    """Sums and differences of lanes `span` apart, within runs of `2 * span` lanes."""
    across = ir.Constant(ir.VectorType(INT32, LANES), [lane ^ span for lane in range(LANES)])
    signs = ir.Constant(F32.llvm, [-1.0 if lane & span else 1.0 for lane in range(LANES)])
    other = e.b.shuffle_vector(x, ir.Constant(F32.llvm, ir.Undefined), across)
    return e.b.fadd(other, e.b.fmul(x, signs))


@op(F32, F32, types.int64)
def _hadamard(e: Emitter, x: Any, size: Any) -> Any:
    """The unnormalised Hadamard transform of runs of `size` lanes, a power of two; 16 at most."""
    for span in (1, 2, 4, 8):
        within = e.b.icmp_signed("<", INT64(span), size)
        x = e.b.select(within, _butterfly(e, x, span), x)
    return x


@compiled
def _rotate_head(source: int, target: int, head_dim: int, size: int, norm: Any) -> None:
    """Within vectors first, then between vectors; both as in `codes.rotate`."""
    for i in range(0, head_dim, 16):
        left = min(16, head_dim - i)
        store_part(target + 4 * i, _hadamard(load_part(source + 4 * i, left), size), left)
    span = 16
    while span < size:
        for run in range(0, head_dim, 2 * span):
            for i in range(run, run + span, 16):
                first, second = load(target + 4 * i), load(target + 4 * (i + span))
                store(target + 4 * i, add(first, second))
                store(target + 4 * (i + span), sub(first, second))
        span *= 2
    for i in range(0, head_dim, 16):
        left = min(16, head_dim - i)
        store_part(target + 4 * i, mul(load_part(target + 4 * i, left), norm), left)


def rotate(args: int, part: int, parts: int) -> None:
    """Args: x, its row and head strides, out, its own (it may be x), rows, heads, head_dim, the transform's
    size.
    """
    x, row_stride, head_stride, out, out_row, out_head, rows, heads, head_dim, size = words(args, 10)
    norm = splat(np.float32(1.0 / math.sqrt(size)))
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        for head in range(heads):
            source = x + row * row_stride + head * head_stride
            _rotate_head(source, out + row * out_row + head * out_head, head_dim, size, norm)
