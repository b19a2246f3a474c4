"""What the attention kernels share: where tokens lie, codes as numbers, one tile of scores and values, and
the running softmax.

Names of shapes in kernels: M query vectors of a tile (rows times the query heads of a KV head), T tokens of
a tile, D head_dim padded to a power of two.

A `PART` describes the blocks of one format (`part_of`); an element's number in a quantised tile is its code
plus `bias`: a code becomes a number by two bit operations, while a processor converts few integers a cycle.
The token's scale and zero point are applied to scores and probabilities, once per token and query vector:

    q . k = scale * (q . (code + bias)) + (zero - bias * scale) * sum(q)

and likewise for V, where the product is taken with codes less their middle, so that rounding a probability
costs no more than it does in full precision. Codes of V are multiplied in bfloat16 also where queries are in
float16: a probability times a small scale would underflow it.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from ..base import Past
from ..layout import BlockLayout, CacheFormat

LOG2_E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2.0))

MIN_DOT = 16
"""Least size of a matrix product's inner dimension in 16 bits."""

Part = tuple[int, int, int, int, int]
"""k_bits, v_bits, capacity, and where V and the pairs begin in a head's part of a block, in bytes."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Window(Struct, frozen=True, kw_only=True):
    """A row at position p sees positions after `p - size`. `rows` int32 `[N]`: positions of a step's rows;
    `slots` int32 `[num_blocks, >= capacity]`: positions of what lies in the cache.
    """

    size: int
    rows: Tensor
    slots: Tensor


class Pool(Struct, frozen=True):
    """A layer's blocks, seen as numbers, bytes, integers of 2 and 4 bytes, and float16."""

    full: Tensor
    codes: Tensor
    shorts: Tensor
    words: Tensor
    halves: Tensor


def pool_of(layer: Tensor, layout: BlockLayout) -> Pool:
    """Views of a layer's uint8 blocks `[num_blocks, block_bytes]`."""
    assert layer.dtype == torch.uint8
    assert layer.is_contiguous()
    assert layer.shape[1] == layout.block_bytes
    assert layout.head_dim % 8 == 0, layout.head_dim
    views = (layer.view(d) for d in (layout.dtype, torch.uint8, torch.int16, torch.int32, torch.float16))
    return Pool(*views)


def part_of(layout: BlockLayout, own: CacheFormat) -> Part:
    """The constants of a format's blocks."""
    return (
        own.k_bits,
        own.v_bits,
        layout.capacity(own),
        layout.v_offset(own),
        0 if own.is_full else layout.pairs_offset(own),
    )


def past_args(pasts: list[Past], batch: int) -> dict[str, tuple[object, ...]]:
    """Block tables, lengths and widths (in blocks), checked."""
    for past in pasts:
        assert past.block_table.dtype == past.lengths.dtype == torch.int32
        assert past.block_table.is_contiguous()
        assert past.lengths.is_contiguous()
        assert past.block_table.shape[0] == len(past.lengths) == batch
    return {
        "tables": tuple(p.block_table for p in pasts),
        "lengths": tuple(p.lengths for p in pasts),
        "widths": tuple(p.block_table.shape[1] for p in pasts),
    }


def window_args(window: Window | None) -> dict[str, object]:
    """The window's arguments; all None without one."""
    if window is None:
        return {"row_positions": None, "slot_positions": None, "position_width": None, "window": None}
    assert window.rows.dtype == window.slots.dtype == torch.int32
    assert window.slots.is_contiguous()
    return {
        "row_positions": window.rows,
        "slot_positions": window.slots,
        "position_width": window.slots.shape[1],
        "window": window.size,
    }


def check_queries(q: Tensor, cu_rows: Tensor, num_kv_heads: int) -> int:
    """Assert what every attention op needs of its queries; returns query heads per KV head."""
    assert q.dtype in FLOATS
    assert q.stride(2) == 1
    assert q.shape[1] % num_kv_heads == 0
    assert cu_rows.dtype == torch.int32
    assert cu_rows.is_contiguous()
    return q.shape[1] // num_kv_heads


def launch_options(num_warps: int, num_stages: int, options: dict[str, dict[str, int]]) -> dict[str, int]:
    """What a kernel is launched with by this torch, of options as `AotCase` has them."""
    own = options.get("hip" if torch.version.hip else "cuda", {}) | options.get(_generation(), {})
    return {"num_warps": num_warps, "num_stages": num_stages} | own


def in_base_2(scale: float) -> float:
    """What scores are scaled by where `exp2` takes the place of `exp`."""
    return scale * math.log2(math.e)


@triton.constexpr_function
def padded(size: int) -> int:
    """A dimension of a matrix product: a power of two, at least `MIN_DOT`."""
    return max(MIN_DOT, triton.next_power_of_2(size))


@triton.jit
def sequence_of(starts, index, count, ROWS_PER_TILE: tl.constexpr):
    """The last sequence b of `count` whose first tile, `starts[b] // ROWS_PER_TILE + b`, is not after
    `index`.

    Tiles of ROWS_PER_TILE rows are numbered so that a sequence's do not overlap the next one's, without the
    host knowing any length; ROWS_PER_TILE 0 takes `starts` as they are.
    """
    low, high = 0, count - 1
    while low < high:
        middle = (low + high + 1) // 2
        first = tl.load(starts + middle)
        if ROWS_PER_TILE > 0:
            first = first // ROWS_PER_TILE + middle
        if first <= index:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def bias(BITS: tl.constexpr, dtype: tl.constexpr):
    """What `number` adds to a code."""
    if dtype == tl.float32:
        return 0.0
    elif BITS == 4:
        return 16.0
    elif dtype == tl.float16:
        return 256.0
    else:
        return -128.0


@triton.jit
def number(code, BITS: tl.constexpr, dtype: tl.constexpr):
    """Codes (integers) as numbers, plus `bias`: bits of the mantissa under a fixed exponent, so exact."""
    if dtype == tl.float32:
        return code.to(tl.float32)
    elif dtype == tl.float16 and BITS == 4:
        return ((code << 6) | 0x4C00).to(tl.uint16).to(tl.float16, bitcast=True)
    elif dtype == tl.float16:
        return ((code << 2) | 0x5C00).to(tl.uint16).to(tl.float16, bitcast=True)
    elif BITS == 4:
        return ((code << 3) | 0x4180).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        # 7 bits of mantissa do not hold 8: 2^23 + code in float32, less 2^23 + 128, is exact in bfloat16.
        wide = (code | 0x4B000000).to(tl.float32, bitcast=True)
        return (wide - 8388736.0).to(tl.bfloat16)


@triton.jit
def two_numbers(word, SHIFT: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """`number` of the codes that begin at bits SHIFT and SHIFT + 16 of words: both in one go, if they fit."""
    MASK: tl.constexpr = 2**BITS - 1
    if dtype == tl.float32 or (dtype == tl.bfloat16 and BITS == 8):
        lower, upper = (word >> SHIFT) & MASK, (word >> (SHIFT + 16)) & MASK
        return number(lower, BITS, dtype), number(upper, BITS, dtype)
    else:
        codes = (word >> SHIFT) & (MASK << 16 | MASK)
        if dtype == tl.bfloat16:
            both = (codes << 3) | 0x41804180
        elif BITS == 4:
            both = (codes << 6) | 0x4C004C00
        else:
            both = (codes << 2) | 0x5C005C00
        lower, upper = (both & 0xFFFF).to(tl.uint16), ((both >> 16) & 0xFFFF).to(tl.uint16)
        return lower.to(dtype, bitcast=True), upper.to(dtype, bitcast=True)


@triton.jit
def locate(table, tokens, end, head, PART: tl.constexpr, BLOCK_BYTES: tl.constexpr, HEAD_BYTES: tl.constexpr):
    """Of tokens `[T]` in order of a block table: block, slot, and where the head's part begins in bytes."""
    live = tokens < end
    block = tl.load(table + tokens // PART[2], mask=live, other=0)
    return block, tokens % PART[2], block.to(tl.int64) * BLOCK_BYTES + head * HEAD_BYTES


@triton.jit
def keys(
    full, codes, base, tokens, end, dims, PART: tl.constexpr, HEAD_DIM: tl.constexpr, dtype: tl.constexpr
):
    """K of a tile `[D, T]` in `dtype`, plus its bias."""
    inside = (dims < HEAD_DIM)[:, None]
    slots = tokens % PART[2]
    if PART[0] == 16:
        ITEM: tl.constexpr = full.dtype.element_ty.primitive_bitwidth // 8
        at = (base // ITEM + slots)[None, :] + dims[:, None] * 16  # [D, T]
        # A tile begins with a block, whose tokens lie side by side. A mask that differs among them would make
        # loads of one element each, so a block's dead tokens are loaded with the rest.
        at = tl.max_contiguous(tl.multiple_of(at, (1, 16)), (1, 16))
        held = tokens // 16 < (end + 15) // 16
        return tl.load(full + at, mask=inside & held[None, :], other=0.0).to(dtype)
    else:
        ROWS: tl.constexpr = HEAD_DIM * PART[0] // 8
        at = (base + slots)[None, :] + (dims % ROWS)[:, None] * PART[2]
        code = tl.load(codes + at, mask=inside & (tokens < end)[None, :], other=0).to(tl.int32)
        if PART[0] == 4:
            code = (code >> (dims // ROWS * 4)[:, None]) & 15
        return number(code, PART[0], dtype)


@triton.jit
def values(
    full, codes, base, slots, live, dims, PART: tl.constexpr, HEAD_DIM: tl.constexpr, dtype: tl.constexpr
):
    """V of a tile `[T, D]` in `dtype`, plus its bias; 0 where no token is."""
    mask = live[:, None] & (dims < HEAD_DIM)[None, :]
    if PART[1] == 16:
        ITEM: tl.constexpr = full.dtype.element_ty.primitive_bitwidth // 8
        at = (base // ITEM + PART[3] // ITEM + slots * HEAD_DIM)[:, None] + dims[None, :]  # [T, D]
        return tl.load(full + at, mask=mask, other=0.0).to(dtype)
    else:
        ROW: tl.constexpr = HEAD_DIM * PART[1] // 8
        at = (base + PART[3] + slots * ROW)[:, None] + (dims % ROW)[None, :]
        code = tl.load(codes + at, mask=mask, other=0).to(tl.int32)
        if PART[1] == 4:
            code = (code >> (dims // ROW * 4)[None, :]) & 15
        return number(code, PART[1], dtype)


@triton.jit
def pair(halves, base, slots, live, ROW: tl.constexpr, PART: tl.constexpr):
    """One of a token's four numbers beside its codes, `[T]`; 0 where no token is."""
    at = base // 2 + PART[4] // 2 + ROW * PART[2] + slots
    return tl.load(halves + at, mask=live, other=0.0).to(tl.float32)


@triton.jit
def past_scores(
    q, q_sum, full, codes, halves, base, tokens, end, dims, PART: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Scores `[M, T]` of queries `[M, D]`, not yet scaled; anything where no token is."""
    k = keys(full, codes, base, tokens, end, dims, PART, HEAD_DIM, q.dtype)
    scores = tl.dot(q, k, input_precision="ieee")
    if PART[0] != 16:
        slots, live = tokens % PART[2], tokens < end
        scale = pair(halves, base, slots, live, 0, PART)
        zero = pair(halves, base, slots, live, 1, PART) - bias(PART[0], q.dtype) * scale
        scores = scores * scale[None, :] + q_sum[:, None] * zero[None, :]
    return scores


@triton.jit
def advance(top, scores):
    """The running maximum after a tile of scores `[M, T]` in base 2, and what earlier sums shrink by."""
    new = tl.maximum(top, tl.max(scores, 1))
    # Where nothing has been seen yet the maximum is -inf, and -inf - -inf is not a number.
    finite = tl.where(new == float("-inf"), 0.0, new)
    return new, finite, tl.exp2(top - finite)


def _generation() -> str:
    """The target of `aot.TARGETS` that stands for an NVIDIA GPU's generation; "" for others."""
    if torch.version.hip or not torch.cuda.is_available():
        return ""
    return f"sm_{torch.cuda.get_device_capability()[0]}0"
