"""Writing accepted tokens to blocks, all layers in one launch, in any format.

Bytes: K and V are read once, their stored form is written once: the minimum. A token's K is spread over its
head's part of the block, a number every `capacity`; tokens that follow one another fill the gaps, so prefill
writes whole sectors. A decoding step, which has one token a sequence, touches a sector of 32 bytes per number
of K: at head_dim 128, 4 KiB a head, what attention reads of 8 tokens of the past. Operations: about 10 per
number, one of them an exact division.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import FORMATS, FULL, BlockLayout, CacheFormat
from .aot import AotCase
from .slots import (
    ELEMENTS,
    NUM_WARPS,
    TOKENS,
    assert_cache,
    assert_slots,
    get_tile,
    sides,
    tile_constants,
    tokens_at,
    write,
)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["blocks", "slots"])
def _commit(
    k,  # [L, R, G, 2 * HALF]
    v,  # [L, R, G, 2 * HALF]
    cache,  # uint8 [L, num_blocks, block_bytes]
    blocks,  # [R]
    slots,  # [R]
    rows,
    k_layer_stride,
    k_row_stride,
    k_head_stride,
    v_layer_stride,
    v_row_stride,
    v_head_stride,
    layer_stride,
    block_stride,
    K_SIDE: tl.constexpr,
    V_SIDE: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    """Some tokens of one head in one layer a program."""
    head, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    part = cache + layer * layer_stride + head * HEAD_BYTES
    part, slot, inside = tokens_at(rows, part, blocks, slots, block_stride)
    row = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    at = k + layer * k_layer_stride + row * k_row_stride + head * k_head_stride
    _commit_side(at, part, slot, inside, K_SIDE, HALF, BLOCK_HALF, ELEMENT)
    at = v + layer * v_layer_stride + row * v_row_stride + head * v_head_stride
    _commit_side(at, part, slot, inside, V_SIDE, HALF, BLOCK_HALF, ELEMENT)


@triton.jit
def _commit_side(
    at,
    part,
    slot,
    inside,
    SIDE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    first = get_tile(at, inside, 0, 1, HALF, BLOCK_HALF).to(ELEMENT).to(tl.float32)
    second = get_tile(at, inside, HALF, 1, HALF, BLOCK_HALF).to(ELEMENT).to(tl.float32)
    write(part, slot, first, second, inside, SIDE, HALF, BLOCK_HALF, ELEMENT)


def commit(
    cache: Tensor,
    layout: BlockLayout,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    slots: Tensor,
    cache_format: CacheFormat = FULL,
) -> None:
    """Write `k` and `v` `[L, R, G, D]`, float in any stride but the last, to `cache`; see `Ops.commit`."""
    layers, rows, heads, head_dim = k.shape
    assert_cache(cache, layout)
    assert_slots(blocks, slots)
    assert k.shape == v.shape
    assert {k.dtype, v.dtype} <= ELEMENTS.keys()
    assert k.stride(3) == v.stride(3) == 1
    assert len(blocks) == rows
    assert (layers, heads, head_dim) == (len(cache), layout.num_kv_heads, layout.head_dim)
    if rows == 0:
        return
    _commit[(triton.cdiv(rows, TOKENS.value), heads, layers)](
        k,
        v,
        cache,
        blocks,
        slots,
        rows,
        *k.stride()[:3],
        *v.stride()[:3],
        *cache.stride()[:2],
        **_constants(layout, cache_format),
        num_warps=NUM_WARPS,
    )


def _constants(layout: BlockLayout, cache_format: CacheFormat) -> dict[str, Any]:
    k_side, v_side = sides(layout, cache_format)
    return tile_constants(layout) | {"K_SIDE": k_side, "V_SIDE": v_side, "ELEMENT": ELEMENTS[layout.dtype]}


def aot_cases() -> list[AotCase]:
    """Llama-3.1-8B's KV heads in every format, SmolLM2-135M's in the least and the most bits."""
    strides = {name: "i32:16" for name in _commit.arg_names if name.endswith("_stride")}
    strides["layer_stride"] = "i64:16"
    return [
        AotCase(
            name=f"commit, heads of {head_dim}, ({cache_format.k_bits}, {cache_format.v_bits})",
            kernel=_commit,
            signature={
                "k": "*bf16",
                "v": "*bf16",
                "cache": "*u8",
                "blocks": "*i32",
                "slots": "*i32",
                "rows": "i32",
                **strides,
            },
            constexprs=_constants(
                BlockLayout(num_kv_heads=num_heads, head_dim=head_dim, dtype=torch.bfloat16), cache_format
            ),
            num_warps=NUM_WARPS,
            num_stages=1,
            decode=True,
        )
        for head_dim, num_heads, formats in ((128, 8, FORMATS), (64, 3, FORMATS[::3]))
        for cache_format in formats
    ]
