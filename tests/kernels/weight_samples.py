"""Random weights in group formats, with scales of the size that models have."""

from __future__ import annotations

import torch

from surefoot.kernels.weights import BLOCK_BYTES, GROUP, GroupKind, GroupWeight

KINDS: tuple[GroupKind, ...] = ("q4_0", "q4_1", "q8_0")


def random_weight(kind: GroupKind, num_out: int, num_in: int) -> GroupWeight:
    """Codes over their whole range; scales, and for Q4_1 minimums, around 0.01."""
    groups = num_in // GROUP
    data = torch.randint(0, 256, (num_out, groups, BLOCK_BYTES[kind]), dtype=torch.uint8)
    data[..., 0:2] = (torch.rand(num_out, groups, 1) * 0.01).half().view(torch.uint8)
    if kind == "q4_1":
        data[..., 2:4] = (-torch.rand(num_out, groups, 1) * 0.1).half().view(torch.uint8)
    return GroupWeight(kind=kind, data=data.flatten(1))
