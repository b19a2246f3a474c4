"""Writing accepted tokens to blocks."""

from __future__ import annotations

from .vector import compiled, copy_u16, copy_u32, read_i32, words


@compiled
def _commit_head(k: int, v: int, block: int, slot: int, head_dim: int, element_bytes: int) -> None:
    """One token of one KV head: a column of K `[head_dim, 16]`, a row of V `[16, head_dim]`."""
    values = block + (16 + slot) * head_dim * element_bytes
    if element_bytes == 2:
        for d in range(head_dim):
            copy_u16(k + 2 * d, block + 2 * (16 * d + slot))
            copy_u16(v + 2 * d, values + 2 * d)
    else:
        for d in range(head_dim):
            copy_u32(k + 4 * d, block + 4 * (16 * d + slot))
            copy_u32(v + 4 * d, values + 4 * d)


def commit(args: int, part: int, parts: int) -> None:
    """Args: cache, its layer stride, block bytes, k, v (contiguous `[layers, rows, KV heads, head_dim]`),
    blocks and slots (int32), layers, rows, KV heads, head_dim, element bytes.
    """
    cache, layer_bytes, block_bytes, k, v, blocks, slots, layers, rows, kv_heads, head_dim, element_bytes = (
        words(args, 12)
    )
    token_bytes = head_dim * element_bytes
    for unit in range(layers * rows * part // parts, layers * rows * (part + 1) // parts):
        row = unit % rows
        block = cache + unit // rows * layer_bytes + read_i32(blocks + 4 * row) * block_bytes
        slot = read_i32(slots + 4 * row)
        for g in range(kv_heads):
            source = (unit * kv_heads + g) * token_bytes
            _commit_head(k + source, v + source, block + g * 32 * token_bytes, slot, head_dim, element_bytes)
