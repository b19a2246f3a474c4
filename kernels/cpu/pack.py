"""Weights laid out as the linear kernels read them (`linear.py` describes a panel); done once, at load."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from msgspec import Struct
from torch import Tensor

from ..base import AnyWeight
from ..weights import GroupWeight, concat
from . import kinds
from .forms import LANES

_GROUP_KINDS = {"q4_0": kinds.Q4_0, "q4_1": kinds.Q4_1, "q8_0": kinds.Q8_0}
_DENSE_KINDS = {torch.float32: kinds.F32_, torch.bfloat16: kinds.BF16, torch.float16: kinds.F16}


class PackedWeight(Struct, frozen=True, kw_only=True):
    """A weight in panels, for outputs of its layer from `first_out` on; `width` is in groups or in inputs."""

    kind: int
    panels: Tensor
    panel_bytes: int
    first_out: int
    num_out: int
    width: int
    grouped: bool
    bias: Tensor | None


class PackedLinear(Struct, frozen=True, kw_only=True):
    """What `linear` takes: one weight, or several of different formats side by side."""

    parts: tuple[PackedWeight, ...]
    num_in: int
    num_out: int


def pack_layer(weight: AnyWeight | Sequence[AnyWeight], bias: Tensor | None) -> PackedLinear:
    """Pack into panels; neighbours of one format become one weight."""
    weights = [weight] if isinstance(weight, (Tensor, GroupWeight)) else list(weight)
    parts: list[PackedWeight] = []
    for _, run in groupby(weights, key=_format):
        first = parts[-1].first_out + parts[-1].num_out if parts else 0
        parts.append(_pack(list(run), first, bias))
    widths = {_num_in(w) for w in weights}
    if len(widths) != 1:
        raise ValueError(f"weights of one layer have one input width, not {sorted(widths)}")
    return PackedLinear(
        parts=tuple(parts), num_in=widths.pop(), num_out=parts[-1].first_out + parts[-1].num_out
    )


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


def _format(weight: AnyWeight) -> str:
    return str(weight.dtype) if isinstance(weight, Tensor) else weight.kind


def _num_in(weight: AnyWeight) -> int:
    return int(weight.shape[1]) if isinstance(weight, Tensor) else weight.num_in


def _pack(weights: list[AnyWeight], first_out: int, bias: Tensor | None) -> PackedWeight:
    """One run of weights of one format."""
    groups = [w for w in weights if isinstance(w, GroupWeight)]
    if groups:
        whole = concat(groups)
        kind, panels, width, num_out = (
            _GROUP_KINDS[whole.kind],
            pack_groups(whole),
            whole.num_groups,
            whole.num_out,
        )
    else:
        dense = torch.cat([w for w in weights if isinstance(w, Tensor)])
        kind, panels, width, num_out = (
            _DENSE_KINDS[dense.dtype],
            pack_dense(dense),
            dense.shape[1],
            dense.shape[0],
        )
    own_bias = None if bias is None else pack_bias(bias[first_out : first_out + num_out])
    return PackedWeight(
        kind=kind,
        panels=panels,
        panel_bytes=panels[0].numel() * panels.element_size(),
        first_out=first_out,
        num_out=num_out,
        width=width,
        grouped=bool(groups),
        bias=own_bias,
    )
