"""The carrier of group weights against the `gguf` package's own arithmetic."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from surefoot.kernels.weights import BLOCK_BYTES, GroupKind, GroupWeight, concat, dequantise, quantise_q8_0

from .weight_samples import KINDS, random_weight

_TYPES = {
    "q4_0": GGMLQuantizationType.Q4_0,
    "q4_1": GGMLQuantizationType.Q4_1,
    "q8_0": GGMLQuantizationType.Q8_0,
}


@pytest.mark.parametrize("kind", KINDS)
def test_dequantise_agrees_with_gguf(kind: GroupKind) -> None:
    """A file's blocks stand for the numbers that the gguf package reads from them."""
    weight = random_weight(kind, num_out=7, num_in=96)
    expected = gguf.dequantize(weight.data.numpy(), _TYPES[kind])
    assert np.array_equal(dequantise(weight).numpy(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_shape_comes_from_the_bytes(kind: GroupKind) -> None:
    """The number of inputs follows from a row's bytes."""
    weight = random_weight(kind, num_out=5, num_in=64)
    assert (weight.num_out, weight.num_in, weight.num_groups) == (5, 64, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_partial_blocks_are_refused(kind: GroupKind) -> None:
    """A row that ends inside a block is named with its size."""
    with pytest.raises(ValueError, match=rf"{BLOCK_BYTES[kind]} bytes.*\(2, {BLOCK_BYTES[kind] + 1}\)"):
        GroupWeight(kind=kind, data=torch.zeros(2, BLOCK_BYTES[kind] + 1, dtype=torch.uint8))


def test_int8_made_at_load_is_close() -> None:
    """Quantising to 8-bit groups moves no weight by more than half a step and the scale's rounding."""
    dense = torch.randn(9, 96)
    weight = quantise_q8_0(dense)
    step = weight.scales.float().repeat_interleave(32, dim=1)
    assert ((dequantise(weight) - dense).abs() <= 0.5 * step + 127 * step * 2.0**-11).all()


def test_int8_of_zeros_is_zero() -> None:
    """A group of zeros has scale 0 and stays zero."""
    assert not dequantise(quantise_q8_0(torch.zeros(2, 64))).any()


def test_concat_refuses_unequal_kinds() -> None:
    """Weights of two formats cannot be one carrier."""
    with pytest.raises(ValueError, match="several kinds"):
        concat([random_weight("q4_0", 1, 32), random_weight("q8_0", 1, 32)])
