"""Linear layers: against float64, and the batch-invariant kernel's bits."""

from __future__ import annotations

import pytest
import torch

from surefoot.kernels.reference import ReferenceOps
from surefoot.kernels.triton.linear import invariant_linear, linear, prepare_linear
from surefoot.kernels.weights import dequantise

from ...numerics import assert_close
from ...weight_samples import KINDS, random_weight

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 63, 111)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize(("num_out", "num_in"), [(1, 63), (111, 96), (63, 111)])
def test_invariant_product(dtype: torch.dtype, rows: int, num_out: int, num_in: int) -> None:
    """The product with a bias, whatever the sizes."""
    x, weight, bias = torch.randn(rows, num_in).to(dtype), torch.randn(num_out, num_in), torch.randn(num_out)
    prepared = prepare_linear(weight.to(dtype), bias, dtype)
    actual = invariant_linear(x, prepared)
    assert actual.dtype == dtype
    expected = x.double() @ prepared.weight.double().T + bias.to(dtype).double()
    assert_close("invariant_linear", actual, expected, dtype)
    assert_close("linear", linear(x, prepared), expected, dtype)


def test_invariant_rows() -> None:
    """A row's bits are the same alone, among others, and again."""
    x, weight = torch.randn(111, 96), prepare_linear(torch.randn(63, 96), None, torch.float32)
    together = invariant_linear(x, weight)
    assert torch.equal(together, invariant_linear(x, weight))
    for row in (0, 70, 110):
        assert torch.equal(invariant_linear(x[row : row + 1], weight)[0], together[row])


def test_weights_of_several_formats_are_one_layer() -> None:
    """Groups stand for the reference's numbers, and outputs follow one another."""
    x, weights = torch.randn(5, 96), [*(random_weight(kind, 7, 96) for kind in KINDS), torch.randn(3, 96)]
    actual = linear(x, prepare_linear(weights, None, torch.float32))
    assert torch.equal(actual, ReferenceOps().linear(x, ReferenceOps().prepare_linear(weights)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_become_the_activations_dtype(dtype: torch.dtype) -> None:
    """Group weights are kept in the activations' dtype, and the result comes in x's."""
    x, weight = torch.randn(5, 96), random_weight("q8_0", 11, 96)
    prepared = prepare_linear(weight, None, dtype)
    assert prepared.weight.dtype == dtype
    actual = linear(x, prepared)
    assert actual.dtype == torch.float32
    assert_close("linear", actual, x.double() @ dequantise(weight).double().T, dtype)
