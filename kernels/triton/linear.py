"""Linear layers. The product is torch's, which takes the vendor's library; the alternative is a kernel whose
rows have the same bits in any batch.

Bytes of a decoding step: the weights once, the minimum, which bounds its time. 16-bit weights are read as
they are; groups become 16 bits at load. Operations: 2 per weight and row.

What batch invariance costs: the library picks its tiles, and splits of the sum, by the number of rows; here
both are fixed. Weights are read once per 64 rows and x once per 64 outputs, so a program does 32 operations
per byte that it reads where tiles of 128 x 256 do 85: where the level-2 cache is the limit, a prefill runs at
0.38 of the library's rate at most. Up to 64 rows the weights are read once, as the library does, but by
`num_out / 64` programs. In Llama-3.1-8B two matrices of a layer have 4096 outputs (35 % of its weights) and
one has 6144 (12 %): on 132 processors, none of which reads faster than its share of the memory, those take
2.06 and 1.38 times as long, and a layer of a decoding step 1.41 times.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from ..base import AnyWeight
from ..weights import GroupWeight, dequantise
from .aot import AotCase
from .tiles import FLOATS

BLOCK_ROWS = 64
"""The fewest rows of a Hopper matrix instruction."""

BLOCK_OUT = 64
BLOCK_IN = 64
"""128 bytes of each row in 16 bits: whole cache lines."""

NUM_WARPS = 4

STAGE_BYTES = 64 << 10
"""Of tiles of both matrices in shared memory, 16 KiB each in 16 bits: all that an AMD processor has."""


class DenseLinear(Struct, frozen=True, kw_only=True):
    """A `[num_out, num_in]` weight in 16 or 32 bits, and an optional `[num_out]` bias of its dtype."""

    weight: Tensor
    bias: Tensor | None


def prepare_linear(
    weight: AnyWeight | Sequence[AnyWeight], bias: Tensor | None, dtype: torch.dtype
) -> DenseLinear:
    """Weights of one input width, one after another; groups become `dtype`."""
    weights = [weight] if isinstance(weight, (Tensor, GroupWeight)) else weight
    dense = torch.cat([w if isinstance(w, Tensor) else dequantise(w).to(dtype) for w in weights])
    return DenseLinear(weight=dense, bias=None if bias is None else bias.to(dense.dtype))


def linear(x: Tensor, weight: DenseLinear) -> Tensor:
    """`x` `[N, num_in]` -> `[N, num_out]` in its dtype; the product is taken in the weight's."""
    return F.linear(x.to(weight.weight.dtype), weight.weight, weight.bias).to(x.dtype)


@triton.jit(do_not_specialize=["rows"])
def _invariant_linear(
    x,  # [rows, num_in]
    weight,  # [num_out, num_in]
    bias,  # [num_out]; unused where HAS_BIAS is false
    out,  # [rows, num_out], contiguous
    rows,
    num_in,
    num_out,
    x_stride,
    weight_stride,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """A tile of the product a program, its sum in order of the inputs."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    x_rows = x + row.to(tl.int64)[:, None] * x_stride
    weight_rows = weight + column.to(tl.int64)[:, None] * weight_stride
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
    for first in range(0, num_in, BLOCK_IN):
        index = first + tl.arange(0, BLOCK_IN)
        real = (index < num_in)[None, :]
        a = tl.load(x_rows + index[None, :], mask=(row < rows)[:, None] & real, other=0.0)
        b = tl.load(weight_rows + index[None, :], mask=(column < num_out)[:, None] & real, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < num_out, other=0.0).to(tl.float32)[None, :]
    at = out + row.to(tl.int64)[:, None] * num_out + column[None, :]
    inside = (row < rows)[:, None] & (column < num_out)[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)


def invariant_linear(x: Tensor, weight: DenseLinear) -> Tensor:
    """The same as `linear`, each row's bits a function of that row alone."""
    matrix, dtype = weight.weight, x.dtype
    x = x.to(matrix.dtype)
    (rows, num_in), num_out = x.shape, len(matrix)
    assert {matrix.dtype, dtype} <= set(FLOATS)
    assert matrix.shape == (num_out, num_in)
    assert x.stride(1) == matrix.stride(1) == 1
    if weight.bias is not None:
        assert weight.bias.shape == (num_out,)
        assert weight.bias.is_contiguous()
    out = torch.empty(rows, num_out, dtype=dtype, device=x.device)
    if rows > 0:
        _invariant_linear[(triton.cdiv(rows, BLOCK_ROWS), triton.cdiv(num_out, BLOCK_OUT))](
            x,
            matrix,
            matrix if weight.bias is None else weight.bias,
            out,
            rows,
            num_in,
            num_out,
            x.stride(0),
            matrix.stride(0),
            **_constants(weight.bias is not None),
            num_warps=NUM_WARPS,
            num_stages=_num_stages(matrix.dtype),
        )
    return out


def _num_stages(dtype: torch.dtype) -> int:
    """Tiles in flight, and one being worked on."""
    return STAGE_BYTES // ((BLOCK_ROWS + BLOCK_OUT) * BLOCK_IN * dtype.itemsize)


def _constants(has_bias: bool) -> dict[str, object]:
    return {
        "HAS_BIAS": has_bias,
        "BLOCK_ROWS": BLOCK_ROWS,
        "BLOCK_OUT": BLOCK_OUT,
        "BLOCK_IN": BLOCK_IN,
    }


def aot_cases() -> list[AotCase]:
    """The batch-invariant kernel; it serves every shape."""
    sizes = ("num_in", "num_out", "x_stride", "weight_stride")
    return [
        AotCase(
            name=f"linear, batch-invariant{name}",
            kernel=_invariant_linear,
            signature={
                **dict.fromkeys(("x", "weight", "bias", "out"), element),
                "rows": "i32",
                **dict.fromkeys(sizes, "i32:16"),
            },
            constexprs=_constants(False),
            num_warps=NUM_WARPS,
            num_stages=_num_stages(dtype),
            decode=True,
        )
        for name, element, dtype in (("", "*bf16", torch.bfloat16), (", float32", "*fp32", torch.float32))
    ]
