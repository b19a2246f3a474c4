"""The share of attention that each token received from observed rows: scores again, for few rows.

Query heads are added in order, so that a token's mass is one chain of additions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .attention import score_block
from .launch import real
from .quantised import CodeBlocks, code_block, code_blocks, store_block_scores, sum_vectors
from .states import Queries, gather
from .vector import (
    add,
    compiled,
    exp_falling,
    fma,
    load,
    load_part,
    read,
    read_i32,
    splat,
    stack,
    store_part,
    store_rows,
    sub,
    sum_lanes,
    words,
    write,
    zero,
    zeros,
)


@compiled
def _add_mass(scores: int, count: int, lse: float, out: int) -> None:
    """Add `exp(score - lse)` of `count` tokens."""
    for i in range(0, count, 16):
        left = min(16, count - i)
        share = exp_falling(sub(load(scores + 4 * i), splat(lse)))
        store_part(out + 4 * i, add(load_part(out + 4 * i, left), share), left)


@compiled
def _add_past_mass(
    empty: Any,
    empty_codes: Any,
    blocks: CodeBlocks,
    full_kind: int,
    queries: Queries,
    first: int,
    lse: int,
    out: int,
    scale: float,
) -> None:
    """Add the mass of a tile's vectors from `first` on, with tokens in any format."""
    vectors, totals, scores = stack(4096), stack(16), stack(4096)
    count, capacity = len(empty), blocks.capacity
    gather(queries, first, count, blocks.head_dim, scale, vectors)
    sum_vectors(queries, first, count, blocks.head_dim, scale, totals)
    for start in range(0, blocks.tokens, capacity):
        seen, block = min(capacity, blocks.tokens - start), code_block(blocks, start // capacity)
        if blocks.k_bits == 16:
            store_rows(score_block(empty, full_kind, vectors, blocks.head_dim, block), scores, 1024)
        else:
            store_block_scores(empty_codes, blocks, block, seen, vectors, totals, scores)
        for m in range(count):
            _add_mass(scores + 1024 * m, seen, read(lse + 4 * (first + m)), out + 4 * start)


def past_mass(args: int, part: int, parts: int) -> None:
    """Every observed row and KV head in turns.

    Args: q, its row stride, observed rows and their sequences (int32), their number, query heads, KV heads,
    head_dim; layer, block bytes, element type where numbers are not quantised, log-sum-exp `[rows, query
    heads]`, out `[observed, KV heads]` (added to) and the bytes of its rows; the past's words as in
    quantised.py. Real: what scores are scaled by.
    """
    q, q_bytes, rows, sequences, observed, heads, kv_heads, head_dim = words(args, 8)
    layer, block_bytes, kind, lse, out, out_bytes = words(args + 64, 6)
    past, group = args + 112, heads // kv_heads
    scale = np.float32(real(args))
    for unit in range(observed * kv_heads * part // parts, observed * kv_heads * (part + 1) // parts):
        row, g = read_i32(rows + 4 * (unit // kv_heads)), unit % kv_heads
        sequence = read_i32(sequences + 4 * (unit // kv_heads))
        blocks = code_blocks(past, sequence, g, head_dim, kv_heads, layer, block_bytes)
        base, weights = q + row * q_bytes + g * group * head_dim * 4, lse + 4 * (row * heads + g * group)
        queries, target, m = Queries(base, q_bytes, group, group, 0, False), out + unit * out_bytes, 0
        while m + 3 <= group:
            _add_past_mass(zeros(3), zeros(6), blocks, kind, queries, m, weights, target, scale)
            m += 3
        while m < group:
            _add_past_mass(zeros(1), zeros(2), blocks, kind, queries, m, weights, target, scale)
            m += 1


@compiled
def _dot(q: int, k: int, head_dim: int) -> float:
    total = zero()
    for i in range(0, head_dim, 16):
        left = min(16, head_dim - i)
        total = fma(load_part(q + 4 * i, left), load_part(k + 4 * i, left), total)
    return sum_lanes(total)


def present_mass(args: int, part: int, parts: int) -> None:
    """Every observed row and KV head in turns.

    Args: those of `past_mass` up to head_dim; k, its row stride, cu_rows, log-sum-exp, out, the bytes of its
    rows. Real: what scores are scaled by.
    """
    q, q_bytes, rows, sequences, observed, heads, kv_heads, head_dim = words(args, 8)
    k, k_bytes, cu_rows, lse, out, out_bytes = words(args + 64, 6)
    group, scores, scale = heads // kv_heads, stack(1024), np.float32(real(args))
    for unit in range(observed * kv_heads * part // parts, observed * kv_heads * (part + 1) // parts):
        row, g = read_i32(rows + 4 * (unit // kv_heads)), unit % kv_heads
        begin = read_i32(cu_rows + 4 * read_i32(sequences + 4 * (unit // kv_heads)))
        for head in range(g * group, (g + 1) * group):
            vector, weight = q + row * q_bytes + head * head_dim * 4, read(lse + 4 * (row * heads + head))
            for start in range(begin, row + 1, 256):
                seen = min(256, row + 1 - start)
                for i in range(seen):
                    key = k + (start + i) * k_bytes + g * head_dim * 4
                    write(scores + 4 * i, _dot(vector, key, head_dim) * scale)
                _add_mass(scores, seen, weight, out + unit * out_bytes + 4 * (start - begin))
