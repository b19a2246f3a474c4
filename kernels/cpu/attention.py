"""Attention over blocks of 16 tokens: the committed past, and the present once it is packed into blocks.

A query vector is one (row, head). For a partition of 256 tokens it takes: scores, one chain over head_dim
each; their maximum; exp and sum; the weighted sum of V, one chain over tokens per output. Partitions are
folded in order: `state = (top, total, acc)`, `acc = fma(part, exp(top_part - top), acc * exp(top_old -
top))`. So a query's bits depend on its own tokens alone: not on the tile it is in, the number of rows, or
which thread folds.

Work is cut per sequence and KV head. Few vectors (decoding): one unit a partition, states are folded in a
second stage. Many vectors (a prefill chunk): one unit per 64 vectors, which folds as it goes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from .forms import FLOAT, INT16, LANES, Emitter
from .launch import real
from .vector import (
    F32,
    add,
    attention_tile,
    compiled,
    div,
    exp_falling,
    first_lane,
    fma,
    keep_first,
    load,
    load_bf16,
    load_f16,
    load_part,
    log,
    max_lanes,
    maximum,
    mul,
    prefetch,
    read,
    read_i32,
    read_i64,
    splat,
    stack,
    store,
    store_part,
    store_rows,
    sub,
    sum_lanes,
    tile,
    words,
    write,
    write_i32,
    zero,
    zeros,
)

PARTITION = 256
"""Tokens of a partition: 16 blocks; their scores for a tile of 8 vectors are 8 KB of stack."""

UNIT_VECTORS = 64
"""Above this many query vectors a sequence's units are cut by vectors, not by partitions."""

STATE_HEAD = 16
"""float32 before `acc` in a state: top, total, unused."""

MAX_HEAD_DIM = 256
MIN_HEAD_DIM = 32

F32_, BF16, F16 = range(3)
"""Element types of a block, as the kernel's argument."""

_INFINITY = np.float32(math.inf)


@tile
def _f32_scores(e: Emitter, sums: Any, q: Any, stride: Any, k: Any) -> Any:
    return _multiply(e, sums, q, stride, e.load(k, F32.llvm))


@tile
def _bf16_scores(e: Emitter, sums: Any, q: Any, stride: Any, k: Any) -> Any:
    return _multiply(e, sums, q, stride, e.from_bf16(e.load(k, ir.VectorType(INT16, LANES))))


@tile
def _f16_scores(e: Emitter, sums: Any, q: Any, stride: Any, k: Any) -> Any:
    return _multiply(e, sums, q, stride, e.from_f16(e.load(k, ir.VectorType(INT16, LANES))))


def _multiply(e: Emitter, sums: Any, scalars: Any, stride: Any, vector: Any) -> Any:
    """`sums[m] += scalars[m] * vector`; scalars are `stride` bytes apart."""
    return [
        e.fma(e.splat(e.load(e.row(scalars, stride, m), FLOAT)), vector, acc) for m, acc in enumerate(sums)
    ]


@compiled
def _scores(empty: Any, kind: int, q: int, head_dim: int, k: int) -> Any:
    """Scores of a tile's vectors (at `q`, `[head_dim, vectors]`) with the 16 tokens of a block."""
    sums = empty
    count = 4 * len(empty)
    if kind == BF16:
        for d in range(head_dim):
            sums = _bf16_scores(sums, q + d * count, 4, k + 32 * d)
    elif kind == F16:
        for d in range(head_dim):
            sums = _f16_scores(sums, q + d * count, 4, k + 32 * d)
    else:
        for d in range(head_dim):
            sums = _f32_scores(sums, q + d * count, 4, k + 64 * d)
    return sums


@compiled
def _weighted(sums: Any, kind: int, p: int, v: int, row_bytes: int, count: int) -> Any:
    """Add `count` tokens' V, 16 of its columns, weighted by `p` (a vector's lie 1024 bytes apart)."""
    if kind == BF16:
        for i in range(count):
            sums = _bf16_scores(sums, p + 4 * i, 1024, v + i * row_bytes)
    elif kind == F16:
        for i in range(count):
            sums = _f16_scores(sums, p + 4 * i, 1024, v + i * row_bytes)
    else:
        for i in range(count):
            sums = _f32_scores(sums, p + 4 * i, 1024, v + i * row_bytes)
    return sums


class Blocks(NamedTuple):
    """Keys and values of one sequence and KV head."""

    kind: int
    head_dim: int
    table: int  # address of int32 block ids
    base: int  # address of block 0's part of this head: K `[head_dim, 16]`, then V `[16, head_dim]`
    block_bytes: int
    element_bytes: int
    tokens: int


class Queries(NamedTuple):
    """Query vectors of one sequence and KV head: v is row `v // group`, head `v % group` of the group."""

    base: int
    row_bytes: int
    group: int
    vectors: int
    causal: bool  # row r sees the first r + 1 tokens


class States(NamedTuple):
    """Where the vectors' states are."""

    base: int
    row_bytes: int
    head_bytes: int


@compiled
def _state(states: States, vector: int, group: int) -> int:
    return states.base + vector // group * states.row_bytes + vector % group * states.head_bytes


@compiled
def _gather(queries: Queries, first: int, count: int, head_dim: int, scale: float, out: int) -> None:
    """Copy `count` query vectors, scaled, as `[head_dim, count]`."""
    for m in range(count):
        vector = first + m
        source = (
            queries.base + vector // queries.group * queries.row_bytes + vector % queries.group * head_dim * 4
        )
        for d in range(head_dim):
            write(out + (d * count + m) * 4, read(source + 4 * d) * scale)


@compiled
def _softmax(scores: int, count: int, num_blocks: int, state: int, factors: int, fresh: bool) -> None:
    """Turn a vector's scores into weights, update top and total of its state, leave the two factors of the
    fold.
    """
    whole = max(0, min(count // 16, num_blocks))
    tops = splat(-_INFINITY)
    for j in range(whole):
        tops = maximum(load(scores + 64 * j), tops)
    for j in range(whole, num_blocks):
        value = keep_first(load(scores + 64 * j), count - 16 * j, -_INFINITY)
        store(scores + 64 * j, value)
        tops = maximum(value, tops)
    peak = max_lanes(tops)
    subtracted, sums = splat(peak if peak > -_INFINITY else np.float32(0.0)), zero()
    for j in range(num_blocks):
        value = exp_falling(sub(load(scores + 64 * j), subtracted))
        store(scores + 64 * j, value)
        sums = add(sums, value)
    _fold_totals(state, peak, sum_lanes(sums), factors, fresh)


@compiled
def _fold_totals(state: int, peak: float, total: float, factors: int, fresh: bool) -> None:
    """Fold a part's top and total into a state; `factors` receives what the part's and the state's acc are
    scaled by.
    """
    old_peak = -_INFINITY if fresh else read(state)
    old_total = np.float32(0.0) if fresh else read(state + 4)
    highest = max(peak, old_peak)
    finite = highest if highest > -_INFINITY else np.float32(0.0)
    part_factor, old_factor = (
        first_lane(exp_falling(splat(peak - finite))),
        first_lane(exp_falling(splat(old_peak - finite))),
    )
    write(state, highest)
    write(state + 4, total * part_factor + old_total * old_factor)
    write(factors, part_factor)
    write(factors + 4, old_factor)


@compiled
def _fold_values(part: int, acc: int, count: int, factors: int, fresh: bool) -> None:
    """Fold `count` <= 16 columns of a part into a state's."""
    old = zero() if fresh else mul(load_part(acc, count), splat(read(factors + 4)))
    store_part(acc, fma(load_part(part, count), splat(read(factors)), old), count)


@compiled
def _attend_tile(
    empty: Any,
    blocks: Blocks,
    queries: Queries,
    states: States,
    first: int,
    partition: int,
    fresh: bool,
    cold: bool,
    scale: float,
) -> None:
    """One partition of the past or present for a tile of vectors, folded into their states."""
    scores, q, factors, part = stack(8 * 1024), stack(8 * 1024), stack(8 * 8), stack(8 * 128)
    count, head_dim = len(empty), blocks.head_dim
    start = partition * PARTITION
    tokens = min(PARTITION, blocks.tokens - start)
    if queries.causal:
        tokens = min(tokens, (first + count - 1) // queries.group + 1 - start)
    num_blocks = (tokens + 15) // 16
    table = blocks.table + start // 16 * 4
    row_bytes = head_dim * blocks.element_bytes
    _gather(queries, first, count, head_dim, scale, q)
    for j in range(num_blocks):
        block = blocks.base + read_i32(table + 4 * j) * blocks.block_bytes
        if cold:
            # Blocks lie anywhere, so the processor does not see the next one coming.
            ahead = blocks.base + read_i32(table + 4 * min(j + 1, num_blocks - 1)) * blocks.block_bytes
            for line in range(0, row_bytes * 16, 64):
                prefetch(ahead + line)
                prefetch(block + row_bytes * 16 + line)
        store_rows(_scores(empty, blocks.kind, q, head_dim, block), scores + 64 * j, 1024)
    for m in range(count):
        seen = tokens
        if queries.causal:
            seen = min(tokens, (first + m) // queries.group + 1 - start)
        _softmax(
            scores + 1024 * m,
            seen,
            num_blocks,
            _state(states, first + m, queries.group),
            factors + 8 * m,
            fresh,
        )
    values = blocks.base + row_bytes * 16
    for pair in range(0, head_dim, 32):
        # The last pair of 16 columns may overlap the one before: the same numbers are computed again.
        column = min(pair, head_dim - 32)
        at = values + column * blocks.element_bytes
        left, right = empty, empty
        for j in range(num_blocks):
            block = at + read_i32(table + 4 * j) * blocks.block_bytes
            seen = min(16, tokens - 16 * j)
            left = _weighted(left, blocks.kind, scores + 64 * j, block, row_bytes, seen)
            right = _weighted(
                right, blocks.kind, scores + 64 * j, block + 16 * blocks.element_bytes, row_bytes, seen
            )
        store_rows(left, part, 128)
        store_rows(right, part + 64, 128)
        done = pair - column
        for m in range(count):
            acc = _state(states, first + m, queries.group) + 4 * (STATE_HEAD + column)
            for i in range(done, 32, 16):
                _fold_values(part + 128 * m + 4 * i, acc + 4 * i, min(16, 32 - i), factors + 8 * m, fresh)


@compiled
def _attend_vectors(
    blocks: Blocks,
    queries: Queries,
    states: States,
    first: int,
    end: int,
    partition: int,
    fresh: bool,
    scale: float,
) -> None:
    """One partition for vectors `first` to `end`, in tiles."""
    start, tallest = first, attention_tile()
    while first + len(tallest) <= end:
        _attend_tile(tallest, blocks, queries, states, first, partition, fresh, first == start, scale)
        first += len(tallest)
    while first + 3 <= end:
        _attend_tile(zeros(3), blocks, queries, states, first, partition, fresh, first == start, scale)
        first += 3
    if first + 2 <= end:
        _attend_tile(zeros(2), blocks, queries, states, first, partition, fresh, first == start, scale)
        first += 2
    if first < end:
        _attend_tile(zeros(1), blocks, queries, states, first, partition, fresh, first == start, scale)


@compiled
def _num_partitions(tokens: int) -> int:
    return (tokens + PARTITION - 1) // PARTITION


@compiled
def _num_units(tokens: int, vectors: int) -> int:
    """Units of work of a sequence and KV head."""
    if vectors <= UNIT_VECTORS:
        return _num_partitions(tokens)
    return (vectors + UNIT_VECTORS - 1) // UNIT_VECTORS if tokens > 0 else 0


@compiled
def _num_states(tokens: int, vectors: int) -> int:
    """States of a query vector: one a partition, or one in all."""
    return _num_partitions(tokens) if vectors <= UNIT_VECTORS else min(1, tokens)


@compiled
def _widened(blocks: Blocks, partition: int, scratch: int) -> Blocks:
    """A partition copied to float32 blocks at `scratch`, side by side: worth it when many tiles read it."""
    start = partition * PARTITION // 16
    num_blocks = min(PARTITION // 16, (blocks.tokens + 15) // 16 - start)
    first, elements = scratch + 64, blocks.head_dim * 32
    for j in range(num_blocks):
        write_i32(scratch + 4 * j, j)
        source = blocks.base + read_i32(blocks.table + 4 * (start + j)) * blocks.block_bytes
        target = first + j * elements * 4
        for i in range(0, elements, 16):
            if blocks.kind == BF16:
                store(target + 4 * i, load_bf16(source + 2 * i))
            else:
                store(target + 4 * i, load_f16(source + 2 * i))
    return Blocks(F32_, blocks.head_dim, scratch - 4 * start, first, elements * 4, 4, blocks.tokens)


@compiled
def _attend_unit(
    unit: int, blocks: Blocks, queries: Queries, states: States, state_bytes: int, scratch: int, scale: float
) -> None:
    """One partition for all vectors, into its own states; or all partitions for 64 vectors, folded as they
    come.
    """
    first, end, begin, stop = 0, queries.vectors, unit, unit + 1
    base = states.base + unit * state_bytes
    if queries.vectors > UNIT_VECTORS:
        first = unit * UNIT_VECTORS
        end = min(first + UNIT_VECTORS, queries.vectors)
        begin = 0
        stop = _num_partitions((end - 1) // queries.group + 1 if queries.causal else blocks.tokens)
        base = states.base
    own = States(base, states.row_bytes, states.head_bytes)
    for partition in range(begin, stop):
        # Vectors before this one see nothing of the partition.
        seeing = max(first, partition * PARTITION * queries.group) if queries.causal else first
        near = blocks
        if queries.vectors > UNIT_VECTORS and blocks.kind != F32_:
            near = _widened(blocks, partition, scratch)
        _attend_vectors(near, queries, own, seeing, end, partition, partition == begin, scale)


def scratch_bytes(head_dim: int) -> int:
    """What a thread needs for `_widened`: block ids, then a partition in float32."""
    return 64 + PARTITION * head_dim * 8


_scratch_bytes = compiled(scratch_bytes)


def attend(args: int, part: int, parts: int) -> None:
    """Units of every sequence and KV head in turns, past and present.

    Args: q, its row stride, cu_rows, sequences, query heads, KV heads, head_dim, states; of the past: layer,
    block bytes, element bytes, element type, block table, its row stride, lengths (0: no past); of the
    present: packed blocks, their ids (0: no present); the last one is scratch memory. Real: what scores are
    scaled by.
    """
    q, q_bytes, cu_rows, sequences, heads, kv_heads, head_dim, states = words(args, 8)
    layer, block_bytes, element_bytes, kind, table, table_bytes, lengths, packed, ids = words(args + 64, 9)
    scale = np.float32(real(args))
    scratch = read_i64(args + 184) + part * _scratch_bytes(head_dim)
    group = heads // kv_heads
    state_bytes = 4 * (STATE_HEAD + head_dim)
    packed_bytes = head_dim * 128
    turn = 0
    for b in range(sequences):
        start = read_i32(cu_rows + 4 * b)
        rows = read_i32(cu_rows + 4 * b + 4) - start
        past = read_i32(lengths + 4 * b) if lengths != 0 else 0
        present = rows if ids != 0 else 0
        past_units, past_states = _num_units(past, rows * group), _num_states(past, rows * group)
        units = past_units + _num_units(present, rows * group)
        vector_bytes = (past_states + _num_states(present, rows * group)) * state_bytes
        for g in range(kv_heads):
            head = layer + g * head_dim * 32 * element_bytes
            own_table = table + b * table_bytes
            committed = Blocks(kind, head_dim, own_table, head, block_bytes, element_bytes, past)
            head, own_table = packed + g * packed_bytes, ids + (start // 16 + b) * 4
            fresh = Blocks(F32_, head_dim, own_table, head, kv_heads * packed_bytes, 4, present)
            base = states + g * group * vector_bytes
            for unit in range(units):
                if turn % parts == part:
                    causal = unit >= past_units
                    blocks = fresh if causal else committed
                    queries = Queries(
                        q + start * q_bytes + g * group * head_dim * 4, q_bytes, group, rows * group, causal
                    )
                    place = States(
                        base + past_states * state_bytes if causal else base,
                        heads * vector_bytes,
                        vector_bytes,
                    )
                    _attend_unit(
                        unit - past_units if causal else unit,
                        blocks,
                        queries,
                        place,
                        state_bytes,
                        scratch,
                        scale,
                    )
                turn += 1
        states += rows * heads * vector_bytes


@compiled
def _fold_vector(states: int, count: int, state_bytes: int, head_dim: int, out: int, lse: int) -> None:
    """Fold `count` states, write the normalised output, and the log-sum-exp unless `lse` is 0."""
    whole, factors = stack(4 * 272), stack(8)
    for i in range(count):
        state = states + i * state_bytes
        _fold_totals(whole, read(state), read(state + 4), factors, i == 0)
        for column in range(0, head_dim, 16):
            at = 4 * (STATE_HEAD + column)
            _fold_values(state + at, whole + at, min(16, head_dim - column), factors, i == 0)
    total = read(whole + 4) if count > 0 else np.float32(0.0)
    for column in range(0, head_dim, 16):
        left = min(16, head_dim - column)
        value = div(load_part(whole + 4 * (STATE_HEAD + column), left), splat(total)) if count > 0 else zero()
        store_part(out + 4 * column, value, left)
    if lse != 0:
        write(lse, read(whole) + first_lane(log(splat(total))) if count > 0 else -_INFINITY)


def fold(args: int, part: int, parts: int) -> None:
    """Fold each query vector's states in order. Args: those of `attend`, then out and log-sum-exp (0: not
    wanted).
    """
    _, _, cu_rows, sequences, heads, kv_heads, head_dim, states = words(args, 8)
    lengths, _, ids, out, lse = words(args + 112, 5)
    group = heads // kv_heads
    state_bytes = 4 * (STATE_HEAD + head_dim)
    all_rows = read_i32(cu_rows + 4 * sequences)
    first, end = all_rows * part // parts, all_rows * (part + 1) // parts
    for b in range(sequences):
        start = read_i32(cu_rows + 4 * b)
        rows = read_i32(cu_rows + 4 * b + 4) - start
        past = read_i32(lengths + 4 * b) if lengths != 0 else 0
        count = _num_states(past, rows * group) + (_num_states(rows, rows * group) if ids != 0 else 0)
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


def pack_present(args: int, part: int, parts: int) -> None:
    """Lay a step's keys and values out in float32 blocks of 16 tokens, each sequence from a block of its own.

    Args: those of `attend` and `fold`; k and its row stride, v and its row stride come last.
    """
    _, _, cu_rows, sequences, _, kv_heads, head_dim = words(args, 7)
    packed, ids, _, _, k, k_bytes, v, v_bytes = words(args + 120, 8)
    turn = 0
    for b in range(sequences):
        start, end = read_i32(cu_rows + 4 * b), read_i32(cu_rows + 4 * b + 4)
        for row in range(start, end, 16):
            block = start // 16 + b + (row - start) // 16
            if turn % parts == part:
                write_i32(ids + 4 * block, block)
                for g in range(kv_heads):
                    target = packed + (block * kv_heads + g) * head_dim * 128
                    _pack_block(
                        k + row * k_bytes + g * head_dim * 4,
                        k_bytes,
                        v + row * v_bytes + g * head_dim * 4,
                        v_bytes,
                        min(16, end - row),
                        head_dim,
                        target,
                    )
            turn += 1


@compiled
def _pack_block(k: int, k_bytes: int, v: int, v_bytes: int, count: int, head_dim: int, target: int) -> None:
    """K transposed, V as it is; slots beyond `count` keep what was there, no one looks."""
    values = target + head_dim * 64
    for i in range(count):
        for d in range(head_dim):
            write(target + 64 * d + 4 * i, read(k + i * k_bytes + 4 * d))
        for d in range(0, head_dim, 8):
            for j in range(8):
                write(values + 4 * (i * head_dim + d + j), read(v + i * v_bytes + 4 * (d + j)))
