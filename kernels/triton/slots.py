"""Reading and writing tokens of blocks, for `commit` and `demote`. See `../layout.py` for a block's bytes and
`../codes.py` for what codes mean.

A tile is some tokens of one KV head in one layer. Their K or V is held as two halves `[TOKENS, BLOCK_HALF]`,
dimensions 0 to `head_dim / 2` and the rest: so 4-bit codes, which pair dimensions of both halves in a byte,
are packed and unpacked without moving numbers between threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import BlockLayout, CacheFormat

TOKENS = tl.constexpr(16)
"""Tokens of a tile: a block of full precision. At head_dim 128 that is 8 numbers of each half a thread."""

NUM_WARPS = 4

ROUND = tl.constexpr(1.5 * 2.0**23)
"""Adding and taking away this rounds a float32 of less than 2^22 to the nearest integer, halves to even."""

ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""What torch's dtypes are called in kernels."""

RAW = {4: tl.int32, 2: tl.int16}
"""Integers of an element's bytes, in which numbers are moved as they are."""


class Side(NamedTuple):
    """Where a format keeps K or V in a head's part of a block. Kernels take it as a plain tuple.

    `plane` and `pairs` are offsets in bytes (pairs: the scale's; the zero point is `capacity` float16 on),
    strides are in elements or, for codes, in bytes.
    """

    bits: int
    plane: int
    slot_stride: int
    dim_stride: int
    pairs: int
    capacity: int


def sides(layout: BlockLayout, cache_format: CacheFormat) -> tuple[Side, Side]:
    """K's and V's."""
    capacity, pairs = layout.capacity(cache_format), layout.pairs_offset(cache_format)
    v_row = layout.head_dim // 2 if cache_format.v_bits == 4 else layout.head_dim
    return (
        Side(cache_format.k_bits, 0, 1, capacity, pairs, capacity),
        Side(cache_format.v_bits, layout.v_offset(cache_format), v_row, 1, pairs + 4 * capacity, capacity),
    )


def tile_constants(layout: BlockLayout) -> dict[str, Any]:
    """What every kernel over tokens takes."""
    half = layout.head_dim // 2
    return {"HEAD_BYTES": layout.head_bytes, "HALF": half, "BLOCK_HALF": triton.next_power_of_2(half)}


def assert_cache(cache: Tensor, layout: BlockLayout) -> None:
    """`cache` is uint8 `[L, num_blocks, block_bytes]`, blocks contiguous and aligned for their elements."""
    assert cache.dtype == torch.uint8
    assert cache.dim() == 3
    assert cache.shape[2] == layout.block_bytes
    assert cache.stride(2) == 1
    assert cache.stride(0) % 16 == cache.stride(1) % 16 == 0
    assert layout.head_dim % 2 == 0
    assert layout.head_bytes % 4 == 0


def assert_slots(blocks: Tensor, slots: Tensor) -> None:
    """`blocks` and `slots` are `[R]` int32 or int64."""
    assert blocks.dim() == 1
    assert blocks.shape == slots.shape
    assert blocks.is_contiguous()
    assert slots.is_contiguous()
    assert {blocks.dtype, slots.dtype} <= {torch.int32, torch.int64}


@triton.jit
def tokens_at(rows, heads_part, blocks, slots, block_stride):
    """Where the head's part of each token's block begins `[TOKENS]`, its slot, and whether there is one:
    token r lies at (blocks[r], slots[r]).
    """
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = row < rows
    block = tl.load(blocks + row, mask=inside, other=0).to(tl.int64)
    slot = tl.load(slots + row, mask=inside, other=0)
    return heads_part + block * block_stride, slot, inside


@triton.jit
def plane_at(part, slot, SIDE: tl.constexpr, ELEMENT: tl.constexpr):
    """Where tokens' K or V begins `[TOKENS]`, in units of ELEMENT or, for codes, of bytes."""
    BITS: tl.constexpr = SIDE[0]
    PLANE: tl.constexpr = SIDE[1]
    SLOT_STRIDE: tl.constexpr = SIDE[2]
    at = part + PLANE
    if BITS == 16:
        at = at.to(tl.pointer_type(ELEMENT))
    return at + slot * SLOT_STRIDE


@triton.jit
def get_tile(
    at, inside, FIRST: tl.constexpr, STRIDE: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr
):
    """HALF dimensions from FIRST on, STRIDE units apart, of tokens at `at`: `[TOKENS, BLOCK_HALF]`."""
    column = tl.arange(0, BLOCK_HALF)
    if STRIDE == 1:
        mask = inside[:, None] & (column < HALF)[None, :]
        return tl.load(at[:, None] + (FIRST + column)[None, :], mask=mask, other=0)
    # Tokens that follow one another lie side by side: neighbouring threads read them together.
    mask = (column < HALF)[:, None] & inside[None, :]
    return tl.trans(tl.load(at[None, :] + ((FIRST + column) * STRIDE)[:, None], mask=mask, other=0))


@triton.jit
def put_tile(
    at, tile, inside, FIRST: tl.constexpr, STRIDE: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr
):
    """Write what `get_tile` reads."""
    column = tl.arange(0, BLOCK_HALF)
    if STRIDE == 1:
        mask = inside[:, None] & (column < HALF)[None, :]
        tl.store(at[:, None] + (FIRST + column)[None, :], tile, mask=mask)
    else:
        mask = (column < HALF)[:, None] & inside[None, :]
        tl.store(at[None, :] + ((FIRST + column) * STRIDE)[:, None], tl.trans(tile), mask=mask)


@triton.jit
def pairs_at(part, slot, SIDE: tl.constexpr, ELEMENT: tl.constexpr):
    """Where tokens' scale lies `[TOKENS]`, in units of ELEMENT (of 2 bytes)."""
    PAIRS: tl.constexpr = SIDE[4]
    return (part + PAIRS).to(tl.pointer_type(ELEMENT)) + slot


@triton.jit
def quantise(first, second, BITS: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Codes of both halves (uint8), scale and zero point `[TOKENS]` (float16), of float32 numbers: the
    operations of `codes.quantise` in their order, with exact divisions, so the same bits.
    """
    real = (tl.arange(0, BLOCK_HALF) < HALF)[None, :]
    first, second = tl.where(first == 0.0, 0.0, first), tl.where(second == 0.0, 0.0, second)
    low = tl.min(tl.where(real, tl.minimum(first, second), float("inf")), 1)
    high = tl.max(tl.where(real, tl.maximum(first, second), float("-inf")), 1)
    # Minima and maxima pass over what is no number.
    faulty = tl.max((real & ((first != first) | (second != second))).to(tl.int32), 1) > 0
    low, high = tl.where(faulty, float("nan"), low), tl.where(faulty, float("nan"), high)
    levels: tl.constexpr = 2.0**BITS - 1.0
    scale, zero = tl.div_rn(high - low, levels).to(tl.float16), low.to(tl.float16)
    return _codes(first, scale, zero, levels), _codes(second, scale, zero, levels), scale, zero


@triton.jit
def _codes(x, scale, zero, LEVELS: tl.constexpr):
    steps = tl.div_rn(x - zero.to(tl.float32)[:, None], scale.to(tl.float32)[:, None])
    steps = tl.where(steps == steps, steps, 0.0)
    rounded = tl.minimum(tl.maximum(steps, 0.0), LEVELS) + ROUND - ROUND
    return tl.where((scale > 0.0)[:, None], rounded, 0.0).to(tl.int32).to(tl.uint8)


@triton.jit
def write(
    part,
    slot,
    first,
    second,
    inside,
    SIDE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    """Store tokens' K or V, given as float32 halves that ELEMENT holds exactly or codes will be taken of."""
    BITS: tl.constexpr = SIDE[0]
    DIM_STRIDE: tl.constexpr = SIDE[3]
    CAPACITY: tl.constexpr = SIDE[5]
    at = plane_at(part, slot, SIDE, ELEMENT)
    if BITS == 16:
        put_tile(at, first.to(ELEMENT), inside, 0, DIM_STRIDE, HALF, BLOCK_HALF)
        put_tile(at, second.to(ELEMENT), inside, HALF, DIM_STRIDE, HALF, BLOCK_HALF)
    else:
        low, high, scale, zero = quantise(first, second, BITS, HALF, BLOCK_HALF)
        if BITS == 8:
            put_tile(at, low, inside, 0, DIM_STRIDE, HALF, BLOCK_HALF)
            put_tile(at, high, inside, HALF, DIM_STRIDE, HALF, BLOCK_HALF)
        else:
            put_tile(at, low | (high << 4), inside, 0, DIM_STRIDE, HALF, BLOCK_HALF)
        pairs = pairs_at(part, slot, SIDE, tl.float16)
        tl.store(pairs, scale, mask=inside)
        tl.store(pairs + CAPACITY, zero, mask=inside)


@triton.jit
def read(
    part,
    slot,
    inside,
    SIDE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    """Float32 halves of tokens' K or V: what is stored, or what it stands for."""
    BITS: tl.constexpr = SIDE[0]
    DIM_STRIDE: tl.constexpr = SIDE[3]
    CAPACITY: tl.constexpr = SIDE[5]
    at = plane_at(part, slot, SIDE, ELEMENT)
    first = get_tile(at, inside, 0, DIM_STRIDE, HALF, BLOCK_HALF)
    if BITS == 4:
        low, high = (first & 15).to(tl.float32), (first >> 4).to(tl.float32)
    else:
        second = get_tile(at, inside, HALF, DIM_STRIDE, HALF, BLOCK_HALF)
        low, high = first.to(tl.float32), second.to(tl.float32)
    if BITS != 16:
        pairs = pairs_at(part, slot, SIDE, tl.float16)
        scale = tl.load(pairs, mask=inside, other=0.0).to(tl.float32)[:, None]
        zero = tl.load(pairs + CAPACITY, mask=inside, other=0.0).to(tl.float32)[:, None]
        # 8 bits times 11 are exact in float32: fused or not, these are the reference's numbers.
        low, high = low * scale + zero, high * scale + zero
    return low, high


@triton.jit
def move(
    source,
    source_slot,
    target,
    target_slot,
    inside,
    SIDE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    RAW: tl.constexpr,
):
    """Copy tokens' K or V as it is between blocks of one format."""
    BITS: tl.constexpr = SIDE[0]
    DIM_STRIDE: tl.constexpr = SIDE[3]
    CAPACITY: tl.constexpr = SIDE[5]
    origin, at = plane_at(source, source_slot, SIDE, RAW), plane_at(target, target_slot, SIDE, RAW)
    first = get_tile(origin, inside, 0, DIM_STRIDE, HALF, BLOCK_HALF)
    put_tile(at, first, inside, 0, DIM_STRIDE, HALF, BLOCK_HALF)
    if BITS != 4:
        second = get_tile(origin, inside, HALF, DIM_STRIDE, HALF, BLOCK_HALF)
        put_tile(at, second, inside, HALF, DIM_STRIDE, HALF, BLOCK_HALF)
    if BITS != 16:
        origin = pairs_at(source, source_slot, SIDE, tl.int16)
        at = pairs_at(target, target_slot, SIDE, tl.int16)
        tl.store(at, tl.load(origin, mask=inside, other=0), mask=inside)
        tl.store(at + CAPACITY, tl.load(origin + CAPACITY, mask=inside, other=0), mask=inside)
