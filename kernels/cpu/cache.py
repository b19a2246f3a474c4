"""Writing tokens to blocks, in any format, and moving them between formats.

A token of one KV head on its way is a *record*: its row of K, its row of V, then its pairs, side by side.
What a block's planes are is said in `kernels/layout.py`, what codes are in `kernels/codes.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import types

from .forms import Emitter
from .present import BF16, F16, F32_
from .vector import (
    ADDRESS,
    F32,
    add,
    compiled,
    copy_u8,
    copy_u16,
    copy_u32,
    div,
    fma,
    load,
    load_bf16,
    load_bytes,
    load_f16,
    load_high,
    load_low,
    max_lanes,
    maximum,
    min_lanes,
    minimum,
    mul,
    nearest_even,
    op,
    prefetch,
    read_f16,
    read_i32,
    read_i64,
    splat,
    stack,
    store,
    store_bytes,
    store_halves,
    sub,
    sum_lanes,
    words,
    write_f16,
    zero,
)


class Stored(NamedTuple):
    """How tokens of one KV head are stored."""

    head_dim: int
    kind: int  # element type where numbers are not quantised
    k_bits: int
    v_bits: int
    capacity: int
    v_offset: int
    pairs_offset: int


@compiled
def _row_bytes(stored: Stored, bits: int) -> int:
    if bits < 16:
        return stored.head_dim * bits // 8
    return stored.head_dim * (4 if stored.kind == F32_ else 2)


@compiled
def _copy(first: int, second: int, size: int, forward: bool) -> None:
    """Copy 1, 2 or 4 bytes from `first` to `second`, or back."""
    source, target = (first, second) if forward else (second, first)
    if size == 1:
        copy_u8(source, target)
    elif size == 2:
        copy_u16(source, target)
    else:
        copy_u32(source, target)


@compiled
def _key_bytes(stored: Stored) -> int:
    """Bytes of one number of K, or of two numbers of 4 bits."""
    return _row_bytes(stored, 16) // stored.head_dim if stored.k_bits == 16 else 1


@compiled
def _prefetch_token(stored: Stored, block: int, slot: int) -> None:
    """Ask for what a token is written to: each number of K lies in another line."""
    size, v_bytes = _key_bytes(stored), _row_bytes(stored, stored.v_bits)
    for i in range(_row_bytes(stored, stored.k_bits) // size):
        prefetch(block + (i * stored.capacity + slot) * size)
    for i in range(0, v_bytes, 64):
        prefetch(block + stored.v_offset + slot * v_bytes + i)


@compiled
def _copy_token(stored: Stored, block: int, slot: int, record: int, is_read: bool) -> None:
    """Copy a token between a head's part of a block and a record."""
    k_bytes, v_bytes = _row_bytes(stored, stored.k_bits), _row_bytes(stored, stored.v_bits)
    size = _key_bytes(stored)
    for i in range(k_bytes // size):
        _copy(block + (i * stored.capacity + slot) * size, record + i * size, size, is_read)
    values = block + stored.v_offset + slot * v_bytes
    for i in range(0, v_bytes, 4):
        _copy(values + i, record + k_bytes + i, 4, is_read)
    if stored.k_bits < 16:
        for i in range(4):
            at = block + stored.pairs_offset + 2 * (i * stored.capacity + slot)
            _copy(at, record + k_bytes + v_bytes + 2 * i, 2, is_read)


@compiled
def _expand(row: int, bits: int, stored: Stored, pair: int, out: int) -> None:
    """What a row of K or V stands for, as float32. The last vector may overlap the one before."""
    if bits == 16:
        for start in range(0, stored.head_dim, 16):
            i = min(start, stored.head_dim - 16)
            if stored.kind == BF16:
                store(out + 4 * i, load_bf16(row + 2 * i))
            elif stored.kind == F16:
                store(out + 4 * i, load_f16(row + 2 * i))
            else:
                store(out + 4 * i, load(row + 4 * i))
        return
    scale, least = splat(read_f16(pair)), splat(read_f16(pair + 2))
    if bits == 8:
        for start in range(0, stored.head_dim, 16):
            i = min(start, stored.head_dim - 16)
            store(out + 4 * i, add(mul(load_bytes(row + i), scale), least))
        return
    half = stored.head_dim // 2
    for start in range(0, half, 16):
        i = min(start, half - 16)
        store(out + 4 * i, add(mul(load_low(row + i), scale), least))
        store(out + 4 * (half + i), add(mul(load_high(row + i), scale), least))


@compiled
def _codes(x: Any, least: Any, scale: Any, levels: Any) -> Any:
    """The codes of 16 numbers; what is not a number becomes 0."""
    return nearest_even(minimum(maximum(div(sub(x, least), scale), zero()), levels))


@compiled
def _quantise(x: int, head_dim: int, bits: int, row: int, pair: int) -> None:
    """Write the codes and the pair of `head_dim` float32."""
    lows, highs, fault = load(x), load(x), zero()
    for start in range(0, head_dim, 16):
        value = load(x + 4 * min(start, head_dim - 16))
        lows, highs = minimum(value, lows), maximum(value, highs)
        fault = fma(value, zero(), fault)
    # Adding 0 turns -0 into 0. The fault is 0 for finite numbers, else not a number, and shows in the scale.
    low = min_lanes(lows) + np.float32(0.0)
    levels = np.float32(2**bits - 1)
    write_f16(pair, (max_lanes(highs) - low) / levels + sum_lanes(fault))
    write_f16(pair + 2, low)
    scale, least, most = splat(read_f16(pair)), splat(read_f16(pair + 2)), splat(levels)
    has_steps, half = read_f16(pair) > 0.0, head_dim // 2
    if bits == 8:
        for start in range(0, head_dim, 16):
            i = min(start, head_dim - 16)
            store_bytes(row + i, _codes(load(x + 4 * i), least, scale, most) if has_steps else zero())
        return
    for start in range(0, half, 16):
        i = min(start, half - 16)
        low_codes, high_codes = zero(), zero()
        if has_steps:
            low_codes = _codes(load(x + 4 * i), least, scale, most)
            high_codes = _codes(load(x + 4 * (half + i)), least, scale, most)
        store_halves(row + i, low_codes, high_codes)


@compiled
def _convert(source: int, old: Stored, target: int, new: Stored) -> None:
    """Turn a record of one format into one of a quantised format."""
    k_old, k_new = _row_bytes(old, old.k_bits), _row_bytes(new, new.k_bits)
    v_old, v_new = _row_bytes(old, old.v_bits), _row_bytes(new, new.v_bits)
    numbers = stack(1024)
    _expand(source, old.k_bits, old, source + k_old + v_old, numbers)
    _quantise(numbers, new.head_dim, new.k_bits, target, target + k_new + v_new)
    _expand(source + k_old, old.v_bits, old, source + k_old + v_old + 4, numbers)
    _quantise(numbers, new.head_dim, new.v_bits, target + k_new, target + k_new + v_new + 4)


@op(types.none, ADDRESS, F32)
def _store_bf16(e: Emitter, address: Any, value: Any) -> None:
    e.store(address, e.to_bf16(value))


@op(types.none, ADDRESS, F32)
def _store_f16(e: Emitter, address: Any, value: Any) -> None:
    e.store(address, e.to_f16(value))


@compiled
def _keep_row(row: int, kept: int, width: int, kind: int) -> None:
    """The last vector may overlap the one before: rounding twice changes nothing."""
    for start in range(0, width, 16):
        i = min(start, width - 16)
        if kind == BF16:
            _store_bf16(kept + 2 * i, load(row + 4 * i))
            store(row + 4 * i, load_bf16(kept + 2 * i))
        elif kind == F16:
            _store_f16(kept + 2 * i, load(row + 4 * i))
            store(row + 4 * i, load_f16(kept + 2 * i))
        else:
            store(kept + 4 * i, load(row + 4 * i))


def keep(args: int, part: int, parts: int) -> None:
    """Round rows to the cache's element type, in place and into a copy.

    Args: k, its row stride, v, its row stride, kept k, kept v, their row stride, rows, numbers in a row,
    element type.
    """
    k, k_bytes, v, v_bytes, kept_k, kept_v, kept_bytes, rows, width, kind = words(args, 10)
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        _keep_row(k + row * k_bytes, kept_k + row * kept_bytes, width, kind)
        _keep_row(v + row * v_bytes, kept_v + row * kept_bytes, width, kind)


def commit(args: int, part: int, parts: int) -> None:
    """Args: cache, its layer stride, block bytes, layers, rows, KV heads, head_dim, element type; k, v
    (`[layers, rows, KV heads, head_dim]`, a layer's rows contiguous) and their layer stride; bits of K and V,
    capacity, offsets of V and pairs, blocks and slots (int32).
    """
    cache, layer_bytes, block_bytes, layers, rows, kv_heads, head_dim, kind = words(args, 8)
    k, v, given_bytes, k_bits, v_bits, capacity, v_offset, pairs_offset, blocks, slots = words(args + 64, 10)
    stored = Stored(head_dim, kind, k_bits, v_bits, capacity, v_offset, pairs_offset)
    rounded = Stored(head_dim, kind, 16, 16, 0, 0, 0)
    given, record = stack(2048), stack(2048)
    row_bytes = _row_bytes(rounded, 16)
    for unit in range(layers * rows * part // parts, layers * rows * (part + 1) // parts):
        row = unit % rows
        block = cache + unit // rows * layer_bytes + read_i32(blocks + 4 * row) * block_bytes
        for g in range(kv_heads):
            _prefetch_token(stored, block + g * (block_bytes // kv_heads), read_i32(slots + 4 * row))
        for g in range(kv_heads):
            source = unit // rows * given_bytes + (row * kv_heads + g) * row_bytes
            for i in range(0, row_bytes, 4):
                copy_u32(k + source + i, given + i)
                copy_u32(v + source + i, given + row_bytes + i)
            if k_bits < 16:
                _convert(given, rounded, record, stored)
            head = block + g * (block_bytes // kv_heads)
            _copy_token(stored, head, read_i32(slots + 4 * row), record if k_bits < 16 else given, False)


def record_bytes(head_dim: int) -> int:
    """The most that a record takes: a token in float32."""
    return 8 * head_dim


_record_bytes = compiled(record_bytes)


def demote(args: int, part: int, parts: int) -> None:
    """A layer's KV head at a time: read and convert all tokens, then write them all.

    Args: cache, its layer stride, block bytes, layers, tokens, KV heads, head_dim, element type; then of the
    source and of the target: bits of K and V, capacity, offsets of V and pairs, blocks and slots (int32);
    scratch memory for the tokens' records, a piece per part.
    """
    cache, layer_bytes, block_bytes, layers, tokens, kv_heads, head_dim, kind = words(args, 8)
    k_bits, v_bits, capacity, v_offset, pairs_offset, old_blocks, old_slots = words(args + 64, 7)
    old = Stored(head_dim, kind, k_bits, v_bits, capacity, v_offset, pairs_offset)
    k_bits, v_bits, capacity, v_offset, pairs_offset, new_blocks, new_slots = words(args + 120, 7)
    new = Stored(head_dim, kind, k_bits, v_bits, capacity, v_offset, pairs_offset)
    is_moved = old.k_bits == new.k_bits and old.v_bits == new.v_bits
    size = _record_bytes(head_dim)
    records = read_i64(args + 176) + part * tokens * size
    taken = stack(2048)
    for unit in range(layers * kv_heads * part // parts, layers * kv_heads * (part + 1) // parts):
        base = cache + unit // kv_heads * layer_bytes + unit % kv_heads * (block_bytes // kv_heads)
        for i in range(tokens):
            head, record = base + read_i32(old_blocks + 4 * i) * block_bytes, records + i * size
            _copy_token(old, head, read_i32(old_slots + 4 * i), record if is_moved else taken, True)
            if not is_moved:
                _convert(taken, old, record, new)
        for i in range(tokens):
            head = base + read_i32(new_blocks + 4 * i) * block_bytes
            _copy_token(new, head, read_i32(new_slots + 4 * i), records + i * size, False)
