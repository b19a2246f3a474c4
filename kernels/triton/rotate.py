"""The Hadamard transform of `codes.rotate`.

Bytes: every number is read once and written once: the minimum. Operations: log2(size) additions per number,
done in registers, in the reference's order: float32 results have its bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..codes import rotation_size
from .aot import AotCase
from .tiles import FLOATS

TILE = 2048
"""Numbers of a program: 16 a thread. With twice as many, sm_100 keeps some on the stack."""

NUM_WARPS = 4


@triton.jit
def hadamard(x, RUNS: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr):
    """Rows of `x` `[RUNS, SIZE]` float32 times the normalised Hadamard matrix; SIZE is 2 ** STEPS.

    Each step adds and subtracts neighbours and puts sums before differences (Pease 1968, doi
    10.1145/321450.321457), which after all steps has every number in its place.
    """
    for _ in tl.static_range(STEPS):
        first, second = tl.split(tl.reshape(x, (RUNS, SIZE // 2, 2)))
        pairs = tl.join(first + second, first - second)  # [RUNS, SIZE // 2, 2]
        x = tl.reshape(tl.permute(pairs, (0, 2, 1)), (RUNS, SIZE))
    return x * SIZE**-0.5


@triton.jit(do_not_specialize=["num_runs"])
def _rotate(
    x,  # [N, heads, HEAD_DIM]
    out,  # [N, heads, HEAD_DIM], contiguous
    row_stride,
    head_stride,
    heads,
    num_runs,  # N * heads * HEAD_DIM / SIZE
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    STEPS: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Some runs a program, of whatever heads and rows."""
    run = tl.program_id(0).to(tl.int64) * RUNS + tl.arange(0, RUNS)
    inside = (run < num_runs)[:, None]
    of_head: tl.constexpr = HEAD_DIM // SIZE
    head = run // of_head
    source = x + head // heads * row_stride + head % heads * head_stride + run % of_head * SIZE
    column = tl.arange(0, SIZE)[None, :]
    value = tl.load(source[:, None] + column, mask=inside, other=0.0).to(tl.float32)
    turned = hadamard(value, RUNS, SIZE, STEPS)
    tl.store(out + run[:, None] * SIZE + column, turned.to(out.dtype.element_ty), mask=inside)


def rotate(x: Tensor) -> Tensor:
    """`x` `[N, heads, D]`, rows and heads at any stride."""
    _, heads, head_dim = x.shape
    assert x.dtype in FLOATS
    assert x.stride(-1) == 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    constants = _constants(head_dim)
    num_runs = x.numel() // constants["SIZE"]
    if num_runs > 0:
        grid = (triton.cdiv(num_runs, constants["RUNS"]),)
        _rotate[grid](x, out, x.stride(0), x.stride(1), heads, num_runs, **constants, num_warps=NUM_WARPS)
    return out


def _constants(head_dim: int) -> dict[str, int]:
    size = rotation_size(head_dim)
    return {
        "HEAD_DIM": head_dim,
        "SIZE": size,
        "STEPS": size.bit_length() - 1,
        "RUNS": max(TILE // size, 1),
    }


def aot_cases() -> list[AotCase]:
    """Heads of 128 and of 64."""
    return [
        AotCase(
            name=f"rotate, heads of {head_dim}",
            kernel=_rotate,
            signature={
                "x": "*bf16",
                "out": "*bf16",
                "row_stride": "i32:16",
                "head_stride": "i32:16",
                "heads": "i32",
                "num_runs": "i32",
            },
            constexprs=dict(_constants(head_dim)),
            num_warps=NUM_WARPS,
            num_stages=1,
            decode=True,
        )
        for head_dim in (128, 64)
    ]
