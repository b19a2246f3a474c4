"""Moving tokens between blocks: to a lower format, or as they are.

A GPU's programs run in no order, so that all is read before any is written takes two launches of one kernel:
from the source to staging blocks in the target's format, then from there to the target. Layers go in groups
whose staging blocks fit in `STAGING_BYTES`.

Bytes: the source's form is read once, the target's written twice and read once. The minimum leaves out the
staging (one of each), which stays in the level-2 cache of a large GPU. Operations: about 12 per number where
the format changes, none where it does not.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..base import Slots
from ..layout import FULL, INT4, INT8, BlockLayout, CacheFormat
from .aot import AotCase
from .slots import (
    ELEMENTS,
    NUM_WARPS,
    RAW,
    TOKENS,
    assert_cache,
    assert_slots,
    move,
    read,
    sides,
    tile_constants,
    tokens_at,
    write,
)

STAGING_BYTES = 32 << 20
"""Half of the level-2 cache of an H100 or H200 (50 MB) and more; a group is never less than a layer."""


@triton.jit(do_not_specialize=["rows"])
def _move(
    source_cache,  # uint8 [L, num_blocks, block_bytes]
    source_blocks,  # [R]
    source_slots,  # [R]
    target_cache,  # uint8 [L, num_blocks, block_bytes]
    target_blocks,  # [R]
    target_slots,  # [R]
    rows,
    source_layer_stride,
    source_block_stride,
    target_layer_stride,
    target_block_stride,
    SOURCE_K_SIDE: tl.constexpr,
    SOURCE_V_SIDE: tl.constexpr,
    K_SIDE: tl.constexpr,
    V_SIDE: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    ELEMENT: tl.constexpr,
    RAW: tl.constexpr,
):
    """Some tokens of one head in one layer a program."""
    head, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    part = source_cache + layer * source_layer_stride + head * HEAD_BYTES
    source, source_slot, inside = tokens_at(rows, part, source_blocks, source_slots, source_block_stride)
    part = target_cache + layer * target_layer_stride + head * HEAD_BYTES
    target, slot, inside = tokens_at(rows, part, target_blocks, target_slots, target_block_stride)
    if SOURCE_K_SIDE == K_SIDE and SOURCE_V_SIDE == V_SIDE:
        move(source, source_slot, target, slot, inside, K_SIDE, HALF, BLOCK_HALF, RAW)
        move(source, source_slot, target, slot, inside, V_SIDE, HALF, BLOCK_HALF, RAW)
    else:
        first, second = read(source, source_slot, inside, SOURCE_K_SIDE, HALF, BLOCK_HALF, ELEMENT)
        write(target, slot, first, second, inside, K_SIDE, HALF, BLOCK_HALF, ELEMENT)
        first, second = read(source, source_slot, inside, SOURCE_V_SIDE, HALF, BLOCK_HALF, ELEMENT)
        write(target, slot, first, second, inside, V_SIDE, HALF, BLOCK_HALF, ELEMENT)


def demote(cache: Tensor, layout: BlockLayout, source: Slots, target: Slots) -> None:
    """See `Ops.demote`; `cache` is uint8 `[L, num_blocks, block_bytes]`."""
    rows, capacity = len(source.blocks), layout.capacity(target.format)
    assert_cache(cache, layout)
    for at in (source, target):
        assert_slots(at.blocks, at.slots)
    assert len(target.blocks) == rows
    if rows == 0:
        return
    num_blocks = triton.cdiv(rows, capacity)
    group = max(STAGING_BYTES // (num_blocks * layout.block_bytes), 1)
    row = torch.arange(rows, dtype=torch.int32, device=cache.device)
    staged = Slots(blocks=row // capacity, slots=row % capacity, format=target.format)
    for layers in cache.split(group):
        staging = cache.new_empty(len(layers), num_blocks, layout.block_bytes)
        _launch(layers, source, staging, staged, layout)
        _launch(staging, staged, layers, target, layout)


def _launch(
    source_cache: Tensor, source: Slots, target_cache: Tensor, target: Slots, layout: BlockLayout
) -> None:
    rows = len(source.blocks)
    _move[(triton.cdiv(rows, TOKENS.value), layout.num_kv_heads, len(source_cache))](
        source_cache,
        source.blocks,
        source.slots,
        target_cache,
        target.blocks,
        target.slots,
        rows,
        *source_cache.stride()[:2],
        *target_cache.stride()[:2],
        **_constants(layout, source.format, target.format),
        num_warps=NUM_WARPS,
    )


def _constants(layout: BlockLayout, source: CacheFormat, target: CacheFormat) -> dict[str, Any]:
    source_k, source_v = sides(layout, source)
    k_side, v_side = sides(layout, target)
    return tile_constants(layout) | {
        "SOURCE_K_SIDE": source_k,
        "SOURCE_V_SIDE": source_v,
        "K_SIDE": k_side,
        "V_SIDE": v_side,
        "ELEMENT": ELEMENTS[layout.dtype],
        "RAW": RAW[layout.dtype.itemsize],
    }


def aot_cases() -> list[AotCase]:
    """Llama-3.1-8B's KV heads: into each width of codes, between them, and as they are."""
    layout = BlockLayout(num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    pointers = {name: "*i32" for name in _move.arg_names if name.endswith(("_blocks", "_slots"))}
    strides = {name: "i64:16" for name in _move.arg_names if name.endswith("_stride")}
    return [
        AotCase(
            name=f"demote, ({source.k_bits}, {source.v_bits}) to ({target.k_bits}, {target.v_bits})",
            kernel=_move,
            signature={"source_cache": "*u8", "target_cache": "*u8", "rows": "i32", **pointers, **strides},
            constexprs=_constants(layout, source, target),
            num_warps=NUM_WARPS,
            num_stages=1,
            decode=True,
        )
        for source, target in ((FULL, INT8), (FULL, INT4), (INT8, INT4), (INT4, INT4))
    ]
