"""Norms, rotary embedding, Hadamard transform and gating: against float64, and row by row."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from surefoot.kernels.codes import rotate as reference_rotate
from surefoot.kernels.codes import rotation_size
from surefoot.kernels.reference import ReferenceOps
from surefoot.kernels.triton.rms_norm import add_rms_norm, rms_norm
from surefoot.kernels.triton.rope import rope
from surefoot.kernels.triton.rotate import rotate
from surefoot.kernels.triton.silu_mul import silu_mul

from ...numerics import assert_close

SIZES = (1, 63, 111)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = [(1, torch.float32), (63, torch.bfloat16), (17, torch.float16), (111, torch.float32)]
reference = ReferenceOps()


@pytest.mark.parametrize(("rows", "dtype"), ROWS)
@pytest.mark.parametrize("width", [1, 63, 111, 576])
def test_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    """Rows are divided by their root mean square and scaled."""
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(width)
    expected = reference.rms_norm(x.double(), weight.double(), 1e-5)
    actual = rms_norm(x, weight, 1e-5, dtype)
    assert actual.dtype == dtype
    assert_close("rms_norm", actual, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [63, 576])
def test_add_rms_norm(width: int, dtype: torch.dtype) -> None:
    """The sum stays in the residual, exactly; the normed sum is returned."""
    residual, x, weight = torch.randn(63, width), torch.randn(63, width).to(dtype), torch.randn(width)
    total = residual + x
    normed = add_rms_norm(residual, x, weight, 1e-5, dtype)
    assert torch.equal(residual, total)
    assert_close("add_rms_norm", normed, reference.rms_norm(total.double(), weight.double(), 1e-5), dtype)


@pytest.mark.parametrize(
    ("head_dim", "pairs", "rows", "dtype"),
    [
        (64, 32, 1, torch.float32),
        (96, 48, 63, torch.bfloat16),
        (72, 10, 63, torch.float16),
        (128, 64, 111, torch.float32),
    ],
)
def test_rope(head_dim: int, pairs: int, rows: int, dtype: torch.dtype) -> None:
    """Pairs are rotated; dimensions beyond the rotary ones pass."""
    x, angle = torch.randn(rows, 9, head_dim).to(dtype), torch.rand(rows, pairs) * 6
    expected = reference.rope(x.double(), angle.cos().double(), angle.sin().double())
    actual = rope(x, angle.cos(), angle.sin())
    assert_close("rope", actual, expected, dtype)
    assert torch.equal(actual[..., 2 * pairs :], x[..., 2 * pairs :])


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 72, 6, 5])
def test_rotate(rows: int, head_dim: int) -> None:
    """Runs of the largest power of two are multiplied by the normalised Hadamard matrix, with the reference's
    bits.
    """
    size = rotation_size(head_dim)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    x = torch.randn(rows, 5, head_dim)
    expected = (x.double().unflatten(-1, (-1, size)) @ matrix / math.sqrt(size)).flatten(-2)
    assert_close("rotate", rotate(x), expected)
    assert torch.equal(rotate(x), reference_rotate(x))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_rotate_in_16_bits(dtype: torch.dtype) -> None:
    """16-bit numbers are rounded once, at the end."""
    x = torch.randn(63, 3, 64).to(dtype)
    assert torch.equal(rotate(x), reference_rotate(x.float()).to(dtype))


@pytest.mark.parametrize(("rows", "dtype"), ROWS)
@pytest.mark.parametrize("width", [1, 63, 1536])
def test_silu_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    """Gate times its sigmoid times up."""
    gate_up = (torch.randn(rows, 2 * width) * 4).to(dtype)
    assert_close("silu_mul", silu_mul(gate_up), reference.silu_mul(gate_up.double()), dtype)


def test_silu_of_extremes() -> None:
    """Gates far from zero neither overflow nor turn into something that is not a number."""
    gate_up = torch.tensor([[-1e4, -100.0, -88.0, 0.0, 88.0, 100.0, 1e4, 1.0] + [1.0] * 8])
    assert_close("silu_mul", silu_mul(gate_up), reference.silu_mul(gate_up.double()))


def test_rows_may_be_strided_and_empty() -> None:
    """Slices of a fused projection are read where they lie, and no rows give no rows."""
    fused, angle = torch.randn(9, 7, 64), torch.rand(9, 32)
    part, wide, weight = fused[:, 2:5], torch.randn(9, 200), torch.randn(64)
    for strided, dense in (
        (rope(part, angle.cos(), angle.sin()), rope(part.contiguous(), angle.cos(), angle.sin())),
        (rotate(part), rotate(part.contiguous())),
        (silu_mul(wide[:, 3:67]), silu_mul(wide[:, 3:67].contiguous())),
        (
            rms_norm(wide[:, 3:67], weight, 1e-5, torch.float32),
            rms_norm(wide[:, 3:67].contiguous(), weight, 1e-5, torch.float32),
        ),
    ):
        assert torch.equal(strided, dense)
    assert rotate(part[:0]).shape == (0, 3, 64)
    assert rms_norm(wide[:0, :64], weight, 1e-5, torch.float32).shape == (0, 64)


def test_bits_do_not_depend_on_the_batch() -> None:
    """A row alone and among others, and the same call again, have the same bits in every row-wise op."""
    x, weight, angle, heads = (
        torch.randn(63, 222),
        torch.randn(222),
        torch.rand(63, 32),
        torch.randn(63, 3, 64),
    )
    row = slice(7, 8)

    def all_ops(rows: slice) -> list[Tensor]:
        return [
            rms_norm(x[rows], weight, 1e-5, torch.float32),
            silu_mul(x[rows]),
            rope(heads[rows], angle[rows].cos(), angle[rows].sin()),
            rotate(heads[rows]),
        ]

    for alone, among, again in zip(all_ops(row), all_ops(slice(None)), all_ops(slice(None)), strict=True):
        assert torch.equal(alone, among[row])
        assert torch.equal(among, again)
