"""Norms: `x / sqrt(mean(x^2) + eps) * weight`, alone or of a sum that stays in the residual stream.

Bytes: each row is read once and written once, the weight once per row (from the cache): the minimum. With
the sum, the residual is read and written once more. Operations: about 4 per number, less than the bytes take.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .aot import AotCase
from .tiles import FLOATS

NUMBERS_PER_WARP = 512
"""16 per thread: enough loads in flight to cover memory's delay, few enough to stay in registers."""

MAX_WARPS = 16


@triton.jit
def _rms_norm(
    x,  # [N, width]
    residual,  # [N, width] float32, summed in place; unused where HAS_RESIDUAL is false
    weight,  # [width] float32
    out,  # [N, width], contiguous
    x_stride,
    residual_stride,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program, so that its bits do not depend on the batch."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        at = residual + row * residual_stride + column
        value += tl.load(at, mask=inside, other=0.0)
        tl.store(at, value, mask=inside)
    factor = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    scaled = value * factor * tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + row * width + column, scaled.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Rows of `x` `[N, width]`, normed, in `dtype`; `weight` `[width]` float32."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    return _launch(x, None, weight, eps, out)


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Add `x` `[N, width]` to `residual` (float32) in place; the normed sum, in `dtype`."""
    assert residual.dtype == torch.float32
    assert residual.shape == x.shape
    assert residual.stride(-1) == 1
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    return _launch(x, residual, weight, eps, out)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    rows, width = x.shape
    assert {x.dtype, out.dtype} <= set(FLOATS)
    assert x.stride(-1) == 1
    assert weight.dtype == torch.float32
    assert weight.is_contiguous()
    assert weight.shape == (width,)
    if rows > 0:
        block = triton.next_power_of_2(width)
        _rms_norm[(rows,)](
            x,
            x if residual is None else residual,
            weight,
            out,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            width,
            eps,
            HAS_RESIDUAL=residual is not None,
            BLOCK=block,
            num_warps=_num_warps(block),
        )
    return out


def _num_warps(block: int) -> int:
    return min(max(block // NUMBERS_PER_WARP, 1), MAX_WARPS)


def aot_cases() -> list[AotCase]:
    """Llama-3.1-8B's hidden size, SmolLM2-135M's, and a head's."""
    widths = {"llama-8b": 4096, "smollm2-135m": 576, "head of 128": 128}
    return [
        AotCase(
            name=f"add_rms_norm, {model}",
            kernel=_rms_norm,
            signature={
                "x": "*bf16",
                "residual": "*fp32",
                "weight": "*fp32",
                "out": "*bf16",
                "x_stride": "i32:16",
                "residual_stride": "i32:16",
                "width": "i32:16",
                "eps": "fp32",
            },
            constexprs={"HAS_RESIDUAL": True, "BLOCK": triton.next_power_of_2(width)},
            num_warps=_num_warps(triton.next_power_of_2(width)),
            num_stages=1,
            decode=True,
        )
        for model, width in widths.items()
    ]
