"""The op set as an engine uses it."""

from __future__ import annotations

import pytest
import torch

from surefoot.kernels.base import Observed, Ops, Past
from surefoot.kernels.layout import FULL, INT4, BlockLayout
from surefoot.kernels.reference import ReferenceOps
from surefoot.kernels.triton.ops import TritonOps

from ...numerics import assert_close


def _decoder_step(ops: Ops, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Two sequences through one decoder layer: a mixed past of 40 and 0 tokens, 2 and 3 rows."""
    torch.manual_seed(2)
    heads, kv_heads, head_dim, hidden = 6, 2, 64, 96
    layout = BlockLayout(num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    wide = (heads + 2 * kv_heads) * head_dim
    weights = {
        name: torch.randn(shape) * shape[1] ** -0.5
        for name, shape in {
            "qkv": (wide, hidden),
            "o": (hidden, heads * head_dim),
            "up": (160, hidden),
        }.items()
    }
    qkv, o, up = (ops.prepare_linear(w.to(dtype)) for w in weights.values())
    residual, norm, angle = torch.randn(5, hidden), torch.rand(hidden) + 0.5, torch.rand(5, 32)
    cu_rows = torch.tensor([0, 2, 5], dtype=torch.int32)
    cache = torch.zeros(1, 4, layout.block_bytes, dtype=torch.uint8)
    past_k, past_v = torch.randn(1, 40, kv_heads, head_dim), torch.randn(1, 40, kv_heads, head_dim)
    slot = torch.arange(20)
    pasts = []
    for part, (cache_format, first) in enumerate(((FULL, 0), (INT4, 2))):
        tokens, capacity = slice(20 * part, 20 * part + 20), layout.capacity(cache_format)
        k, v = past_k[:, tokens], past_v[:, tokens]
        blocks, slots = (first + slot // capacity).int(), (slot % capacity).int()
        ops.commit(cache, layout, k, v, blocks, slots, cache_format)
        table = torch.tensor([[first, first + 1], [0, 0]], dtype=torch.int32)
        lengths = torch.tensor([20, 0], dtype=torch.int32)
        pasts.append(Past(block_table=table, lengths=lengths, format=cache_format))

    x = ops.linear(ops.rms_norm(residual, norm, 1e-5), qkv).unflatten(1, (-1, head_dim))
    qk = ops.rotate(ops.rope(x[:, : heads + kv_heads], angle.cos(), angle.sin()))
    q, k, v = qk[:, :heads], qk[:, heads:], x[:, heads + kv_heads :]
    lse = torch.empty(5, heads)
    attended = ops.attention(q, k, v, cu_rows, cache[0], layout, pasts, 0.125, lse)
    observed = Observed(rows=torch.tensor([1, 4], dtype=torch.int32), lse=lse)
    old, old_lse = ops.past_attention(q, cu_rows, cache[0], layout, pasts, 0.125)
    new, new_lse = ops.present_attention(q, k, v, cu_rows, 0.125)
    normed = ops.add_rms_norm(residual, ops.linear(attended.flatten(1), o), norm, 1e-5)
    return {
        "attention": attended,
        "merged": ops.merge(old, old_lse, new, new_lse),
        "past mass": ops.past_mass(q, cu_rows, cache[0], layout, pasts[1], 0.125, observed),
        "present mass": ops.present_mass(q, k, cu_rows, 0.125, observed),
        "residual": residual,
        "gated": ops.silu_mul(ops.linear(normed, up)),
    }


@pytest.mark.parametrize(("dtype", "batch_invariant"), [(torch.float32, False), (torch.bfloat16, True)])
def test_a_decoder_step_is_the_references(dtype: torch.dtype, batch_invariant: bool) -> None:
    """Every op of a step takes what the one before returned, in the activations' dtype, and agrees."""
    actual = _decoder_step(TritonOps(dtype, batch_invariant=batch_invariant), dtype)
    expected = _decoder_step(ReferenceOps(), dtype)
    assert {name for name, x in actual.items() if x.dtype != dtype} <= {
        "past mass",
        "present mass",
        "residual",
    }
    for name, x in actual.items():
        assert_close(name, x, expected[name].double(), dtype)


def test_lookups_and_copies_are_the_references() -> None:
    """What torch does for the set is what the reference does: rows of matrices and tables, finite rows, the
    norm of heads, and rounding on the way to the step's buffer.
    """
    ops, reference = TritonOps(torch.float32), ReferenceOps()
    matrix, numbers = torch.randn(9, 64), torch.tensor([8, 0, 3])
    assert torch.equal(
        ops.embed(numbers, ops.prepare_linear(matrix)),
        reference.embed(numbers, reference.prepare_linear(matrix)),
    )
    assert torch.equal(ops.take(matrix, numbers), reference.take(matrix, numbers))
    matrix[2, 5], matrix[4, 0] = float("nan"), -float("inf")
    assert torch.equal(ops.finite_rows(matrix), reference.finite_rows(matrix))
    ours, theirs = (torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    weight = torch.rand(64) + 0.5
    ops.norm_heads(ours, weight, 1e-5)
    reference.norm_heads(theirs, weight, 1e-5)
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    kept = [torch.empty(3, 2, 64, dtype=torch.bfloat16) for _ in range(2)]
    ops.keep(ours, theirs, *kept)
    assert torch.equal(ours, kept[0].float())
    assert torch.equal(theirs, kept[1].float())
