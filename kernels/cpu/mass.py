"""The share of attention that each token received from observed rows: scores again, for few rows.

Query heads are taken one at a time and added in order, so that a token's mass is one chain of additions.
"""

from __future__ import annotations

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
def _scores_of_block(
    blocks: CodeBlocks, index: int, seen: int, full_kind: int, q: int, total: int, scores: int
) -> None:
    """Scores of one vector with the first tokens of a block in any format."""
    block = code_block(blocks, index)
    if blocks.k_bits == 16:
        store_rows(score_block(zeros(1), full_kind, q, blocks.head_dim, block), scores, 1024)
    else:
        store_block_scores(zeros(2), blocks, block, seen, q, total, scores)


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
    vector, total, scores = stack(1024), stack(4), stack(1024)
    for unit in range(observed * kv_heads * part // parts, observed * kv_heads * (part + 1) // parts):
        row, g = read_i32(rows + 4 * (unit // kv_heads)), unit % kv_heads
        sequence = read_i32(sequences + 4 * (unit // kv_heads))
        blocks = code_blocks(past, sequence, g, head_dim, kv_heads, layer, block_bytes)
        first = g * group
        queries = Queries(q + row * q_bytes + first * head_dim * 4, q_bytes, group, group, 0, False)
        for m in range(group):
            gather(queries, m, 1, head_dim, np.float32(real(args)), vector)
            sum_vectors(vector, 1, head_dim, total)
            weight = read(lse + 4 * (row * heads + first + m))
            for start in range(0, blocks.tokens, blocks.capacity):
                seen = min(blocks.capacity, blocks.tokens - start)
                _scores_of_block(blocks, start // blocks.capacity, seen, kind, vector, total, scores)
                _add_mass(scores, seen, weight, out + unit * out_bytes + 4 * start)


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
