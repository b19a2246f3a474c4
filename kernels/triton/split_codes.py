"""The inside of a quantised split of `splits.py`: codes are read as they lie in blocks, and unpacked where
the matrix instruction wants them.

Of K a block is read in words of 4 bytes, 4 tokens of one row; of V in units of 2 or 4 codes. Lane j of a word
is token `4 * word + j`, so a tile is 4 interleaved runs of tokens with a product each; a lane of V gives
every second or fourth output dimension. No element is moved on its own before it is unpacked. Blocks of any
capacity fill such tiles: only a block's last word can have unused lanes (1 token in 40 at capacity 39).

Bytes and operations stand in `splits.py`.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from .tiles import advance, bias, number, padded, two_numbers


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
def attend_codes(
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
    """A quantised split: tokens from block `first_block` to `end`; `q` as `load_for_codes` gives it. Returns
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
def load_for_codes(from_q, here, PART: tl.constexpr, HEAD_DIM: tl.constexpr):
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
