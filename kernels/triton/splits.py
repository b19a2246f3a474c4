"""Attention of few rows over the past, split over fixed numbers of blocks: what decoding and verification
run.

Each split of `SPLIT_BLOCKS` blocks of one format, or a multiple of that in long contexts, gives an output and
a log-sum-exp of its own, `fold.py` folds them in order. Which tokens make a split, and how many query vectors
a tile has (sums over tokens are ordered by it), depends on the sequence and the model alone, so its bits do
not depend on the batch. How many programs share the splits depends on the batch, for speed.

Of K a quantised block is read in words of 4 bytes, 4 tokens of one row; of V in units of 2 or 4 codes. Lane j
of a word is token `4 * word + j`, so a tile is 4 interleaved runs of tokens with a product each; a lane of V
gives every second or fourth output dimension. No element is moved on its own before it is unpacked. Blocks of
any capacity fill such tiles: only a block's last word can have unused lanes (1 token in 40 at capacity 39).

Per token and KV head the bytes moved are those of the cache, `head_dim * (k_bits + v_bits) / 8` and 8 of
pairs, each read once from memory and once more from the second-level cache for each further `BLOCK_M` query
vectors, plus `8 * head_dim / (16 * capacity)` per query vector for the split's output, written and read again
(3 % at head_dim 128, 4 query heads per KV head and 16 or 4 bits; less in long contexts). Operations:
4 * head_dim per query vector and token, of which a tile has 16 to keep matrix instructions whole, though one
row of 4 heads needs 4; and to unpack codes 3 instructions each. In all sm_90's inner loop has 5 instructions
per number in 16 bits, 7 per code in 8 and 5 in 4 (counted in its assembly).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import triton
import triton.language as tl

from .tiles import (
    advance,
    bias,
    keys,
    number,
    padded,
    two_numbers,
    values,
)

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
    """Launch options by the formats of a past. With 4 bits ptxas would rather spill a few bytes than use more
    than a third of the registers, unless it is told that it may; the others it would give more than they
    need. In heads of 64 units of such a V are bytes, which wait for their turn in registers: one tile in
    flight is all that there is room for. On gfx942 more than 1 stage of codes spills, and 3 of int8 take more
    than 64 KiB.
    """
    bound = {"maxnreg": 255} if 4 in v_bits else {}
    if 4 in v_bits and value_lanes(head_dim) == 2:
        bound["num_stages"] = 2
    return {"cuda": bound, "hip": {"num_stages": 2 if set(v_bits) == {16} else 1}}


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


@triton.constexpr_function
def key_classes(capacity: int) -> int:
    """Rows of K in turn begin at this many different places within a 4-byte word."""
    return 4 // math.gcd(capacity, 4)


@triton.constexpr_function
def value_lanes(head_dim: int) -> int:
    """Codes of a unit of V: as few as leave a row at least 32 units, 8 for each warp, at head_dim 64, 96 or
    128.
    """
    return 4 if head_dim > 64 else 2


@triton.jit
def _lane_pairs(words, base, inner, live, ROW: tl.constexpr, PART: tl.constexpr, HEAD_BYTES: tl.constexpr):
    """A row of pairs for the 4 tokens of each word: 4 tensors `[T]`. A row may begin within a word."""
    FIRST: tl.constexpr = PART[4] // 2 + ROW * PART[2]
    at = FIRST // 2 + 2 * inner
    LAST: tl.constexpr = HEAD_BYTES // 4 - 1
    a = tl.load(words + base // 4 + at, mask=live, other=0).to(tl.uint32, bitcast=True)
    b = tl.load(words + base // 4 + at + 1, mask=live & (at + 1 <= LAST), other=0).to(tl.uint32, bitcast=True)
    if FIRST % 2 == 0:
        return _low(a), _high(a), _low(b), _high(b)
    else:
        c = tl.load(words + base // 4 + at + 2, mask=live & (at + 2 <= LAST), other=0).to(
            tl.uint32, bitcast=True
        )
        return _high(a), _low(b), _high(b), _low(c)


@triton.jit
def _low(word):
    return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _high(word):
    return (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _key_words(words, base, inner, live, CLASS: tl.constexpr, rows, PART: tl.constexpr, ROWS: tl.constexpr):
    """Words of K `[K, T]` whose lane j is the code of token `4 * inner + j`, of every `key_classes`-th row
    from `CLASS` on.
    """
    CLASSES: tl.constexpr = key_classes(PART[2])
    SHIFT: tl.constexpr = CLASS * PART[2] % 4 * 8
    mask = (rows < ROWS // CLASSES)[:, None] & live[None, :]
    at = (base // 4 + CLASS * PART[2] // 4 + inner)[None, :] + rows[:, None] * (CLASSES * PART[2] // 4)
    word = tl.load(words + at, mask=mask, other=0)
    if SHIFT > 0:
        # The row begins within a word; the next one is still within the block, as V follows.
        after = tl.load(words + at + 1, mask=mask, other=0)
        word = ((word >> SHIFT) & (2 ** (32 - SHIFT) - 1)) | (after << (32 - SHIFT))
    return word


@triton.jit
def unit_number(unit, LANE: tl.constexpr, LANES: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """The number in a lane of units: in 4 bits the low halves of a unit's bytes come first, then the high
    ones.
    """
    if BITS == 8:
        return number(((unit >> (8 * LANE)) & 255).to(tl.int32), 8, dtype)
    else:
        HALF: tl.constexpr = LANES // 2
        return number(((unit >> (8 * (LANE % HALF) + 4 * (LANE // HALF))) & 15).to(tl.int16), 4, dtype)


@triton.jit
def unit_dim(units, LANE: tl.constexpr, LANES: tl.constexpr, BITS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The output dimensions that a lane of units belongs to."""
    if BITS != 4:
        return LANES * units + LANE
    else:
        HALF: tl.constexpr = LANES // 2
        return HALF * units + LANE % HALF + LANE // HALF * (HEAD_DIM // 2)


@triton.jit
def _attend_codes(
    q,
    q_sum,
    words,
    shorts,
    codes,
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
    """A quantised split: tokens from block `first_block` to `end`; `q` as `_load_for_codes` gives it. Returns
    what is said of `_attend_full`, the output as 4 `[M, C]` of the units' lanes.
    """
    M: tl.constexpr = q[0].shape[0]
    dtype: tl.constexpr = q[0].dtype
    CLASSES: tl.constexpr = key_classes(PART[2])
    KEY_ROWS: tl.constexpr = HEAD_DIM * PART[0] // 8
    LANES: tl.constexpr = value_lanes(HEAD_DIM)
    UNITS: tl.constexpr = HEAD_DIM // LANES
    UNIT_BITS: tl.constexpr = PART[1] * LANES
    value_dtype: tl.constexpr = tl.float32 if dtype == tl.float32 else tl.bfloat16
    BLOCK_WORDS: tl.constexpr = (PART[2] + 3) // 4
    CENTRE: tl.constexpr = 2 ** (PART[1] - 1)

    key_rows = tl.arange(0, q[0].shape[1])
    columns = tl.arange(0, triton.next_power_of_2(UNITS))
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M, T), tl.float32)
    shift = tl.zeros((M, T), tl.float32)
    out = ()
    for _ in tl.static_range(LANES):
        out += (tl.zeros((M, columns.shape[0]), tl.float32),)
    begin = first_block * BLOCK_WORDS
    stop = end // PART[2] * BLOCK_WORDS + (end % PART[2] + 3) // 4
    word = begin + tl.arange(0, T)
    block = tl.load(table + word // BLOCK_WORDS, mask=word < stop, other=0)
    for first in range(begin, stop, T):
        word = first + tl.arange(0, T)
        live = word < stop
        inner = word % BLOCK_WORDS
        base = block.to(tl.int64) * BLOCK_BYTES + head * HEAD_BYTES
        none = tl.zeros((M, T), tl.float32)
        dots = (none, none, none, none)
        for c in tl.static_range(CLASSES):
            key = _key_words(words, base, inner, live, c, key_rows, PART, KEY_ROWS)
            for half in tl.static_range(8 // PART[0]):
                dots = _add_products(dots, q[half * CLASSES + c], key, 4 * half, PART[0])
        key_scales = _lane_pairs(words, base, inner, live, 0, PART, HEAD_BYTES)
        key_zeros = _lane_pairs(words, base, inner, live, 1, PART, HEAD_BYTES)

        scores = ()
        lives = ()
        for j in tl.static_range(4):
            slot = 4 * inner + j
            here = live & (slot < PART[2]) & (word // BLOCK_WORDS * PART[2] + slot < end)
            zero = (key_zeros[j] - bias(PART[0], dtype) * key_scales[j]) * scale
            score = dots[j] * (key_scales[j] * scale)[None, :] + q_sum[:, None] * zero[None, :]
            seen = here[None, :]
            if window is not None:
                position = tl.load(
                    slot_positions + block.to(tl.int64) * position_width + slot, mask=here, other=0
                )
                seen = seen & (position[None, :] > row_positions[:, None] - window)
            scores += (tl.where(seen, score, float("-inf")),)
            lives += (here,)
        highest = tl.maximum(tl.maximum(scores[0], scores[1]), tl.maximum(scores[2], scores[3]))
        top, finite, fade = advance(top, highest)

        value_scales = _lane_pairs(words, base, inner, live, 2, PART, HEAD_BYTES)
        value_zeros = _lane_pairs(words, base, inner, live, 3, PART, HEAD_BYTES)
        total *= fade[:, None]
        shift *= fade[:, None]
        scaled = ()
        for j in tl.static_range(4):
            share = tl.exp2(scores[j] - finite[:, None])  # [M, T]
            middle = tl.where(lives[j], value_zeros[j] + CENTRE * value_scales[j], 0.0)
            rounded = (share * tl.where(lives[j], value_scales[j], 0.0)[None, :]).to(value_dtype)
            total += share
            shift += share * middle[None, :]
            if value_dtype == tl.float32 or PART[1] == 4:
                shift -= (CENTRE + bias(PART[1], value_dtype)) * rounded.to(tl.float32)
            scaled += (rounded,)
        faded = ()
        for a in tl.static_range(LANES):
            faded += (out[a] * fade[:, None],)
        for j in tl.static_range(4):
            row = base * 8 // UNIT_BITS + PART[3] * 8 // UNIT_BITS + (4 * inner + j) * UNITS
            at = row[:, None] + columns[None, :]
            mask = lives[j][:, None] & (columns < UNITS)[None, :]
            if UNIT_BITS == 32:
                unit = tl.load(words + at, mask=mask, other=0)  # [T, C]
            elif UNIT_BITS == 16:
                unit = tl.load(shorts + at, mask=mask, other=0)
            else:
                unit = tl.load(codes + at, mask=mask, other=0)
            sums = ()
            for a in tl.static_range(LANES):
                number_a = unit_number(unit, a, LANES, PART[1], value_dtype)
                sums += (tl.dot(scaled[j], number_a, faded[a], input_precision="ieee"),)
            faded = sums
        out = faded
        block = tl.load(table + (word + T) // BLOCK_WORDS, mask=word + T < stop, other=0)
    moved = ()
    for a in tl.static_range(LANES):
        moved += (out[a] + tl.sum(shift, 1)[:, None],)
    return moved, top, tl.sum(total, 1)


@triton.jit
def _add_products(dots, q, key, SHIFT: tl.constexpr, BITS: tl.constexpr):
    """Add `q` `[M, K]` times each lane of words `[K, T]`, whose codes begin at bit SHIFT of a byte."""
    low0, low2 = two_numbers(key, SHIFT, BITS, q.dtype)
    low1, low3 = two_numbers(key, SHIFT + 8, BITS, q.dtype)
    return (
        tl.dot(q, low0, dots[0], input_precision="ieee"),
        tl.dot(q, low1, dots[1], input_precision="ieee"),
        tl.dot(q, low2, dots[2], input_precision="ieee"),
        tl.dot(q, low3, dots[3], input_precision="ieee"),
    )


@triton.jit
def _load_for_codes(from_q, here, PART: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Queries `[M, K]` for each half of a byte and each class of rows of K, and their sums `[M]`."""
    CLASSES: tl.constexpr = key_classes(PART[2])
    KEY_ROWS: tl.constexpr = HEAD_DIM * PART[0] // 8
    rows = tl.arange(0, padded(KEY_ROWS // CLASSES))
    q_sum = tl.zeros((from_q.shape[0],), tl.float32)
    q = ()
    for half in tl.static_range(8 // PART[0]):
        for c in tl.static_range(CLASSES):
            dims = half * KEY_ROWS + rows * CLASSES + c
            mask = here[:, None] & (rows < KEY_ROWS // CLASSES)[None, :]
            own = tl.load(from_q[:, None] + dims[None, :], mask=mask, other=0.0)
            q_sum += tl.sum(own.to(tl.float32), 1)
            q += (own,)
    return q, q_sum


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
        own_q, q_sum = _load_for_codes(from_q, here, PART, HEAD_DIM)
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
            lanes, top, total = _attend_codes(
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
