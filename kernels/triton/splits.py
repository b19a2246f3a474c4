"""Attention of few rows over the past, split over fixed numbers of blocks: what decoding and verification run.

Each split of `SPLIT_BLOCKS` blocks of one format gives an output and a log-sum-exp of its own, `fold.py` folds
them in order. Which tokens make a split depends on the sequence alone, so its bits do not depend on the
batch. How many programs share the splits depends on the batch, for speed.

A quantised block is read in 4-byte words: of K, 4 tokens of one dimension; of V, 4 bytes of one token's row.
Lane j of a word of K is token `4 * word + j`, so a tile is 4 interleaved runs of tokens with a product each.
Lane a of V gives every fourth output dimension; in 4 bits each byte gives two. No element is moved on its own, in
registers or shared memory, before it is unpacked. Blocks of any capacity fill such tiles: only a block's last
word can have unused lanes (1 token in 40 at capacity 39).

Per token and KV head the bytes moved are those of the cache, `head_dim * (k_bits + v_bits) / 8` and 8 of pairs,
each read once for up to `BLOCK_M` query vectors, plus `8 * head_dim / (16 * capacity)` per query vector for the
split's output, written and read again (2 % at head_dim 128, 4 query heads per KV head and 16 bits). Operations: 4 *
head_dim per query vector and token, as they must be; and about 1.5 per code to unpack it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..base import Past
from ..layout import BlockLayout
from .aot import AotCase
from .tiles import (
    LOG2_E,
    Window,
    advance,
    bias,
    check_queries,
    keys,
    locate,
    number,
    padded,
    part_of,
    past_args,
    pool_of,
    values,
    window_args,
)

FEW_ROWS = 16
"""Most rows of a sequence that are attended to in splits: a step's last token and its drafts. More (a prompt's
chunk) make enough programs without splits (`rows.py`).
"""

SPLIT_BLOCKS = 16
"""Blocks of a split: 128 KiB of a KV head at head_dim 128. Half as many would double the outputs' share of the
bytes; twice as many would leave half of 132 processors idle at 8 KV heads, one sequence and 8k tokens.
"""

MAX_PROGRAMS = 4096
"""About 4 waves of what a large GPU runs at once: enough to even out sequences of different lengths, few enough
that programs without work cost nothing much.
"""

TILE_TOKENS = 32
"""Tokens of a tile in full precision: 16 KiB at head_dim 128, of which 3 are in flight per program."""

SPLIT_STAGES = 3
"""Tiles in flight, and one being worked on."""


def split_warps(head_dim: int) -> int:
    """Warps of a program. A tile's words of K, 8 per warp, and the units of 4 codes in a row of V are spread over
    the warps, 8 to each, so that no code is unpacked twice.
    """
    return 4 if head_dim > 64 else 2


@triton.jit
def _lane_pairs(words, base, inner, live, ROW: tl.constexpr, PART: tl.constexpr, HEAD_BYTES: tl.constexpr):
    """A row of pairs for the 4 tokens of each word: 4 tensors `[T]`. A row may begin in the middle of a word."""
    FIRST: tl.constexpr = PART[4] // 2 + ROW * PART[2]
    at = FIRST // 2 + 2 * inner
    LAST: tl.constexpr = HEAD_BYTES // 4 - 1
    a = tl.load(words + base // 4 + at, mask=live, other=0).to(tl.uint32, bitcast=True)
    b = tl.load(words + base // 4 + at + 1, mask=live & (at + 1 <= LAST), other=0).to(
        tl.uint32, bitcast=True
    )
    if FIRST % 2 == 0:
        return _low(a), _high(a), _low(b), _high(b)
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
def _key_words(words, base, inner, live, rows, PART: tl.constexpr, ROWS: tl.constexpr):
    """Words of K `[K, T]` whose lane j is the code of token `4 * inner + j`."""
    mask = (rows < ROWS)[:, None] & live[None, :]
    # rows * capacity / 4, as what a processor adds to one address for every fourth row.
    at = (base // 4 + inner)[None, :] + (rows // 4 * PART[2] + rows % 4 * PART[2] // 4)[:, None]
    word = tl.load(words + at, mask=mask, other=0).to(tl.uint32, bitcast=True)
    if PART[2] % 4 != 0:
        # The row begins within a word; the next one is still within the block, as V follows.
        after = tl.load(words + at + 1, mask=mask, other=0).to(tl.uint32, bitcast=True)
        shift = (rows % 4 * PART[2] % 4 * 8).to(tl.uint32)[:, None]
        word = (word >> shift) | ((after << 1) << (31 - shift))
    return word


@triton.jit
def _attend_codes(
    q_low,
    q_high,
    q_sum,
    words,
    shorts,
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
    """A quantised split: tokens from block `first_block` to `end`. Returns what is said of `_attend_full`, the
    output as one `[M, C]` for each code of a word of V.
    """
    M: tl.constexpr = q_low.shape[0]
    KEY_ROWS: tl.constexpr = HEAD_DIM * PART[0] // 8
    UNITS: tl.constexpr = HEAD_DIM // 4
    UNIT_BYTES: tl.constexpr = PART[1] // 2
    C: tl.constexpr = triton.next_power_of_2(UNITS)
    VALUE: tl.constexpr = tl.float32 if q_low.dtype == tl.float32 else tl.bfloat16
    BLOCK_WORDS: tl.constexpr = (PART[2] + 3) // 4
    CENTRE: tl.constexpr = 2 ** (PART[1] - 1)

    key_rows = tl.arange(0, q_low.shape[1])
    columns = tl.arange(0, C)
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    shift = tl.zeros((M,), tl.float32)
    out = ()
    for _ in tl.static_range(4):
        out = out + (tl.zeros((M, C), tl.float32),)
    begin = first_block * BLOCK_WORDS
    stop = end // PART[2] * BLOCK_WORDS + (end % PART[2] + 3) // 4
    word = begin + tl.arange(0, T)
    block = tl.load(table + word // BLOCK_WORDS, mask=word < stop, other=0)
    for first in range(begin, stop, T):
        word = first + tl.arange(0, T)
        live = word < stop
        inner = word % BLOCK_WORDS
        base = block.to(tl.int64) * BLOCK_BYTES + head * HEAD_BYTES
        key = _key_words(words, base, inner, live, key_rows, PART, KEY_ROWS)
        key_scales = _lane_pairs(words, base, inner, live, 0, PART, HEAD_BYTES)
        key_zeros = _lane_pairs(words, base, inner, live, 1, PART, HEAD_BYTES)
        value_scales = _lane_pairs(words, base, inner, live, 2, PART, HEAD_BYTES)
        value_zeros = _lane_pairs(words, base, inner, live, 3, PART, HEAD_BYTES)

        scores = ()
        lives = ()
        new = top
        for j in tl.static_range(4):
            slot = 4 * inner + j
            here = live & (slot < PART[2]) & (word // BLOCK_WORDS * PART[2] + slot < end)
            if PART[0] == 8:
                code = number(((key >> (8 * j)) & 255).to(tl.int32), 8, q_low.dtype)
                dots = tl.dot(q_low, code, input_precision="ieee")
            else:
                low = number(((key >> (8 * j)) & 15).to(tl.int32), 4, q_low.dtype)
                high = number(((key >> (8 * j + 4)) & 15).to(tl.int32), 4, q_low.dtype)
                dots = tl.dot(q_low, low, input_precision="ieee")
                dots = tl.dot(q_high, high, dots, input_precision="ieee")
            zero = key_zeros[j] - bias(PART[0], q_low.dtype) * key_scales[j]
            score = (dots * key_scales[j][None, :] + q_sum[:, None] * zero[None, :]) * scale
            seen = here[None, :]
            if window is not None:
                position = tl.load(
                    slot_positions + block.to(tl.int64) * position_width + slot, mask=here, other=0
                )
                seen = seen & (position[None, :] > row_positions[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
            scores = scores + (score,)
            lives = lives + (here,)
            new = tl.maximum(new, tl.max(score, 1))

        finite = tl.where(new == float("-inf"), 0.0, new)
        fade = tl.exp2(top - finite)
        top = new
        total = total * fade
        shift = shift * fade
        faded = ()
        for a in tl.static_range(4):
            faded = faded + (out[a] * fade[:, None],)
        for j in tl.static_range(4):
            row = base // UNIT_BYTES + PART[3] // UNIT_BYTES + (4 * inner + j) * UNITS
            at = row[:, None] + columns[None, :]
            mask = lives[j][:, None] & (columns < UNITS)[None, :]
            if PART[1] == 8:
                value = tl.load(words + at, mask=mask, other=0)  # [T, C]
            else:
                value = tl.load(shorts + at, mask=mask, other=0).to(tl.int32)
            share = tl.exp2(scores[j] - finite[:, None])  # [M, T]
            scaled = (share * tl.where(lives[j], value_scales[j], 0.0)[None, :]).to(VALUE)
            middle = tl.where(lives[j], value_zeros[j] + CENTRE * value_scales[j], 0.0)
            total += tl.sum(share, 1)
            excess = (CENTRE + bias(PART[1], VALUE)) * scaled.to(tl.float32)
            shift += tl.sum(share * middle[None, :] - excess, 1)
            sums = ()
            for a in tl.static_range(4):
                # In 4 bits lanes 0 and 1 are the low halves of bytes 0 and 1, and 2 and 3 the high ones.
                if PART[1] == 8:
                    code = number((value >> (8 * a)) & 255, 8, VALUE)
                else:
                    code = number((value >> (8 * (a % 2) + 4 * (a // 2))) & 15, 4, VALUE)
                sums = sums + (tl.dot(scaled, code, faded[a], input_precision="ieee"),)
            faded = sums
        out = faded
        block = tl.load(table + (word + T) // BLOCK_WORDS, mask=word + T < stop, other=0)
    moved = ()
    for a in tl.static_range(4):
        moved = moved + (out[a] + shift[:, None],)
    return moved, top, total


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
            position = tl.load(slot_positions + block.to(tl.int64) * position_width + slots, mask=live, other=0)
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
    from_q,
    here,
    place,
    own_positions,
    full,
    words,
    shorts,
    table,
    length,
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
    BLOCK_BYTES: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Every `turns`-th split of one format, from `turn` on; `place` `[M]` is where the vectors' first goes."""
    # Of 4-bit K a row of codes is half a row of dimensions.
    K: tl.constexpr = HALF if PART[0] == 4 else D
    Q_DIM: tl.constexpr = HEAD_DIM // 2 if PART[0] == 4 else HEAD_DIM
    SPLIT_TOKENS: tl.constexpr = SPLIT * PART[2]
    dims = tl.arange(0, K)
    inside = here[:, None] & (dims < Q_DIM)[None, :]
    q_low = tl.load(from_q[:, None] + dims[None, :], mask=inside, other=0.0)  # [M, K]
    q_high = q_low
    q_sum = tl.sum(q_low.to(tl.float32), 1)
    if PART[0] == 4:
        q_high = tl.load(from_q[:, None] + dims[None, :] + Q_DIM, mask=inside, other=0.0)
        q_sum += tl.sum(q_high.to(tl.float32), 1)
    for split in range(turn, tl.cdiv(length, SPLIT_TOKENS), turns):
        end = tl.minimum(length, (split + 1) * SPLIT_TOKENS)
        target = (place + split)[:, None] * HEAD_DIM
        if PART[0] == 16:
            out, top, total = _attend_full(
                q_low,
                full,
                table,
                split * SPLIT,
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
            whole = tl.where(total == 0.0, 1.0, total)
            tl.store(parts_out + target + dims[None, :], out / whole[:, None], mask=inside)
        else:
            lanes, top, total = _attend_codes(
                q_low,
                q_high,
                q_sum,
                words,
    shorts,
                table,
                split * SPLIT,
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
            whole = tl.where(total == 0.0, 1.0, total)
            columns = tl.arange(0, lanes[0].shape[1])
            mask = here[:, None] & (columns < HEAD_DIM // 4)[None, :]
            for a in tl.static_range(4):
                if PART[1] == 8:
                    dim = 4 * columns + a
                else:
                    dim = 2 * columns + a % 2 + a // 2 * (HEAD_DIM // 2)
                tl.store(parts_out + target + dim[None, :], lanes[a] / whole[:, None], mask=mask)
        tl.store(parts_lse + place + split, tl.where(total == 0.0, float("-inf"), top + tl.log2(whole)), mask=here)


@triton.jit
def attend_splits(
    q,
    cu_rows,
    full,
    words,
    shorts,
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
    scale,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid: programs that share the splits, KV heads, sequences times row tiles. `parts_out` `[N, H, splits,
    head_dim]` and `parts_lse` `[N, H, splits]`, in base 2, are float32.
    """
    ROWS: tl.constexpr = BLOCK_M // GROUP
    head = tl.program_id(1)
    b = tl.program_id(2) // ROW_TILES
    first_row = tl.program_id(2) % ROW_TILES * ROWS
    start = tl.load(cu_rows + b)
    count = tl.load(cu_rows + b + 1) - start
    if count > MAX_ROWS or first_row >= count:
        return
    vector = tl.arange(0, BLOCK_M)
    row = first_row + vector // GROUP
    here = (row < count) & (vector < ROWS * GROUP)
    query_head = head * GROUP + vector % GROUP
    from_q = q + (start + row).to(tl.int64) * q_row_stride + query_head * q_head_stride
    place = ((start + row).to(tl.int64) * NUM_HEADS + query_head) * num_splits
    own_positions = row
    if window is not None:
        own_positions = tl.load(row_positions + start + row, mask=here, other=0)
    for i in tl.static_range(len(PARTS)):
        _attend_part(
            from_q,
            here,
            place,
            own_positions,
            full,
            words,
    shorts,
            tables[i] + b.to(tl.int64) * widths[i],
            tl.load(lengths[i] + b),
            tl.program_id(0),
            tl.num_programs(0),
            head,
            slot_positions,
            position_width,
            window,
            parts_out,
            parts_lse,
            scale,
            tl.constexpr(PARTS[i]),
            HEAD_DIM,
            BLOCK_BYTES,
            HEAD_BYTES,
            D,
            HALF,
            TOKENS,
            WORDS,
            SPLIT,
        )
        place += tl.cdiv(widths[i], SPLIT)
