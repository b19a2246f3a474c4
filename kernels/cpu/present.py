"""A step's own keys and values, laid out in blocks like the past's: what `attention.py` reads beside them."""

from __future__ import annotations

from .vector import (
    compiled,
    load,
    load_bf16,
    load_f16,
    read,
    read_i32,
    store,
    words,
    write,
)

F32_, BF16, F16 = range(3)
"""Element types of a block, as the kernel's argument."""


@compiled
def widen(source: int, kind: int, head_dim: int, target: int) -> None:
    """Copy a block to float32."""
    for i in range(0, 32 * head_dim, 16):
        if kind == BF16:
            store(target + 4 * i, load_bf16(source + 2 * i))
        elif kind == F16:
            store(target + 4 * i, load_f16(source + 2 * i))
        else:
            store(target + 4 * i, load(source + 4 * i))


def num_packed_blocks(rows: int, sequences: int) -> int:
    """Packed blocks of a step, at most: a sequence may begin and end within one."""
    return rows // 16 + 2 * sequences


@compiled
def first_packed(start: int, sequence: int) -> int:
    """Where the packed blocks of a sequence begin, which has its rows from `start` on."""
    return start // 16 + 2 * sequence


def pack_present(args: int, part: int, parts: int) -> None:
    """Lay a step's keys and values out in float32 blocks, aligned to positions as the past's are.

    A sequence's first block begins with the tokens of the past's last block if that is not full. Args: those
    of `attend` and `fold`; k and its row stride, v and its row stride come last.
    """
    _, _, cu_rows, sequences, _, kv_heads, head_dim = words(args, 7)
    layer, block_bytes, element_bytes, kind, table, table_bytes, lengths, packed = words(args + 64, 8)
    k, k_bytes, v, v_bytes = words(args + 144, 4)
    turn = 0
    for b in range(sequences):
        start = read_i32(cu_rows + 4 * b)
        rows = read_i32(cu_rows + 4 * b + 4) - start
        past = read_i32(lengths + 4 * b) if lengths != 0 else 0
        lead = past % 16
        for j in range((lead + rows + 15) // 16):
            slot = lead if j == 0 else 0
            row = start + 16 * j + slot - lead
            if turn % parts == part:
                for g in range(kv_heads):
                    target = packed + ((first_packed(start, b) + j) * kv_heads + g) * head_dim * 128
                    if slot > 0:
                        shared = layer + read_i32(table + b * table_bytes + past // 16 * 4) * block_bytes
                        widen(shared + g * head_dim * 32 * element_bytes, kind, head_dim, target)
                    _pack_rows(
                        k + row * k_bytes + g * head_dim * 4,
                        k_bytes,
                        v + row * v_bytes + g * head_dim * 4,
                        v_bytes,
                        slot,
                        min(16 - slot, start + rows - row),
                        head_dim,
                        target,
                    )
            turn += 1


@compiled
def _pack_rows(
    k: int, k_bytes: int, v: int, v_bytes: int, slot: int, count: int, head_dim: int, target: int
) -> None:
    """Put `count` rows into a block from `slot` on: K transposed, V as it is. No one looks at other slots."""
    values = target + head_dim * 64
    for i in range(count):
        for d in range(head_dim):
            write(target + 64 * d + 4 * (slot + i), read(k + i * k_bytes + 4 * d))
        for d in range(0, head_dim, 8):
            for j in range(8):
                write(values + 4 * ((slot + i) * head_dim + d + j), read(v + i * v_bytes + 4 * (d + j)))
