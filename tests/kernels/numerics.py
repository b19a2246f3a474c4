"""How far a result may lie from float64, in one table."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Largest norm of the error over the norm of the float64 result, by what the inputs are rounded to."""


def assert_close(name: str, actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """The error's norm over the expected norm stays within the table's entry."""
    assert expected.dtype == torch.float64
    assert actual.shape == expected.shape
    ratio = ((actual.double() - expected).norm() / expected.norm()).item()
    assert ratio <= TOLERANCE[dtype], f"{name}: error ratio {ratio:.2e}, at most {TOLERANCE[dtype]:.0e}"
