"""`merge`: two partial attentions of the same queries as one, by their log-sum-exp.

Bytes: both outputs are read and one is written, `3 * head_dim` numbers per row and head: the minimum.
Operations: 5 per number. Where past and present are computed together (`attention.py`) it is not needed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .aot import AotCase
from .tiles import FLOATS

VECTORS = 16
"""Vectors of a program: 8 KiB a tensor at head_dim 128, some loads in flight for each of 4 warps."""


@triton.jit(do_not_specialize=["num_vectors"])
def merge_parts(
    out_a, lse_a, out_b, lse_b, out, num_vectors, HEAD_DIM: tl.constexpr, D: tl.constexpr, V: tl.constexpr
):
    """Grid: runs of V vectors."""
    vector = tl.program_id(0).to(tl.int64) * V + tl.arange(0, V)
    here = vector < num_vectors
    dims = tl.arange(0, D)
    a = tl.load(lse_a + vector, mask=here, other=0.0).to(tl.float32)
    b = tl.load(lse_b + vector, mask=here, other=0.0).to(tl.float32)
    top = tl.maximum(a, b)
    finite = tl.where(top == float("-inf"), 0.0, top)
    weight_a = tl.exp(a - finite)
    weight_b = tl.exp(b - finite)
    total = weight_a + weight_b
    # Both parts empty: the outputs are 0, and so is what comes of them.
    whole = tl.where(total == 0.0, 1.0, total)
    at = vector[:, None] * HEAD_DIM + dims[None, :]  # [V, D]
    mask = here[:, None] & (dims < HEAD_DIM)[None, :]
    from_a = tl.load(out_a + at, mask=mask, other=0.0).to(tl.float32)
    from_b = tl.load(out_b + at, mask=mask, other=0.0).to(tl.float32)
    merged = from_a * (weight_a / whole)[:, None] + from_b * (weight_b / whole)[:, None]
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=mask)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
    """Outputs `[N, H, D]` of one dtype, log-sum-exps `[N, H]`; an empty part has -inf."""
    assert out_a.dtype == out_b.dtype
    assert out_a.dtype in FLOATS
    assert out_a.shape == out_b.shape
    assert lse_a.shape == lse_b.shape == out_a.shape[:2]
    assert lse_a.dtype == lse_b.dtype == torch.float32
    assert all(t.is_contiguous() for t in (out_a, lse_a, out_b, lse_b))
    out = torch.empty_like(out_a)
    head_dim, num_vectors = out.shape[2], lse_a.numel()
    if num_vectors > 0:
        merge_parts[(triton.cdiv(num_vectors, VECTORS),)](
            out_a, lse_a, out_b, lse_b, out, num_vectors, head_dim, triton.next_power_of_2(head_dim), VECTORS
        )
    return out


def aot_cases() -> list[AotCase]:
    """At head_dim 64 and 128."""
    signature = dict.fromkeys(("out_a", "out_b", "out"), "*bf16")
    signature |= {"lse_a": "*fp32", "lse_b": "*fp32", "num_vectors": "i32"}
    return [
        AotCase(
            name=f"merge d{head_dim}",
            kernel=merge_parts,
            signature=signature,
            constexprs={"HEAD_DIM": head_dim, "D": head_dim, "V": VECTORS},
            num_warps=4,
            num_stages=1,
            decode=True,
        )
        for head_dim in (64, 128)
    ]
