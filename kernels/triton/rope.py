"""Rotary embedding, half-split form.

Bytes: every number is read once and written once: the minimum; cos and sin once a row and `HEADS` heads, from
the cache but for the first. Operations: 3 per number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .aot import AotCase
from .tiles import FLOATS

HEADS = 8
"""Heads of a program: a decoding step of one sequence still fills several processors, and cos and sin are
read for more than one.
"""

NUM_WARPS = 4


@triton.jit
def _rope(
    x,  # [N, heads, HEAD_DIM]
    cos,  # [N, HALF] float32
    sin,  # [N, HALF] float32
    out,  # [N, heads, HEAD_DIM], contiguous
    row_stride,
    head_stride,
    heads,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """One row and some heads a program."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pair = tl.arange(0, BLOCK_HALF)
    inside = (head < heads)[:, None] & (pair < HALF)[None, :]
    source = x + row * row_stride + head[:, None] * head_stride  # [BLOCK_HEADS, 1]
    target = out + (row * heads + head[:, None]) * HEAD_DIM
    c = tl.load(cos + row * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    s = tl.load(sin + row * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    first = tl.load(source + pair[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + (HALF + pair)[None, :], mask=inside, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(target + pair[None, :], (first * c - second * s).to(kind), mask=inside)
    tl.store(target + (HALF + pair)[None, :], (second * c + first * s).to(kind), mask=inside)
    if 2 * HALF < HEAD_DIM:
        column = 2 * HALF + tl.arange(0, BLOCK_REST)
        passing = (head < heads)[:, None] & (column < HEAD_DIM)[None, :]
        rest = tl.load(source + column[None, :], mask=passing, other=0.0)
        tl.store(target + column[None, :], rest, mask=passing)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` `[N, heads, D]`, rows and heads at any stride; `cos` and `sin` `[N, rotary_dim / 2]` float32."""
    rows, heads, head_dim = x.shape
    half = cos.shape[-1]
    assert x.dtype in FLOATS
    assert x.stride(-1) == 1
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape == (rows, half)
    assert 0 < 2 * half <= head_dim
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows > 0:
        grid = rows, triton.cdiv(heads, HEADS)
        strides = x.stride(0), x.stride(1)
        _rope[grid](x, cos, sin, out, *strides, heads, **_constants(head_dim, half), num_warps=NUM_WARPS)
    return out


def _constants(head_dim: int, half: int) -> dict[str, object]:
    return {
        "HEAD_DIM": head_dim,
        "HALF": half,
        "BLOCK_HEADS": HEADS,
        "BLOCK_HALF": triton.next_power_of_2(half),
        "BLOCK_REST": triton.next_power_of_2(max(head_dim - 2 * half, 1)),
    }


def aot_cases() -> list[AotCase]:
    """Heads of 128 and of 64."""
    return [
        AotCase(
            name=f"rope, heads of {head_dim}",
            kernel=_rope,
            signature={
                "x": "*bf16",
                "cos": "*fp32",
                "sin": "*fp32",
                "out": "*bf16",
                "row_stride": "i32:16",
                "head_stride": "i32:16",
                "heads": "i32",
            },
            constexprs=_constants(head_dim, head_dim // 2),
            num_warps=NUM_WARPS,
            num_stages=1,
            decode=True,
        )
        for head_dim in (128, 64)
    ]
