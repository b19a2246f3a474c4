"""Query vectors and what attention keeps of each while it goes through keys: the state of an online softmax.

`state = (top, total, acc)`: the largest score so far, the sum of weights relative to it, and the weighted sum
of V.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .vector import (
    add,
    compiled,
    exp_falling,
    first_lane,
    fma,
    keep_first,
    load,
    load_part,
    max_lanes,
    maximum,
    mul,
    read,
    splat,
    store,
    store_part,
    sub,
    sum_lanes,
    write,
    zero,
)

PARTITION = 256
"""Tokens of a partition: 16 blocks; their scores for a tile of 8 vectors are 8 KB of stack."""

UNIT_VECTORS = 64
"""Above this many query vectors a sequence's units are cut by vectors, not by partitions."""

STATE_HEAD = 16
"""float32 before `acc` in a state: top, total, unused."""

INFINITY = np.float32(math.inf)


class Queries(NamedTuple):
    """Query vectors of one sequence and KV head: v is row `v // group`, head `v % group` of the group."""

    base: int
    row_bytes: int
    group: int
    vectors: int
    offset: int  # position of row 0
    causal: bool  # row r sees the positions up to its own, `offset + r`; else all rows see all


class States(NamedTuple):
    """Where the vectors' states are."""

    base: int
    row_bytes: int
    head_bytes: int


@compiled
def state_of(states: States, vector: int, group: int) -> int:
    """The address of a vector's state."""
    return states.base + vector // group * states.row_bytes + vector % group * states.head_bytes


@compiled
def query_of(queries: Queries, vector: int, head_dim: int) -> int:
    """The address of a query vector."""
    row, head = vector // queries.group, vector % queries.group
    return queries.base + row * queries.row_bytes + head * head_dim * 4


@compiled
def gather(queries: Queries, first: int, count: int, head_dim: int, scale: float, out: int) -> None:
    """Copy `count` query vectors, scaled, as `[head_dim, count]`."""
    for m in range(count):
        source = query_of(queries, first + m, head_dim)
        for d in range(head_dim):
            write(out + (d * count + m) * 4, read(source + 4 * d) * scale)


@compiled
def softmax(scores: int, count: int, num_blocks: int, state: int, factors: int, fresh: bool) -> None:
    """Turn a vector's scores into weights, update top and total of its state, leave the two factors of the
    fold.
    """
    whole = max(0, min(count // 16, num_blocks))
    tops = splat(-INFINITY)
    for j in range(whole):
        tops = maximum(load(scores + 64 * j), tops)
    for j in range(whole, num_blocks):
        value = keep_first(load(scores + 64 * j), count - 16 * j, -INFINITY)
        store(scores + 64 * j, value)
        tops = maximum(value, tops)
    peak = max_lanes(tops)
    subtracted, sums = splat(peak if peak > -INFINITY else np.float32(0.0)), zero()
    for j in range(num_blocks):
        value = exp_falling(sub(load(scores + 64 * j), subtracted))
        store(scores + 64 * j, value)
        sums = add(sums, value)
    fold_totals(state, peak, sum_lanes(sums), factors, fresh)


@compiled
def fold_totals(state: int, peak: float, total: float, factors: int, fresh: bool) -> None:
    """Fold a part's top and total into a state; `factors` receives what the part's and the state's acc are
    scaled by.
    """
    old_peak = -INFINITY if fresh else read(state)
    old_total = np.float32(0.0) if fresh else read(state + 4)
    highest = max(peak, old_peak)
    finite = highest if highest > -INFINITY else np.float32(0.0)
    part_factor, old_factor = (
        first_lane(exp_falling(splat(peak - finite))),
        first_lane(exp_falling(splat(old_peak - finite))),
    )
    write(state, highest)
    write(state + 4, total * part_factor + old_total * old_factor)
    write(factors, part_factor)
    write(factors + 4, old_factor)


@compiled
def fold_values(part: int, acc: int, count: int, factors: int, fresh: bool) -> None:
    """Fold `count` <= 16 columns of a part into a state's."""
    old = zero() if fresh else mul(load_part(acc, count), splat(read(factors + 4)))
    store_part(acc, fma(load_part(part, count), splat(read(factors)), old), count)


@compiled
def clear_states(states: States, first: int, end: int, group: int, head_dim: int) -> None:
    """The states of vectors that see nothing of a partition: folding them changes nothing."""
    for vector in range(first, end):
        state = state_of(states, vector, group)
        write(state, -INFINITY)
        for i in range(4, 4 * (STATE_HEAD + head_dim), 4):
            write(state + i, np.float32(0.0))


@compiled
def num_partitions(tokens: int) -> int:
    """Partitions of tokens in full precision."""
    return (tokens + PARTITION - 1) // PARTITION


@compiled
def num_states(quantised: int, tokens: int, vectors: int) -> int:
    """States of a query vector: one a partition, quantised ones first, or one in all."""
    count = quantised + num_partitions(tokens)
    return count if vectors <= UNIT_VECTORS else min(1, count)
