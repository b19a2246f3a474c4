"""Norms, rotary embedding, gating: against float64 and for bits that do not depend on the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.kernels.base import Ops
from surefoot.kernels.cpu.ops import CpuOps
from surefoot.kernels.reference import ReferenceOps

from .numerics import assert_close

SIZES = (1, 63, 111)


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("width", [1, 63, 111, 576])
def test_rms_norm(ops: Ops, rows: int, width: int) -> None:
    """Rows are divided by their root mean square and scaled."""
    x, weight = torch.randn(rows, width), torch.randn(width)
    expected = ReferenceOps().rms_norm(x.double(), weight.double(), 1e-5)
    assert_close("rms_norm", ops.rms_norm(x, weight, 1e-5), expected)


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("width", [63, 576])
def test_add_rms_norm(ops: Ops, rows: int, width: int) -> None:
    """The sum stays in the residual, exactly; the normed sum is returned."""
    residual, x, weight = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    total = residual + x
    normed = ops.add_rms_norm(residual, x, weight, 1e-5)
    assert torch.equal(residual, total)
    assert_close("add_rms_norm", normed, ReferenceOps().rms_norm(total.double(), weight.double(), 1e-5))


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("head_dim", [24, 64])
def test_norm_heads(ops: Ops, rows: int, head_dim: int) -> None:
    """Each head is normed where it lies, and its neighbours are left alone."""
    fused, weight = torch.randn(rows, 5, head_dim), torch.randn(head_dim)
    before = fused.clone()
    ops.norm_heads(fused[:, 1:4], weight, 1e-5)
    expected = ReferenceOps().rms_norm(before[:, 1:4].double(), weight.double(), 1e-5)
    assert_close("norm_heads", fused[:, 1:4], expected)
    assert torch.equal(fused[:, [0, 4]], before[:, [0, 4]])


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize(("head_dim", "pairs"), [(64, 32), (96, 48), (72, 10), (128, 64)])
def test_rope(ops: Ops, rows: int, head_dim: int, pairs: int) -> None:
    """Pairs are rotated; dimensions beyond the rotary ones pass."""
    x, angle = torch.randn(rows, 5, head_dim), torch.rand(rows, pairs) * 6
    expected = ReferenceOps().rope(x.double(), angle.cos().double(), angle.sin().double())
    assert_close("rope", ops.rope(x, angle.cos(), angle.sin()), expected)


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("width", [1, 63, 1536])
def test_silu_mul(ops: Ops, rows: int, width: int) -> None:
    """Gate times its sigmoid times up."""
    gate_up = torch.randn(rows, 2 * width) * 4
    assert_close("silu_mul", ops.silu_mul(gate_up), ReferenceOps().silu_mul(gate_up.double()))


def test_silu_of_extremes(ops: Ops) -> None:
    """Gates far from zero neither overflow nor turn into something that is not a number."""
    gate_up = torch.tensor([[-1e4, -100.0, -88.0, 0.0, 88.0, 100.0, 1e4, 1.0] + [1.0] * 8])
    assert_close("silu_mul", ops.silu_mul(gate_up), ReferenceOps().silu_mul(gate_up.double()))


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "norm_heads", "rope", "silu_mul", "merge"])
def test_bits_do_not_depend_on_the_batch(cpu: CpuOps, cpu_threads: CpuOps, name: str) -> None:
    """A row alone and among others, on one thread or three, has the same bits in every row-wise op."""
    x, other, weight = torch.randn(63, 222), torch.randn(63, 222), torch.randn(222)
    heads, angle, lse = torch.randn(63, 3, 74), torch.rand(63, 37), torch.randn(63, 3)

    def run(ops: CpuOps, rows: slice) -> Tensor:
        match name:
            case "rms_norm":
                return ops.rms_norm(x[rows], weight, 1e-5)
            case "add_rms_norm":
                return ops.add_rms_norm(x[rows].clone(), other[rows], weight, 1e-5)
            case "norm_heads":
                ops.norm_heads(normed := heads[rows].clone(), weight[:74].contiguous(), 1e-5)
                return normed
            case "rope":
                return ops.rope(heads[rows], angle[rows].cos(), angle[rows].sin())
            case "silu_mul":
                return ops.silu_mul(x[rows])
            case _:
                return ops.merge(heads[rows], lse[rows], heads[rows] + 1.0, -lse[rows])

    together = run(cpu_threads, slice(None))
    assert torch.equal(run(cpu, slice(None)), together)
    for first, end in ((7, 8), (0, 4), (58, 63)):
        assert torch.equal(run(cpu, slice(first, end)), together[first:end])


@pytest.mark.parametrize("width", [1, 63, 111, 4096])
def test_finite_rows(ops: Ops, width: int) -> None:
    """One number that is not finite is seen, wherever it is; large and small ones are finite."""
    x = torch.randn(9, width) * 1e30
    x[1, 0], x[3, -1], x[4, width // 2] = torch.nan, torch.inf, -torch.inf
    x[5], x[6] = 3e38, 1e-45
    expected = [True, False, True, False, False, True, True, True, True]
    assert ops.finite_rows(x).tolist() == expected
    assert ops.finite_rows(torch.cat((x, x), dim=1)[:, :width]).tolist() == expected


def test_rows_may_be_strided(cpu: CpuOps) -> None:
    """Slices of a fused projection are read where they lie."""
    fused, angle = torch.randn(9, 7, 64), torch.rand(9, 32)
    assert torch.equal(
        cpu.rope(fused[:, 2:5], angle.cos(), angle.sin()),
        cpu.rope(fused[:, 2:5].contiguous(), angle.cos(), angle.sin()),
    )
    wide, weight = torch.randn(9, 200), torch.randn(64)
    assert torch.equal(
        cpu.rms_norm(wide[:, 3:67], weight, 1e-5), cpu.rms_norm(wide[:, 3:67].contiguous(), weight, 1e-5)
    )
    assert torch.equal(cpu.silu_mul(wide[:, 3:67]), cpu.silu_mul(wide[:, 3:67].contiguous()))


def test_vector_functions_keep_what_is_not_a_number(ops: Ops) -> None:
    """A fault in one row shows in that row and in no other."""
    gate_up = torch.randn(3, 64)
    gate_up[1] = torch.nan
    finite = ops.silu_mul(gate_up).isfinite()
    assert finite[[0, 2]].all()
    assert not finite[1].any()
