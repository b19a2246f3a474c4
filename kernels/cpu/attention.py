"""Attention over blocks of 16 tokens: the committed past, then the present, in order of position.

A query vector is one (row, head). For a partition of 256 positions it takes: scores, one chain over head_dim
each; their maximum; exp and sum; the weighted sum of V, one chain over tokens per output. Partitions are
folded in order: `state = (top, total, acc)`, `acc = fma(part, exp(top_part - top), acc * exp(top_old -
top))`. Where the past ends and the present begins changes nothing: the block that both share is packed into
float32 with the present's, so every partition holds the same numbers in the same places. So a query's bits
depend on its position and its own tokens alone: not on how the prompt was cut into steps, the tile it is in,
the number of rows, or which thread folds.

Work is cut per sequence and KV head. Few vectors (decoding): one unit a partition, states are folded in a
second stage. Many vectors (a prefill chunk): one unit per 64 vectors, which folds as it goes. Tokens in
quantised formats (`quantised.py`) are partitions of their own, which come first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from .forms import FLOAT, INT16, LANES, Emitter
from .launch import real
from .present import BF16, F16, F32_, first_packed, widen
from .quantised import Pasts, attend_codes, num_quantised
from .states import (
    INFINITY,
    PARTITION,
    STATE_HEAD,
    UNIT_VECTORS,
    Queries,
    States,
    clear_states,
    fold_totals,
    fold_values,
    gather,
    num_partitions,
    num_states,
    softmax,
    state_of,
)
from .vector import (
    F32,
    attention_tile,
    compiled,
    div,
    first_lane,
    load_part,
    log,
    prefetch,
    read,
    read_i32,
    read_i64,
    splat,
    stack,
    store_part,
    store_rows,
    tile,
    words,
    write,
    zero,
    zeros,
)

MAX_HEAD_DIM = 256
MIN_HEAD_DIM = 32

BLOCKS_AHEAD = 4
"""How many blocks before its use K is asked for. Blocks lie anywhere, so the processor does not see the next
one coming, and one is multiplied faster than it comes from memory.
"""


@tile
def _f32score_block(e: Emitter, sums: Any, q: Any, stride: Any, k: Any) -> Any:
    return _multiply(e, sums, q, stride, e.load(k, F32.llvm))


@tile
def _bf16score_block(e: Emitter, sums: Any, q: Any, stride: Any, k: Any) -> Any:
    return _multiply(e, sums, q, stride, e.from_bf16(e.load(k, ir.VectorType(INT16, LANES))))


@tile
def _f16score_block(e: Emitter, sums: Any, q: Any, stride: Any, k: Any) -> Any:
    return _multiply(e, sums, q, stride, e.from_f16(e.load(k, ir.VectorType(INT16, LANES))))


def _multiply(e: Emitter, sums: Any, scalars: Any, stride: Any, vector: Any) -> Any:
    """`sums[m] += scalars[m] * vector`; scalars are `stride` bytes apart."""
    return [
        e.fma(e.splat(e.load(e.row(scalars, stride, m), FLOAT)), vector, acc) for m, acc in enumerate(sums)
    ]


@compiled
def score_block(empty: Any, kind: int, q: int, head_dim: int, k: int) -> Any:
    """Scores of a tile's vectors (at `q`, `[head_dim, vectors]`) with the 16 tokens of a block."""
    return _score_block(empty, kind, q, head_dim, k, k, k)


@compiled
def _score_block(empty: Any, kind: int, q: int, head_dim: int, k: int, soon: int, later: int) -> Any:
    """The same, while halves of blocks that are read soon and later are asked for: line by line, since a
    burst of requests would stall.
    """
    sums = empty
    count = 4 * len(empty)
    if kind == BF16:
        for d in range(head_dim):
            prefetch(soon + 32 * d)
            prefetch(later + 32 * d)
            sums = _bf16score_block(sums, q + d * count, 4, k + 32 * d)
    elif kind == F16:
        for d in range(head_dim):
            prefetch(soon + 32 * d)
            prefetch(later + 32 * d)
            sums = _f16score_block(sums, q + d * count, 4, k + 32 * d)
    else:
        for d in range(head_dim):
            prefetch(soon + 64 * d)
            prefetch(later + 64 * d)
            sums = _f32score_block(sums, q + d * count, 4, k + 64 * d)
    return sums


@compiled
def _weighted(sums: Any, kind: int, p: int, v: int, row_bytes: int, count: int) -> Any:
    """Add `count` tokens' V, 16 of its columns, weighted by `p` (a vector's lie 1024 bytes apart)."""
    if kind == BF16:
        for i in range(count):
            sums = _bf16score_block(sums, p + 4 * i, 1024, v + i * row_bytes)
    elif kind == F16:
        for i in range(count):
            sums = _f16score_block(sums, p + 4 * i, 1024, v + i * row_bytes)
    else:
        for i in range(count):
            sums = _f32score_block(sums, p + 4 * i, 1024, v + i * row_bytes)
    return sums


class Blocks(NamedTuple):
    """Keys and values of one sequence and KV head: cached blocks, then packed ones side by side.

    A block is K `[head_dim, 16]`, then V `[16, head_dim]`; in packed ones both are float32.
    """

    head_dim: int
    tokens: int
    num_cached: int
    kind: int  # element type of cached blocks
    element_bytes: int
    table: int  # address of int32 ids of cached blocks
    base: int  # address of this head's part of cached block 0
    block_bytes: int
    packed: int  # address of this head's part of the first packed block
    packed_bytes: int


class Ahead(NamedTuple):
    """Cached blocks that a thread reads after those it is at."""

    table: int  # address of their int32 ids
    base: int  # address of their head's part of cached block 0
    block_bytes: int
    num_blocks: int


@compiled
def _prefetch_ahead(ahead: Ahead, index: int, column: int) -> None:
    """Ask for keys while values are read, or memory would be idle: a pair of V's columns has its own 16 lines
    of a block.
    """
    if index < ahead.num_blocks:
        begin = ahead.base + read_i32(ahead.table + 4 * index) * ahead.block_bytes + 32 * column
        for line in range(0, 16 * 64, 64):
            prefetch(begin + line)


@compiled
def _block(blocks: Blocks, index: int) -> int:
    if index < blocks.num_cached:
        return blocks.base + read_i32(blocks.table + 4 * index) * blocks.block_bytes
    return blocks.packed + (index - blocks.num_cached) * blocks.packed_bytes


@compiled
def _element_bytes(blocks: Blocks, index: int) -> int:
    return blocks.element_bytes if index < blocks.num_cached else 4


@compiled
def _kind(blocks: Blocks, index: int) -> int:
    return blocks.kind if index < blocks.num_cached else F32_


@compiled
def _prefetch_keys(blocks: Blocks, index: int) -> None:
    begin = _block(blocks, index)
    for line in range(0, blocks.head_dim * 16 * _element_bytes(blocks, index), 64):
        prefetch(begin + line)


@compiled
def _num_seen(blocks: Blocks, queries: Queries, vector: int) -> int:
    """Tokens that a vector sees."""
    if queries.causal:
        return min(blocks.tokens, queries.offset + vector // queries.group + 1)
    return blocks.tokens


@compiled
def _attend_tile(
    empty: Any,
    blocks: Blocks,
    queries: Queries,
    states: States,
    ahead: Ahead,
    first: int,
    partition: int,
    fresh: bool,
    cold: bool,
    scale: float,
) -> None:
    """One partition for a tile of vectors, folded into their states."""
    scores, q, factors, part = stack(8 * 1024), stack(8 * 1024), stack(8 * 8), stack(8 * 128)
    count, head_dim = len(empty), blocks.head_dim
    start = partition * PARTITION
    tokens = min(PARTITION, _num_seen(blocks, queries, first + count - 1) - start)
    num_blocks = (tokens + 15) // 16
    front = start // 16
    gather(queries, first, count, head_dim, scale, q)
    if cold:
        for j in range(min(BLOCKS_AHEAD, num_blocks)):
            _prefetch_keys(blocks, front + j)
    for j in range(num_blocks):
        block = _block(blocks, front + j)
        kind, soon, later = _kind(blocks, front + j), block, block
        if cold:
            soon = _block(blocks, front + min(j + BLOCKS_AHEAD, num_blocks - 1))
            later = block + head_dim * 16 * _element_bytes(blocks, front + j)
        store_rows(_score_block(empty, kind, q, head_dim, block, soon, later), scores + 64 * j, 1024)
    for m in range(count):
        softmax(
            scores + 1024 * m,
            min(tokens, _num_seen(blocks, queries, first + m) - start),
            num_blocks,
            state_of(states, first + m, queries.group),
            factors + 8 * m,
            fresh,
        )
    for pair in range(0, head_dim, 32):
        # The last pair of 16 columns may overlap the one before: the same numbers are computed again.
        column = min(pair, head_dim - 32)
        left, right = empty, empty
        for j in range(num_blocks):
            kind, width = _kind(blocks, front + j), _element_bytes(blocks, front + j)
            values = _block(blocks, front + j) + (16 * head_dim + column) * width
            row_bytes, seen = head_dim * width, min(16, tokens - 16 * j)
            if cold:
                _prefetch_ahead(ahead, j, pair)
            left = _weighted(left, kind, scores + 64 * j, values, row_bytes, seen)
            right = _weighted(right, kind, scores + 64 * j, values + 16 * width, row_bytes, seen)
        store_rows(left, part, 128)
        store_rows(right, part + 64, 128)
        done = pair - column
        for m in range(count):
            acc = state_of(states, first + m, queries.group) + 4 * (STATE_HEAD + column)
            for i in range(done, 32, 16):
                fold_values(part + 128 * m + 4 * i, acc + 4 * i, min(16, 32 - i), factors + 8 * m, fresh)


@compiled
def _attend_vectors(
    blocks: Blocks,
    queries: Queries,
    states: States,
    ahead: Ahead,
    first: int,
    end: int,
    partition: int,
    fresh: bool,
    scale: float,
) -> None:
    """One partition for vectors `first` to `end`, in tiles."""
    start, tallest = first, attention_tile()
    while first + len(tallest) <= end:
        _attend_tile(tallest, blocks, queries, states, ahead, first, partition, fresh, first == start, scale)
        first += len(tallest)
    while first + 3 <= end:
        _attend_tile(zeros(3), blocks, queries, states, ahead, first, partition, fresh, first == start, scale)
        first += 3
    if first + 2 <= end:
        _attend_tile(zeros(2), blocks, queries, states, ahead, first, partition, fresh, first == start, scale)
        first += 2
    if first < end:
        _attend_tile(zeros(1), blocks, queries, states, ahead, first, partition, fresh, first == start, scale)


@compiled
def _num_units(quantised: int, tokens: int, vectors: int) -> int:
    """Units of work of a sequence and KV head."""
    count = quantised + num_partitions(tokens)
    if vectors <= UNIT_VECTORS:
        return count
    return (vectors + UNIT_VECTORS - 1) // UNIT_VECTORS if count > 0 else 0


@compiled
def _widened(blocks: Blocks, partition: int, scratch: int) -> Blocks:
    """A partition copied to float32 blocks side by side: worth it when many tiles read it."""
    head_dim, front = blocks.head_dim, partition * PARTITION // 16
    num_blocks = min(PARTITION // 16, (blocks.tokens + 15) // 16 - front)
    packed_bytes = head_dim * 128
    for j in range(num_blocks):
        widen(_block(blocks, front + j), _kind(blocks, front + j), head_dim, scratch + j * packed_bytes)
    return Blocks(head_dim, blocks.tokens, front, F32_, 4, 0, 0, 0, scratch, packed_bytes)


@compiled
def _attend_partition(
    partition: int,
    blocks: Blocks,
    queries: Queries,
    states: States,
    ahead: Ahead,
    first: int,
    end: int,
    fresh: bool,
    scratch: int,
    scale: float,
) -> None:
    """One partition in full precision for vectors `first` to `end`; no `scratch` (0): few tiles read it."""
    start, seeing = partition * PARTITION, first
    if queries.causal:
        # Vectors before this one see nothing of the partition.
        seeing = min(end, max(first, (start - queries.offset) * queries.group))
    if fresh:
        clear_states(states, first, seeing, queries.group, blocks.head_dim)
    near = blocks
    if scratch != 0 and blocks.kind != F32_ and start // 16 < blocks.num_cached:
        near = _widened(blocks, partition, scratch)
    _attend_vectors(near, queries, states, ahead, seeing, end, partition, fresh, scale)


@compiled
def _attend_unit(
    unit: int,
    pasts: Pasts,
    blocks: Blocks,
    queries: Queries,
    states: States,
    ahead: Ahead,
    parts: int,
    state_bytes: int,
    scratch: int,
    scale: float,
) -> None:
    """One partition for all vectors, into its own states; or all partitions for 64 vectors, folded as they
    come. Partitions in quantised formats are the first.
    """
    quantised = num_quantised(pasts.words, pasts.sequence)
    is_cut_by_vectors = queries.vectors > UNIT_VECTORS
    first, end, begin, stop, step = 0, queries.vectors, unit, unit + 1, parts
    own = States(states.base + unit * state_bytes, states.row_bytes, states.head_bytes)
    if is_cut_by_vectors:
        first = unit * UNIT_VECTORS
        end = min(first + UNIT_VECTORS, queries.vectors)
        begin, stop = 0, quantised + num_partitions(_num_seen(blocks, queries, end - 1))
        own, step = states, 1
    for partition in range(begin, stop):
        fresh = partition == begin
        if partition < quantised:
            attend_codes(pasts, partition, step, queries, own, first, end, fresh, scale)
        else:
            shared = scratch if is_cut_by_vectors else 0
            _attend_partition(
                partition - quantised, blocks, queries, own, ahead, first, end, fresh, shared, scale
            )


def scratch_bytes(head_dim: int) -> int:
    """What a thread needs for `_widened`: a partition in float32."""
    return PARTITION * head_dim * 8


_scratch_bytes = compiled(scratch_bytes)


@compiled
def _num_tokens(past: int, rows: int, packed: int) -> int:
    return past + rows if packed != 0 else past


def attend(args: int, part: int, parts: int) -> None:
    """Units of every sequence and KV head in turns.

    Args: q, its row stride, cu_rows, sequences, query heads, KV heads, head_dim, states; of the past: layer,
    block bytes, element bytes, element type, block table, its row stride, lengths (0: no past); packed
    blocks of the present (0: no present, and all rows see all of the past); args 22: scratch memory, 23: the
    quantised past (see quantised.py). Real: what scores are scaled by.
    """
    q, q_bytes, cu_rows, sequences, heads, kv_heads, head_dim, states = words(args, 8)
    layer, block_bytes, element_bytes, kind, table, table_bytes, lengths, packed = words(args + 64, 8)
    scale = np.float32(real(args))
    scratch = read_i64(args + 176) + part * _scratch_bytes(head_dim)
    group = heads // kv_heads
    state_bytes = 4 * (STATE_HEAD + head_dim)
    packed_bytes = head_dim * 128
    head_bytes = head_dim * 32 * element_bytes
    turn = 0
    for b in range(sequences):
        start = read_i32(cu_rows + 4 * b)
        rows = read_i32(cu_rows + 4 * b + 4) - start
        past = read_i32(lengths + 4 * b) if lengths != 0 else 0
        tokens = _num_tokens(past, rows, packed)
        quantised = num_quantised(read_i64(args + 184), b)
        units = _num_units(quantised, tokens, rows * group)
        vector_bytes = num_states(quantised, tokens, rows * group) * state_bytes
        for g in range(kv_heads):
            blocks = Blocks(
                head_dim,
                tokens,
                past // 16 if packed != 0 else (past + 15) // 16,
                kind,
                element_bytes,
                table + b * table_bytes,
                layer + g * head_bytes,
                block_bytes,
                packed + (first_packed(start, b) * kv_heads + g) * packed_bytes,
                kv_heads * packed_bytes,
            )
            queries = Queries(
                q + start * q_bytes + g * group * head_dim * 4,
                q_bytes,
                group,
                rows * group,
                past,
                packed != 0,
            )
            pasts = Pasts(read_i64(args + 184), b, g, head_dim, kv_heads, layer, block_bytes)
            place = States(states + g * group * vector_bytes, heads * vector_bytes, vector_bytes)
            for unit in range(units):
                if turn % parts == part:
                    row, after = b, g * units + unit + parts
                    if after >= kv_heads * units and b + 1 < sequences and lengths != 0:
                        # As many units are expected of the next sequence.
                        row, after = b + 1, after - kv_heads * units
                    partition = after % units - quantised
                    ahead = Ahead(
                        table + row * table_bytes + 64 * partition,
                        layer + after // units * head_bytes,
                        block_bytes,
                        read_i32(lengths + 4 * row) // 16 - 16 * partition
                        if lengths != 0 and partition >= 0 and after < kv_heads * units
                        else 0,
                    )
                    _attend_unit(
                        unit, pasts, blocks, queries, place, ahead, parts, state_bytes, scratch, scale
                    )
                turn += 1
        states += rows * heads * vector_bytes


@compiled
def _fold_vector(states: int, count: int, state_bytes: int, head_dim: int, out: int, lse: int) -> None:
    """Fold `count` states, write the normalised output, and the log-sum-exp unless `lse` is 0."""
    whole, factors = stack(4 * 272), stack(8)
    for i in range(count):
        state = states + i * state_bytes
        fold_totals(whole, read(state), read(state + 4), factors, i == 0)
        for column in range(0, head_dim, 16):
            at = 4 * (STATE_HEAD + column)
            fold_values(state + at, whole + at, min(16, head_dim - column), factors, i == 0)
    total = read(whole + 4) if count > 0 else np.float32(0.0)
    for column in range(0, head_dim, 16):
        left = min(16, head_dim - column)
        value = div(load_part(whole + 4 * (STATE_HEAD + column), left), splat(total)) if count > 0 else zero()
        store_part(out + 4 * column, value, left)
    if lse != 0:
        write(lse, read(whole) + first_lane(log(splat(total))) if count > 0 else -INFINITY)


def fold(args: int, part: int, parts: int) -> None:
    """Fold each query vector's states in order. Args: those of `attend`, then out and log-sum-exp (0: not
    wanted).
    """
    _, _, cu_rows, sequences, heads, kv_heads, head_dim, states = words(args, 8)
    lengths, packed, out, lse = words(args + 112, 4)
    group = heads // kv_heads
    state_bytes = 4 * (STATE_HEAD + head_dim)
    all_rows = read_i32(cu_rows + 4 * sequences)
    first, end = all_rows * part // parts, all_rows * (part + 1) // parts
    for b in range(sequences):
        start = read_i32(cu_rows + 4 * b)
        rows = read_i32(cu_rows + 4 * b + 4) - start
        past = read_i32(lengths + 4 * b) if lengths != 0 else 0
        quantised = num_quantised(read_i64(args + 184), b)
        count = num_states(quantised, _num_tokens(past, rows, packed), rows * group)
        for row in range(max(start, first), min(start + rows, end)):
            for head in range(heads):
                own = states + ((row - start) * heads + head) * count * state_bytes
                at = row * heads + head
                _fold_vector(
                    own,
                    count,
                    state_bytes,
                    head_dim,
                    out + at * head_dim * 4,
                    lse + 4 * at if lse != 0 else 0,
                )
        states += rows * heads * count * state_bytes
