"""Attention over blocks of codes: tokens of the past in quantised formats.

`score = scale * (q . codes) + zero * sum(q)`, and the weighted sum of V likewise: `sum(p * zero) + sum((p *
scale) * codes)`; so codes become float32 in registers and nothing is written back. A partition is as many
whole blocks as hold 256 tokens at most. What a vector sees of it is as in `attention.py`: scores, maximum,
exp and sum, weighted sum of V, a fold into its state.

A row of K is two chains of additions, one per half of head_dim, added at the end: 4-bit codes give both
halves of a byte, and chains that do not wait for each other hide the multiply-add's latency. A tile is
therefore a tuple of two vectors a query: its first half for dimensions (of V: columns) below head_dim / 2,
its second half for those above.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from .forms import FLOAT, INT16, LANES, Emitter
from .states import (
    PARTITION,
    STATE_HEAD,
    Queries,
    States,
    fold_values,
    gather,
    query_of,
    softmax,
    state_of,
)
from .vector import (
    add,
    attention_tile,
    codes,
    compiled,
    fma,
    keep_first,
    load,
    load_f16,
    load_part,
    mul,
    prefetch,
    read_i32,
    read_i64,
    splat,
    stack,
    store,
    sum_lanes,
    tile,
    words,
    write,
    zero,
    zeros,
)

BLOCKS_AHEAD = 2
"""How many blocks before its use K is asked for: one takes half as long as the memory's answer."""

PAST_WORDS = 8
"""64-bit words of one quantised past: bits of K and V, capacity, offsets of V and pairs, block table, its row
stride, lengths. They follow a count at an address that kernels get as args 23; 0 for none.
"""


class CodeBlocks(NamedTuple):
    """Tokens of one sequence and KV head in one quantised format."""

    head_dim: int
    tokens: int
    k_bits: int
    v_bits: int
    capacity: int
    v_offset: int
    pairs_offset: int
    table: int  # address of int32 block ids
    base: int  # address of this head's part of block 0
    block_bytes: int


@compiled
def _partition_tokens(capacity: int) -> int:
    return PARTITION // capacity * capacity


@compiled
def _partitions(past: int, sequence: int) -> int:
    """Partitions of a sequence in the past at an address."""
    size = _partition_tokens(read_i64(past + 16))
    return (read_i32(read_i64(past + 56) + 4 * sequence) + size - 1) // size


@compiled
def num_quantised(pasts: int, sequence: int) -> int:
    """Partitions of a sequence in all quantised pasts."""
    count = 0
    if pasts != 0:
        for i in range(read_i64(pasts)):
            count += _partitions(pasts + 8 + 8 * PAST_WORDS * i, sequence)
    return count


@compiled
def code_blocks(
    past: int, sequence: int, head: int, head_dim: int, kv_heads: int, layer: int, size: int
) -> Any:
    """A sequence's `CodeBlocks` of one KV head; a block is `size` bytes."""
    k_bits, v_bits, capacity, v_offset, pairs_offset, table, table_bytes, lengths = words(past, 8)
    return CodeBlocks(
        head_dim,
        read_i32(lengths + 4 * sequence),
        k_bits,
        v_bits,
        capacity,
        v_offset,
        pairs_offset,
        table + sequence * table_bytes,
        layer + head * (size // kv_heads),
        size,
    )


@compiled
def code_block(blocks: CodeBlocks, index: int) -> int:
    """The address of a head's part of a block."""
    return blocks.base + read_i32(blocks.table + 4 * index) * blocks.block_bytes


@tile
def _add_bytes(e: Emitter, sums: Any, low: Any, high: Any, stride: Any, row: Any, high_row: Any) -> Any:
    """Add 16 codes at `row` times the scalars at `low`, and those at `high_row` times the ones at `high`."""
    return _add_both(e, sums, (low, high), stride, (codes(e, row, 8), codes(e, high_row, 8)))


@tile
def _add_halves(e: Emitter, sums: Any, low: Any, high: Any, stride: Any, row: Any) -> Any:
    """Add the low halves of 16 bytes times the scalars at `low`, the high ones times those at `high`."""
    return _add_both(e, sums, (low, high), stride, (codes(e, row, 4), codes(e, row, 4, half=1)))


def _add_both(e: Emitter, sums: Any, scalars: Any, stride: Any, vectors: Any) -> Any:
    count, added = len(sums) // 2, []
    for side in (0, 1):
        for m in range(count):
            scalar = e.splat(e.load(e.row(scalars[side], stride, m), FLOAT))
            added.append(e.fma(scalar, vectors[side], sums[side * count + m]))
    return added


class Ahead(NamedTuple):
    """What is asked for meanwhile, line by line since a burst of requests would stall: what lies at two
    addresses, so many bytes further with each step. 0 bytes: nothing more.
    """

    soon: int
    later: int
    bytes: int


@compiled
def _dots(empty: Any, bits: int, q: int, head_dim: int, k: int, row_bytes: int, ahead: Ahead) -> Any:
    """`q . codes` of a tile's vectors (at `q`, `[head_dim, vectors]`) with 16 tokens, in two halves."""
    sums, half, width = empty, head_dim // 2, 2 * len(empty)
    if bits == 8:
        for i in range(half):
            prefetch(ahead.soon + i * ahead.bytes)
            prefetch(ahead.later + i * ahead.bytes)
            row = k + i * row_bytes
            sums = _add_bytes(sums, q + i * width, q + (half + i) * width, 4, row, row + half * row_bytes)
    else:
        for i in range(half):
            prefetch(ahead.soon + i * ahead.bytes)
            prefetch(ahead.later + i * ahead.bytes)
            sums = _add_halves(sums, q + i * width, q + (half + i) * width, 4, k + i * row_bytes)
    return sums


@tile
def _store_scores(e: Emitter, sums: Any, out: Any, scales: Any, zeros_at: Any, totals: Any) -> Any:
    """Write `scale * (sum of both halves) + zero * total` of 16 tokens; vectors lie 1024 bytes apart."""
    count, halves = len(sums) // 2, ir.VectorType(INT16, LANES)
    scale, least = e.from_f16(e.load(scales, halves)), e.from_f16(e.load(zeros_at, halves))
    for m in range(count):
        dot = e.b.fadd(sums[m], sums[count + m])
        total = e.splat(e.load(totals, FLOAT, 4 * m))
        e.store(out, e.fma(dot, scale, e.b.fmul(least, total)), 1024 * m)
    return sums


@compiled
def store_block_scores(
    empty: Any, blocks: CodeBlocks, block: int, seen: int, q: int, totals: int, scores: int
) -> None:
    """Scores of a tile's vectors with the first `seen` tokens of a block, 16 at a time; the last 16 may
    overlap those before. `totals` are the sums of the vectors.
    """
    _store_block_scores(empty, blocks, block, seen, q, totals, scores, Ahead(block, block, 0))


@compiled
def _store_block_scores(
    empty: Any, blocks: CodeBlocks, block: int, seen: int, q: int, totals: int, scores: int, ahead: Ahead
) -> None:
    """The same, while something is asked for."""
    capacity, step = blocks.capacity, ahead.bytes * (blocks.head_dim // 2)
    soon, later = ahead.soon, ahead.later
    for start in range(0, seen, 16):
        slot = min(start, capacity - 16)
        meanwhile = Ahead(soon, later, ahead.bytes)
        sums = _dots(empty, blocks.k_bits, q, blocks.head_dim, block + slot, capacity, meanwhile)
        pairs = block + blocks.pairs_offset + 2 * slot
        _store_scores(sums, scores + 4 * slot, pairs, pairs + 2 * capacity, totals)
        soon, later = soon + step, later + step


@compiled
def sum_vectors(queries: Queries, first: int, count: int, head_dim: int, scale: float, totals: int) -> None:
    """The sum of each of `count` query vectors, scaled."""
    for m in range(count):
        source, total = query_of(queries, first + m, head_dim), zero()
        for i in range(0, head_dim, 16):
            total = add(mul(load_part(source + 4 * i, min(16, head_dim - i)), splat(scale)), total)
        write(totals + 4 * m, sum_lanes(total))


@compiled
def _load_v_pairs(blocks: CodeBlocks, front: int, tokens: int, scales: int, least: int) -> None:
    """V's scales and zero points of a partition as float32; 0 beyond its tokens up to a multiple of 16."""
    capacity = blocks.capacity
    for j in range((tokens + capacity - 1) // capacity):
        pairs = code_block(blocks, front + j) + blocks.pairs_offset + 4 * capacity
        for start in range(0, min(capacity, tokens - j * capacity), 16):
            slot = min(start, capacity - 16)
            at = 4 * (j * capacity + slot)
            store(scales + at, load_f16(pairs + 2 * slot))
            store(least + at, load_f16(pairs + 2 * (capacity + slot)))
    left = tokens % 16
    if left > 0:
        at = 4 * (tokens - left)
        store(scales + at, keep_first(load(scales + at), left, np.float32(0.0)))
        store(least + at, keep_first(load(least + at), left, np.float32(0.0)))


@compiled
def _weigh(p: int, groups: int, scales: int, least: int) -> float:
    """Turn weights into weights of codes; returns what the zero points add to every column."""
    total = zero()
    for at in range(0, 64 * groups, 64):
        weight = load(p + at)
        total = fma(weight, load(least + at), total)
        store(p + at, mul(weight, load(scales + at)))
    return sum_lanes(total)


@tile
def _spread(e: Emitter, vectors: Any, scalars: Any) -> Any:
    """Each vector's scalar in every lane, for both halves of a tile."""
    count = len(vectors) // 2
    return [e.splat(e.load(scalars, FLOAT, 4 * (m % count))) for m in range(2 * count)]


@tile
def _store_columns(e: Emitter, sums: Any, out: Any, half_bytes: Any) -> Any:
    """Write the sums of 16 columns of either half; vectors lie 1024 bytes apart."""
    count = len(sums) // 2
    for m in range(count):
        e.store(out, sums[m], 1024 * m)
        e.store(e.b.add(out, half_bytes), sums[count + m], 1024 * m)
    return sums


@compiled
def _weighted(sums: Any, bits: int, p: int, v: int, half: int, count: int, soon: int, step: int) -> Any:
    """Add `count` tokens' V, 16 columns of either half, weighted by `p` (vectors lie 1024 bytes apart); what
    is read `soon` is asked for meanwhile, `step` bytes further with each token.
    """
    if bits == 8:
        for i in range(count):
            prefetch(soon + i * step)
            row = v + 2 * half * i
            sums = _add_bytes(sums, p + 4 * i, p + 4 * i, 1024, row, row + half)
    else:
        for i in range(count):
            prefetch(soon + i * step)
            sums = _add_halves(sums, p + 4 * i, p + 4 * i, 1024, v + half * i)
    return sums


@compiled
def _prefetch_keys(blocks: CodeBlocks, index: int) -> None:
    block = code_block(blocks, index)
    for line in range(0, blocks.v_offset, 64):
        prefetch(block + line)
    _prefetch_key_pairs(blocks, index)


@compiled
def _prefetch_key_pairs(blocks: CodeBlocks, index: int) -> None:
    pairs = code_block(blocks, index) + blocks.pairs_offset
    for line in range(0, 4 * blocks.capacity, 64):
        prefetch(pairs + line)


@compiled
def _ahead(blocks: CodeBlocks, index: int, last: int) -> Ahead:
    """The V of a block, and the K of one further on: blocks lie anywhere, the processor cannot guess."""
    block, groups = code_block(blocks, index), (blocks.capacity + 15) // 16
    largest = max(blocks.v_offset, blocks.pairs_offset + 8 * blocks.capacity - blocks.v_offset)
    steps = groups * (blocks.head_dim // 2)
    return Ahead(
        code_block(blocks, min(index + BLOCKS_AHEAD, last)),
        block + blocks.v_offset,
        (largest + steps - 1) // steps,
    )


@compiled
def _attend_tile(
    empty: Any,
    blocks: CodeBlocks,
    queries: Queries,
    states: States,
    first: int,
    partition: int,
    next_partition: int,
    fresh: bool,
    cold: bool,
    scale: float,
) -> None:
    """One partition for a tile of vectors, folded into their states."""
    scores, q, columns, v_scales, v_zeros = stack(4096), stack(4096), stack(4096), stack(1024), stack(1024)
    totals, offsets, factors = stack(16), stack(16), stack(32)
    count, head_dim, capacity = len(empty) // 2, blocks.head_dim, blocks.capacity
    size = _partition_tokens(capacity)
    tokens, front = min(size, blocks.tokens - partition * size), partition * (size // capacity)
    next_front = next_partition * (size // capacity)
    end = (blocks.tokens + capacity - 1) // capacity
    num_blocks = (tokens + capacity - 1) // capacity
    if cold:
        for j in range(min(BLOCKS_AHEAD, num_blocks)):
            _prefetch_keys(blocks, front + j)
    gather(queries, first, count, head_dim, scale, q)
    sum_vectors(queries, first, count, head_dim, scale, totals)
    last = front + num_blocks - 1
    for j in range(num_blocks):
        seen, block = min(capacity, tokens - j * capacity), code_block(blocks, front + j)
        ahead = Ahead(block, block, 0)
        if cold:
            ahead = _ahead(blocks, front + j, last)
            _prefetch_key_pairs(blocks, min(front + j + BLOCKS_AHEAD, last))
        _store_block_scores(empty, blocks, block, seen, q, totals, scores + 4 * capacity * j, ahead)
    _load_v_pairs(blocks, front, tokens, v_scales, v_zeros)
    groups = (tokens + 15) // 16
    for m in range(count):
        state = state_of(states, first + m, queries.group)
        softmax(scores + 1024 * m, tokens, groups, state, factors + 8 * m, fresh)
        write(offsets + 4 * m, _weigh(scores + 1024 * m, groups, v_scales, v_zeros))
    half = head_dim // 2
    share = (blocks.v_offset + (half + 15) // 16 - 1) // ((half + 15) // 16)
    for start in range(0, half, 16):
        # The last 16 columns may overlap those before: the same numbers are computed again.
        column, sums = min(start, half - 16), _spread(empty, offsets)
        for j in range(num_blocks):
            values = code_block(blocks, front + j) + blocks.v_offset + column
            seen, soon, step = min(capacity, tokens - j * capacity), values, 0
            if cold and next_front + j < end:
                # Keys of the next partition, while values are read, or memory would be idle.
                soon = code_block(blocks, next_front + j) + start // 16 * share
                step = (share + capacity - 1) // capacity
            sums = _weighted(sums, blocks.v_bits, scores + 4 * capacity * j, values, half, seen, soon, step)
        _store_columns(sums, columns + 4 * column, 4 * half)
    for m in range(count):
        acc = state_of(states, first + m, queries.group) + 4 * STATE_HEAD
        for i in range(0, head_dim, 16):
            fold_values(
                columns + 1024 * m + 4 * i, acc + 4 * i, min(16, head_dim - i), factors + 8 * m, fresh
            )


@compiled
def _attend_vectors(
    blocks: CodeBlocks,
    queries: Queries,
    states: States,
    first: int,
    end: int,
    partition: int,
    next_partition: int,
    fresh: bool,
    scale: float,
) -> None:
    """One partition for vectors `first` to `end`, in tiles of half the height that registers hold."""
    start, tallest = first, attention_tile()
    height = len(tallest) // 2
    while first + height <= end:
        _attend_tile(
            tallest, blocks, queries, states, first, partition, next_partition, fresh, first == start, scale
        )
        first += height
    if first + 3 <= end:
        _attend_tile(
            zeros(6), blocks, queries, states, first, partition, next_partition, fresh, first == start, scale
        )
        first += 3
    if first + 2 <= end:
        _attend_tile(
            zeros(4), blocks, queries, states, first, partition, next_partition, fresh, first == start, scale
        )
        first += 2
    if first < end:
        _attend_tile(
            zeros(2), blocks, queries, states, first, partition, next_partition, fresh, first == start, scale
        )


class Pasts(NamedTuple):
    """The quantised tokens of one sequence and KV head."""

    words: int  # address of a count and `PAST_WORDS` each; 0 for none
    sequence: int
    head: int
    head_dim: int
    kv_heads: int
    layer: int
    block_bytes: int


@compiled
def attend_codes(
    pasts: Pasts,
    index: int,
    step: int,
    queries: Queries,
    states: States,
    first: int,
    end: int,
    fresh: bool,
    scale: float,
) -> None:
    """Partition `index` of the `num_quantised`, for vectors `first` to `end`; this thread is expected to go
    on with the one `step` later.
    """
    past = pasts.words + 8
    while index >= _partitions(past, pasts.sequence):
        index -= _partitions(past, pasts.sequence)
        past += 8 * PAST_WORDS
    blocks = code_blocks(
        past, pasts.sequence, pasts.head, pasts.head_dim, pasts.kv_heads, pasts.layer, pasts.block_bytes
    )
    _attend_vectors(blocks, queries, states, first, end, index, index + step, fresh, scale)
