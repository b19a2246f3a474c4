"""Weights laid out as the linear kernels read them (`linear.py` describes a panel); done once, at load."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..weights import GroupWeight
from .forms import LANES


def pack_groups(weight: GroupWeight) -> Tensor:
    """Panels of a group format, uint8 `[panels, panel bytes]`; missing outputs are zeros."""
    codes = _panels(weight.codes.view(torch.uint8))  # [P, 16, G, 32]
    if weight.kind == "q8_0":
        quads = codes.unflatten(3, (8, 4)).permute(0, 2, 3, 1, 4)  # [P, G, 8, 16, 4]
    else:
        low, high = codes.unflatten(3, (4, 2, 4)).unbind(4)
        quads = (low | (high << 4)).permute(0, 2, 3, 1, 4)  # [P, G, 4, 16, 4]
    scales = [weight.scales] if weight.minimums is None else [weight.scales, weight.minimums]
    columns = torch.stack([_panels(s) for s in scales], dim=1).permute(0, 3, 1, 2)  # [P, G, 1 or 2, 16]
    return torch.cat((quads.flatten(1), columns.contiguous().view(torch.uint8).flatten(1)), dim=1)


def pack_dense(weight: Tensor) -> Tensor:
    """Panels of a 16- or 32-bit `[out, in]` weight, `[panels, in, 16]`; missing outputs are zeros."""
    return _panels(weight).transpose(1, 2).contiguous()


def pack_bias(bias: Tensor) -> Tensor:
    """float32 `[panels * 16]`."""
    return _panels(bias.float()).flatten().contiguous()


def _panels(rows: Tensor) -> Tensor:
    """`[out, ...]` -> `[panels, 16, ...]`."""
    missing = -rows.shape[0] % LANES
    padded = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows
    return padded.unflatten(0, (-1, LANES))
