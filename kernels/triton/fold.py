"""The second half of `splits.py`: the outputs of a row's splits, folded in order, and its attention over the
step's own rows, as few as they are.

Bytes: what `splits.py` wrote, read once, and the sequence's rows of K and V for each query head; both stay
in the second-level cache. Operations: 2 * head_dim per split, 4 * head_dim per row seen. It runs per row and
query head, in float32, without matrix products, and with room for `FEW_ROWS` rows whatever the batch is: sums
are ordered by it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .splits import count_of_splits, first_part, places_of_splits
from .tiles import LN2, advance

FOLD_SPLITS = 16
"""Splits folded at a time."""

FOLD_WARPS = 4
"""16 splits of 128 numbers are 16 loads in flight for each of 128 threads."""


@triton.jit(do_not_specialize=["num_splits", "part_stride", "grid_rows"])
def fold_splits(
    q,
    k,
    v,
    cu_rows,
    lengths,
    widths,
    row_positions,
    window,
    parts_out,
    parts_lse,
    out,
    lse,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    num_splits,
    part_stride,
    grid_rows,
    scale,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    D: tl.constexpr,
    FOLD: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Grid: sequences times `grid_rows`, query heads. `out` `[N, H, head_dim]` and `lse` `[N, H]` (None: not
    wanted) are contiguous.
    """
    b = tl.program_id(0) // grid_rows
    row = tl.program_id(0) % grid_rows
    query_head = tl.program_id(1)
    start = tl.load(cu_rows + b)
    count = tl.load(cu_rows + b + 1) - start
    if count > MAX_ROWS or row >= count:
        return
    dims = tl.arange(0, D)
    inside = dims < HEAD_DIM
    place = (start + row).to(tl.int64) * NUM_HEADS + query_head
    part = first_part(b, start, row, part_stride).to(tl.int64) * NUM_HEADS + query_head
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    sums = tl.zeros((1, D), tl.float32)

    first_split = 0
    for i in tl.static_range(len(PARTS)):
        held = count_of_splits(tl.load(lengths[i] + b), tl.constexpr(PARTS[i]), SPLIT, MAX_SPLITS)
        for first in range(0, held, FOLD):
            split = first + tl.arange(0, FOLD)
            at = part * num_splits + first_split + split  # [FOLD]
            own_lse = tl.load(parts_lse + at, mask=split < held, other=float("-inf"))
            own_out = tl.load(
                parts_out + at[:, None] * HEAD_DIM + dims[None, :],
                mask=(split < held)[:, None] & inside[None, :],
                other=0.0,
            )
            top, finite, fade = advance(top, own_lse[None, :])
            weights = tl.exp2(own_lse - finite)
            total = total * fade + tl.sum(weights, 0)
            sums = sums * fade[:, None] + tl.sum(own_out * weights[:, None], 0)[None, :]
        first_split += places_of_splits(widths[i], SPLIT, MAX_SPLITS)

    if k is not None:
        own_q = tl.load(
            q + (start + row).to(tl.int64) * q_row_stride + query_head * q_head_stride + dims,
            mask=inside,
            other=0.0,
        ).to(tl.float32)
        key = tl.arange(0, MAX_ROWS)
        seen = key <= row
        if window is not None:
            position = tl.load(row_positions + start + key, mask=seen, other=0)
            seen = seen & (position > tl.load(row_positions + start + row) - window)
        at = (start + key).to(tl.int64)[:, None]
        mask = seen[:, None] & inside[None, :]
        head = query_head // GROUP
        keys = tl.load(k + at * k_row_stride + head * k_head_stride + dims[None, :], mask=mask, other=0.0)
        rows_v = tl.load(v + at * v_row_stride + head * v_head_stride + dims[None, :], mask=mask, other=0.0)
        scores = tl.sum(keys.to(tl.float32) * own_q[None, :], 1) * scale  # [MAX_ROWS]
        scores = tl.where(seen, scores, float("-inf"))
        top, finite, fade = advance(top, scores[None, :])
        weights = tl.exp2(scores - finite)
        total = total * fade + tl.sum(weights, 0)
        sums = sums * fade[:, None] + tl.sum(rows_v.to(tl.float32) * weights[:, None], 0)[None, :]

    whole = tl.where(total == 0.0, 1.0, total)
    result = (sums / whole[:, None]).to(out.dtype.element_ty)
    tl.store(out + place * HEAD_DIM + dims[None, :], result, mask=inside[None, :])
    if lse is not None:
        natural = tl.where(total == 0.0, float("-inf"), (top + tl.log2(whole)) * LN2)
        tl.store(lse + place + tl.zeros((1,), tl.int32), natural)
