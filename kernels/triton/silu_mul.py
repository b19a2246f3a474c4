"""`silu(gate) * up`.

Bytes: both halves are read once, the product is written once: the minimum. Operations: about 8 per result,
one of them an exponential.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .aot import AotCase
from .tiles import FLOATS

BLOCK = 1024
"""Results of a program: 8 a thread, and at batch 1 a width of 14336 still makes 14 programs."""

NUM_WARPS = 4


@triton.jit
def _silu_mul(
    gate_up,  # [N, 2 * width]
    out,  # [N, width], contiguous
    stride,
    width,
    BLOCK: tl.constexpr,
):
    """A stretch of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + column, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`gate_up` `[N, 2 * I]`, rows at any stride -> `[N, I]`, in the same dtype."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.dtype in FLOATS
    assert gate_up.stride(-1) == 1
    assert gate_up.shape[1] == 2 * width
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows > 0:
        grid = rows, triton.cdiv(width, BLOCK)
        _silu_mul[grid](gate_up, out, gate_up.stride(0), width, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out


def aot_cases() -> list[AotCase]:
    """One kernel serves every width."""
    return [
        AotCase(
            name="silu_mul",
            kernel=_silu_mul,
            signature={"gate_up": "*bf16", "out": "*bf16", "stride": "i32:16", "width": "i32:16"},
            constexprs={"BLOCK": BLOCK},
            num_warps=NUM_WARPS,
            num_stages=1,
            decode=True,
        )
    ]
