"""Attention of few rows over the past, split over fixed numbers of blocks: what decoding and verification
run.

Each split of `SPLIT_BLOCKS` blocks of one format, or a multiple of that in long contexts, gives an output and
a log-sum-exp of its own, `fold.py` folds them in order. Which tokens make a split, and how many query vectors
a tile has (sums over tokens are ordered by it), depends on the sequence and the model alone, so its bits do
not depend on the batch. How many programs share the splits depends on the batch, for speed.

`split_codes.py` is the inside of a quantised split; here are one in full precision, and what both are in.

Per token and KV head the bytes moved are those of the cache, `head_dim * (k_bits + v_bits) / 8` and 8 of
pairs, each read once from memory: the minimum. They are read once more from the second-level cache for each
further `BLOCK_M` query vectors, and `8 * head_dim / (16 * capacity)` per query vector are the split's output,
written and read again (3 % at head_dim 128, 4 query heads per KV head and 16 or 4 bits; less in long
contexts). Operations: 4 * head_dim per query vector and token, of which a tile has 16 to keep matrix
instructions whole, though one row of 4 heads needs 4; and to unpack codes 3 instructions each. In all sm_90's
inner loop has 5 instructions per number in 16 bits, 7 per code in 8 and 5 in 4 (counted in its assembly).
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from .split_codes import attend_codes, load_for_codes, unit_dim, value_lanes
from .tiles import advance, keys, values

FEW_ROWS = 32
"""Most rows of a sequence that are attended to in splits: a step's last token and its drafts, of which there
are up to 16. More (a prompt's chunk) make enough programs without splits (`rows.py`).
"""

SPLIT_BLOCKS = 16
"""Blocks of a split: 128 KiB of a KV head at head_dim 128. Half as many would double the outputs' share of
the bytes; twice as many would leave 132 processors one program each at 8 KV heads, one sequence, 8k tokens.
"""

MAX_SPLITS = 64
"""Of a sequence in one format: where it has more tokens than fit so many splits, they have more blocks each.
8 KV heads make 512 programs of them, all that 132 processors run at once, and outputs have a place for each
possible split: at a context of 128k tokens, without this bound, 8 times as many.
"""

MAX_PROGRAMS = 4096
"""About 4 waves of what a large GPU runs at once: enough to even out sequences of different lengths, few
enough that programs without work cost nothing much.
"""

TILE_TOKENS = 32
"""Tokens of a tile in full precision: 16 KiB at head_dim 128, of which 2 are in flight per program."""

SPLIT_WARPS = 4
"""Each takes 8 tokens or words, and 8 units of V, of 32: no code is unpacked twice."""

TILE_WORDS = 32
"""Words of K of a quantised tile, 128 tokens."""

SPLIT_STAGES = 3
"""Two tiles in flight, and one being worked on."""


def split_options(v_bits: Sequence[int], head_dim: int) -> dict[str, dict[str, int]]:
    """Launch options by the formats of a past. With 4 bits, and on sm_80 with 8 beside 16, ptxas would rather
    spill a few bytes than use more than a third of the registers, unless it is told that it may; the others
    it would give too many. In heads of 64 units of such a V are bytes, which wait in registers: there is room
    for one tile in flight. On gfx942 more than 1 stage of codes spills, and 3 of int8 take more than 64 KiB.
    """
    bound = {"maxnreg": 255} if 4 in v_bits else {}
    if 4 in v_bits and value_lanes(head_dim) == 2:
        bound["num_stages"] = 2
    ampere = {"maxnreg": 255} if set(v_bits) == {8, 16} else {}
    return {"cuda": bound, "sm_80": ampere, "hip": {"num_stages": 2 if set(v_bits) == {16} else 1}}


@triton.jit
def blocks_of_splits(length, PART: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Blocks of each split of a sequence that has `length` tokens in a format."""
    return SPLIT * tl.maximum(tl.cdiv(length, SPLIT * MAX_SPLITS * PART[2]), 1)


@triton.jit
def count_of_splits(length, PART: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """How many splits such a sequence has."""
    return tl.cdiv(length, blocks_of_splits(length, PART, SPLIT, MAX_SPLITS) * PART[2])


@triton.jit
def places_of_splits(width, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Splits that block lists of `width` blocks can have."""
    return tl.minimum(tl.cdiv(width, SPLIT), MAX_SPLITS)


@triton.jit
def first_part(b, start, row, stride):
    """Where the outputs of a row's splits lie, in rows: with a `stride`, each sequence has so many of these,
    and rows of long sequences take no place.
    """
    return tl.where(stride > 0, b * stride, start) + row


@triton.jit
def _attend_full(
    q,
    full,
    table,
    first_block,
    end,
    head,
    row_positions,
    slot_positions,
    position_width,
    window,
    scale,
    PART: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    T: tl.constexpr,
):
    """A split in full precision. Returns the sums `[M, D]`, the largest score `[M]` in base 2, and the sum of
    weights relative to it.
    """
    dims = tl.arange(0, q.shape[1])
    top = tl.full((q.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((q.shape[0],), tl.float32)
    out = tl.zeros((q.shape[0], q.shape[1]), tl.float32)
    tokens = first_block * 16 + tl.arange(0, T)
    block = tl.load(table + tokens // 16, mask=tokens < end, other=0)
    for first in range(first_block * 16, end, T):
        tokens = tl.multiple_of(first, 16) + tl.arange(0, T)
        live = tokens < end
        slots = tokens % 16
        base = block.to(tl.int64) * BLOCK_BYTES + head * HEAD_BYTES
        k = keys(full, full, base, tokens, end, dims, PART, HEAD_DIM, q.dtype)
        scores = tl.dot(q, k, input_precision="ieee") * scale  # [M, T]
        seen = live[None, :]
        if window is not None:
            position = tl.load(
                slot_positions + block.to(tl.int64) * position_width + slots, mask=live, other=0
            )
            seen = seen & (position[None, :] > row_positions[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        top, finite, fade = advance(top, scores)
        shares = tl.exp2(scores - finite[:, None])
        total = total * fade + tl.sum(shares, 1)
        v = values(full, full, base, slots, live, dims, PART, HEAD_DIM, q.dtype)
        out = tl.dot(shares.to(q.dtype), v, out * fade[:, None], input_precision="ieee")
        block = tl.load(table + (tokens + T) // 16, mask=tokens + T < end, other=0)
    return out, top, total


@triton.jit
def _attend_part(
    q,
    cu_rows,
    b,
    first_row,
    first_split,
    num_splits,
    part_stride,
    q_row_stride,
    q_head_stride,
    row_positions,
    full,
    words,
    shorts,
    codes,
    table,
    length_at,
    turn,
    turns,
    head,
    slot_positions,
    position_width,
    window,
    parts_out,
    parts_lse,
    scale,
    PART: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Every `turns`-th split of one format, from `turn` on. Where the rows lie and how long the past is, is
    found anew for each split: there are no registers to hold it meanwhile.
    """
    start, row, here = _rows(cu_rows, b, first_row, GROUP, BLOCK_M)
    query_head = head * GROUP + tl.arange(0, BLOCK_M) % GROUP
    from_q = q + (start + row).to(tl.int64) * q_row_stride + query_head * q_head_stride
    own_positions = row
    if window is not None:
        own_positions = tl.load(row_positions + start + row, mask=here, other=0)
    dims = tl.arange(0, D)
    inside = here[:, None] & (dims < HEAD_DIM)[None, :]
    if PART[0] == 16:
        own_q = tl.load(from_q[:, None] + dims[None, :], mask=inside, other=0.0)  # [M, D]
    else:
        own_q, q_sum = load_for_codes(from_q, here, PART, HEAD_DIM)
    for split in range(turn, count_of_splits(tl.load(length_at), PART, SPLIT, MAX_SPLITS), turns):
        length = tl.load(length_at)
        blocks = blocks_of_splits(length, PART, SPLIT, MAX_SPLITS)
        end = tl.minimum(length, (split + 1) * blocks * PART[2])
        if PART[0] == 16:
            out, top, total = _attend_full(
                own_q,
                full,
                table,
                split * blocks,
                end,
                head,
                own_positions,
                slot_positions,
                position_width,
                window,
                scale,
                PART,
                HEAD_DIM,
                BLOCK_BYTES,
                HEAD_BYTES,
                TOKENS,
            )
            lanes = (out,)
        else:
            lanes, top, total = attend_codes(
                own_q,
                q_sum,
                words,
                shorts,
                codes,
                table,
                split * blocks,
                end,
                head,
                own_positions,
                slot_positions,
                position_width,
                window,
                scale,
                PART,
                HEAD_DIM,
                BLOCK_BYTES,
                HEAD_BYTES,
                WORDS,
            )
        again, own_row, is_own = _rows(cu_rows, b, first_row, GROUP, BLOCK_M)
        own_head = head * GROUP + tl.arange(0, BLOCK_M) % GROUP
        vector = first_part(b, again, own_row, part_stride) * NUM_HEADS + own_head
        place = (vector * num_splits + first_split + split).to(tl.int64)
        whole = tl.where(total == 0.0, 1.0, total)
        columns = tl.arange(0, lanes[0].shape[1])
        mask = is_own[:, None] & (columns < HEAD_DIM // len(lanes))[None, :]
        for a in tl.static_range(len(lanes)):
            dim = unit_dim(columns, a, len(lanes), PART[1], HEAD_DIM)
            at = parts_out + place[:, None] * HEAD_DIM + dim[None, :]
            tl.store(at, lanes[a] / whole[:, None], mask=mask)
        lse = tl.where(total == 0.0, float("-inf"), top + tl.log2(whole))
        tl.store(parts_lse + place, lse, mask=is_own)


@triton.jit
def _rows(cu_rows, b, first_row, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """A tile's rows `[M]` of a sequence, which begins at row `start`, and which of them there are."""
    vector = tl.arange(0, BLOCK_M)
    start = tl.load(cu_rows + b)
    row = first_row + vector // GROUP
    return start, row, (row < tl.load(cu_rows + b + 1) - start) & (vector < BLOCK_M // GROUP * GROUP)


@triton.jit(do_not_specialize=["num_splits", "part_stride"])
def attend_splits(
    q,
    cu_rows,
    full,
    words,
    shorts,
    codes,
    tables,
    lengths,
    widths,
    row_positions,
    slot_positions,
    position_width,
    window,
    parts_out,
    parts_lse,
    q_row_stride,
    q_head_stride,
    num_splits,
    part_stride,
    scale,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Grid: row tiles, programs that share the splits, sequences times KV heads: tiles of the same keys run
    side by side, and a program's turn is a number that it need not keep. `parts_out` `[rows, H, splits,
    head_dim]` and `parts_lse` `[rows, H, splits]`, in base 2, are float32; `first_part` says which row is
    where.
    """
    ROWS: tl.constexpr = BLOCK_M // GROUP
    head = tl.program_id(2) % (NUM_HEADS // GROUP)
    b = tl.program_id(2) // (NUM_HEADS // GROUP)
    first_row = tl.program_id(0) * ROWS
    start = tl.load(cu_rows + b)
    count = tl.load(cu_rows + b + 1) - start
    if count > MAX_ROWS or first_row >= count:
        return
    first_split = 0
    for i in tl.static_range(len(PARTS)):
        _attend_part(
            q,
            cu_rows,
            b,
            first_row,
            first_split,
            num_splits,
            part_stride,
            q_row_stride,
            q_head_stride,
            row_positions,
            full,
            words,
            shorts,
            codes,
            tables[i] + b.to(tl.int64) * widths[i],
            lengths[i] + b,
            tl.program_id(1),
            tl.num_programs(1),
            head,
            slot_positions,
            position_width,
            window,
            parts_out,
            parts_lse,
            scale,
            tl.constexpr(PARTS[i]),
            HEAD_DIM,
            GROUP,
            NUM_HEADS,
            BLOCK_BYTES,
            HEAD_BYTES,
            BLOCK_M,
            D,
            TOKENS,
            WORDS,
            SPLIT,
            MAX_SPLITS,
        )
        first_split += places_of_splits(widths[i], SPLIT, MAX_SPLITS)
