"""What quantised formats store: a token's K or V of one head as codes, a scale and a zero point.

`value = scale * code + zero`, codes from 0 to `2 ** bits - 1`, scale and zero point in float16, all from the
token's own numbers: its form is the same whatever else is stored.
"""

from __future__ import annotations

import torch
from msgspec import Struct
from torch import Tensor


class Codes(Struct, frozen=True, kw_only=True):
    """Rows `[..., head_dim]`: `packed` uint8 `[..., head_dim * bits / 8]` (see layout.py), `scale` and `zero`
    float16 `[...]`.
    """

    packed: Tensor
    scale: Tensor
    zero: Tensor


def quantise(x: Tensor, bits: int) -> Codes:
    """Codes of rows `[..., head_dim]`. The scale is the range over the number of steps; codes are taken with
    the rounded scale and zero point. What is not finite gives pairs that are not.
    """
    # Adding 0 turns -0 into 0, so that a pair's bits follow from its value.
    x, levels = x.float() + 0.0, float(2**bits - 1)
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale, zero = ((high - low) / levels).half(), low.half()
    steps = (x - zero.float()) / scale.float()
    codes = torch.where(scale > 0, steps.nan_to_num().clamp(0.0, levels).round(), 0.0).to(torch.uint8)
    return Codes(packed=_pack(codes, bits), scale=scale[..., 0], zero=zero[..., 0])


def dequantise(codes: Codes, bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that codes stand for."""
    scale, zero = codes.scale.to(dtype)[..., None], codes.zero.to(dtype)[..., None]
    return _unpack(codes.packed, bits).to(dtype) * scale + zero


def rotation_size(head_dim: int) -> int:
    """The largest power of two that divides `head_dim`."""
    return head_dim & -head_dim


def rotate(x: Tensor) -> Tensor:
    """Multiply each run of `rotation_size` dimensions by the normalised Hadamard matrix (Sylvester's order).

    It is orthogonal and its own inverse: rotating both q and k leaves scores as they were, and spreads a
    large dimension over all (QuaRot, arXiv 2404.00456).
    """
    size = rotation_size(x.shape[-1])
    runs: Tensor = x.unflatten(-1, (-1, size))
    span = 1
    while span < size:
        first, second = runs.unflatten(-1, (-1, 2, span)).unbind(-2)
        runs = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        span *= 2
    return torch.flatten(runs * size**-0.5, -2)


def _pack(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes
    low, high = codes.chunk(2, dim=-1)
    return low | (high << 4)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    return packed if bits == 8 else torch.cat((packed & 15, packed >> 4), dim=-1)
