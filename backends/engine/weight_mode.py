"""In which form a model's matrices are served: as the file has them, or converted."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from surefoot.kernels.base import AnyWeight
from surefoot.kernels.weights import GROUP, GroupWeight, dequantise, quantise_q8_0


class WeightMode(StrEnum):
    """`NATIVE` keeps groups that the op sets take (GGUF's Q4_0, Q4_1, Q8_0) and makes 16 bits of all else.

    `INT8` makes groups of 32 with one scale each; a matrix whose rows are not whole groups stays in 16 bits.
    """

    NATIVE = "native"
    INT8 = "int8"
    BFLOAT16 = "bf16"
    FLOAT32 = "fp32"


def convert(matrix: AnyWeight, mode: WeightMode) -> AnyWeight:
    """A `[out, in]` matrix in the form that `mode` asks for."""
    if isinstance(matrix, GroupWeight):
        assert mode in (WeightMode.NATIVE, WeightMode.INT8), "for other modes a source gives floats"
        return matrix
    if mode is WeightMode.INT8 and matrix.shape[1] % GROUP == 0:
        return quantise_q8_0(matrix)
    return matrix.to(torch.float32 if mode is WeightMode.FLOAT32 else torch.bfloat16)


def to_float(tensor: AnyWeight) -> Tensor:
    """The same numbers in float32."""
    return dequantise(tensor) if isinstance(tensor, GroupWeight) else tensor.float()


def on_device(tensor: AnyWeight, device: torch.device) -> AnyWeight:
    """The same tensor where it will be used."""
    if isinstance(tensor, GroupWeight):
        return GroupWeight(kind=tensor.kind, data=tensor.data.to(device))
    return tensor.to(device)
