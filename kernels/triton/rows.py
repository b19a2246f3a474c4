"""Attention of many rows of a sequence, a prompt's chunk: over the past block by block, then causally over
the step's own rows, in one running softmax (FlashAttention, arXiv 2205.14135).

A tile has `BLOCK_M` query vectors: rows times the query heads of a KV head, so that keys are read once for
all of those. Bytes: each tile reads every token of the past and of the rows up to it once, `2 * head_dim`
numbers per KV head, most of them from the second-level cache, as its neighbours do the same; the minimum is
once for all tiles. Operations: `4 * head_dim` per query vector and token seen, and those of the last tile of
keys' masked half: at 2048 rows and 32 rows a tile some 3 % more than needed. Codes are unpacked element by
element: products dominate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import LN2, advance, bias, locate, pair, past_scores, sequence_of, values

BLOCK_M = {16: 128, 32: 32}
"""Query vectors of a tile, by the bits of their numbers: in 16, two matrix instructions' rows for 8 warps on
Hopper. In 32, for which there are no matrix instructions, 128 would spill 12 KB a thread, 64 nearly 6.
"""

TILE_KEYS = {16: 64, 32: 32}
"""Tokens of a tile: K and V take 32 KiB at head_dim 128."""

ROWS_WARPS = 8
"""16 query vectors a warp, or 64 for each of two warp groups on Hopper."""

ROWS_STAGES = {16: 3, 32: 1}
"""Two tiles in flight, and one being worked on; in 32 bits there are no registers for that."""

ROWS_OPTIONS: dict[int, dict[str, dict[str, int]]] = {16: {"hip": {"num_stages": 2}}, 32: {}}
"""3 stages do not fit the 64 KiB of gfx942."""


@triton.jit(do_not_specialize=["num_sequences"])
def attend_rows(
    q,
    k,
    v,
    cu_rows,
    full,
    codes,
    halves,
    tables,
    lengths,
    widths,
    row_positions,
    slot_positions,
    position_width,
    window,
    out,
    lse,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    num_sequences,
    scale,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    MIN_ROWS: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
):
    """Grid: row tiles of the whole step, KV heads. Sequences of `MIN_ROWS` rows or fewer are left alone."""
    ROWS: tl.constexpr = M // GROUP
    # Late tiles see the most keys; they begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    b = sequence_of(cu_rows, tile, num_sequences, ROWS)
    start = tl.load(cu_rows + b)
    count = tl.load(cu_rows + b + 1) - start
    first_row = (tile - start // ROWS - b) * ROWS
    if count <= MIN_ROWS or first_row >= count:
        return
    vector = tl.arange(0, M)
    row = first_row + vector // GROUP
    here = (row < count) & (vector < ROWS * GROUP)
    query_head = head * GROUP + vector % GROUP
    dims = tl.arange(0, D)
    inside = here[:, None] & (dims < HEAD_DIM)[None, :]
    from_q = q + (start + row).to(tl.int64) * q_row_stride + query_head * q_head_stride
    own_q = tl.load(from_q[:, None] + dims[None, :], mask=inside, other=0.0)  # [M, D]
    own_positions = row
    if window is not None:
        own_positions = tl.load(row_positions + start + row, mask=here, other=0)
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    sums = tl.zeros((M, D), tl.float32)

    for i in tl.static_range(len(PARTS)):
        sums, top, total = _attend_past(
            own_q,
            full,
            codes,
            halves,
            tables[i] + tl.cast(b, tl.int64) * widths[i],
            tl.load(lengths[i] + b),
            head,
            own_positions,
            slot_positions,
            position_width,
            window,
            scale,
            sums,
            top,
            total,
            tl.constexpr(PARTS[i]),
            HEAD_DIM,
            BLOCK_BYTES,
            HEAD_BYTES,
            T,
        )

    if k is not None:
        last_row = tl.minimum(first_row + ROWS, count)
        from_k = k + start.to(tl.int64) * k_row_stride + head * k_head_stride
        from_v = v + start.to(tl.int64) * v_row_stride + head * v_head_stride
        # Keys that every row of the tile sees, then those that some see.
        whole = first_row // T * T
        for masked in tl.static_range(2):
            for first in range(whole * masked, whole + (last_row - whole) * masked, T):
                sums, top, total = _attend_present(
                    own_q,
                    from_k,
                    from_v,
                    row_positions,
                    start,
                    own_positions,
                    window,
                    row,
                    first,
                    last_row,
                    k_row_stride,
                    v_row_stride,
                    scale,
                    sums,
                    top,
                    total,
                    HEAD_DIM,
                    T,
                    masked == 1,
                )

    divisor = tl.where(total == 0.0, 1.0, total)
    place = (start + row).to(tl.int64) * NUM_HEADS + query_head
    result = (sums / divisor[:, None]).to(out.dtype.element_ty)
    tl.store(out + place[:, None] * HEAD_DIM + dims[None, :], result, mask=inside)
    if lse is not None:
        natural = tl.where(total == 0.0, float("-inf"), (top + tl.log2(divisor)) * LN2)
        tl.store(lse + place, natural, mask=here)


@triton.jit
def _attend_past(
    q,
    full,
    codes,
    halves,
    table,
    length,
    head,
    own_positions,
    slot_positions,
    position_width,
    window,
    scale,
    sums,
    top,
    total,
    PART: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    T: tl.constexpr,
):
    """All tokens of one format."""
    value_dtype: tl.constexpr = tl.bfloat16 if PART[1] != 16 and q.dtype == tl.float16 else q.dtype
    CENTRE: tl.constexpr = 2 ** (PART[1] - 1)
    dims = tl.arange(0, q.shape[1])
    q_sum = tl.sum(q.to(tl.float32), 1)
    shift = tl.zeros((q.shape[0],), tl.float32)
    for first in range(0, length, T):
        tokens = tl.multiple_of(first, T) + tl.arange(0, T)
        live = tokens < length
        block, slots, base = locate(table, tokens, length, head, PART, BLOCK_BYTES, HEAD_BYTES)
        scores = past_scores(q, q_sum, full, codes, halves, base, tokens, length, dims, PART, HEAD_DIM)
        seen = live[None, :]
        if window is not None:
            position = tl.load(
                slot_positions + block.to(tl.int64) * position_width + slots, mask=live, other=0
            )
            seen = seen & (position[None, :] > own_positions[:, None] - window)
        scores = tl.where(seen, scores * scale, float("-inf"))
        top, finite, fade = advance(top, scores)
        shares = tl.exp2(scores - finite[:, None])
        total = total * fade + tl.sum(shares, 1)
        if PART[1] == 16:
            scaled = shares.to(value_dtype)
        else:
            steps = pair(halves, base, slots, live, 2, PART)
            middle = pair(halves, base, slots, live, 3, PART) + CENTRE * steps
            scaled = (shares * steps[None, :]).to(value_dtype)
            excess = (CENTRE + bias(PART[1], value_dtype)) * scaled.to(tl.float32)
            shift = shift * fade + tl.sum(shares * middle[None, :] - excess, 1)
        v = values(full, codes, base, slots, live, dims, PART, HEAD_DIM, value_dtype)
        sums = tl.dot(scaled, v, sums * fade[:, None], input_precision="ieee")
    return sums + shift[:, None], top, total


@triton.jit
def _attend_present(
    q,
    from_k,
    from_v,
    row_positions,
    start,
    own_positions,
    window,
    row,
    first,
    last_row,
    k_row_stride,
    v_row_stride,
    scale,
    sums,
    top,
    total,
    HEAD_DIM: tl.constexpr,
    T: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One tile of a sequence's own rows `first` to `first + T`; not `MASKED`: all are before every row."""
    dims = tl.arange(0, q.shape[1])
    key = first + tl.arange(0, T)
    inside = dims < HEAD_DIM
    at = key.to(tl.int64)
    k_mask, v_mask = inside[:, None], inside[None, :]
    if MASKED:
        k_mask, v_mask = k_mask & (key < last_row)[None, :], v_mask & (key < last_row)[:, None]
    keys = tl.load(from_k + at[None, :] * k_row_stride + dims[:, None], mask=k_mask, other=0.0)
    scores = tl.dot(q, keys.to(q.dtype), input_precision="ieee") * scale  # [M, T]
    if MASKED:
        scores = tl.where(key[None, :] <= row[:, None], scores, float("-inf"))
    if window is not None:
        position = tl.load(row_positions + start + key, mask=key < last_row, other=0)
        near = position[None, :] > own_positions[:, None] - window
        scores = tl.where(near, scores, float("-inf"))
    top, finite, fade = advance(top, scores)
    shares = tl.exp2(scores - finite[:, None])
    rows_v = tl.load(from_v + at[:, None] * v_row_stride + dims[None, :], mask=v_mask, other=0.0)
    sums = tl.dot(shares.to(q.dtype), rows_v.to(q.dtype), sums * fade[:, None], input_precision="ieee")
    return sums, top, total * fade + tl.sum(shares, 1)
