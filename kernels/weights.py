"""Weights in groups of 32, as GGUF files store them: what a loader fills and an op set's `prepare_linear`
takes.

A row is `in / 32` blocks one after another. A block (ggml's names and bytes): float16 scale d, for Q4_1 also
float16 minimum m, then the codes. Q8_0: 32 int8, value d * c. Q4_0 and Q4_1: 16 bytes, byte i holds code i in
its low half and code i + 16 in its high half; value d * (c - 8) and d * c + m.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from msgspec import Struct
from torch import Tensor

GROUP = 32
GroupKind = Literal["q4_0", "q4_1", "q8_0"]
BLOCK_BYTES: dict[GroupKind, int] = {"q4_0": 18, "q4_1": 20, "q8_0": 34}


class GroupWeight(Struct, frozen=True, kw_only=True):
    """A `[num_out, num_in]` weight in blocks: `data` uint8 `[num_out, num_in / 32 * BLOCK_BYTES[kind]]`."""

    kind: GroupKind
    data: Tensor

    def __post_init__(self) -> None:
        if (
            self.data.dtype != torch.uint8
            or self.data.dim() != 2
            or self.data.shape[1] % BLOCK_BYTES[self.kind]
        ):
            raise ValueError(
                f"{self.kind} rows are whole blocks of {BLOCK_BYTES[self.kind]} bytes in uint8, "
                f"not {tuple(self.data.shape)} of {self.data.dtype}"
            )

    @property
    def num_out(self) -> int:
        """Rows of the matrix."""
        return self.data.shape[0]

    @property
    def num_in(self) -> int:
        """Columns of the matrix."""
        return self.num_groups * GROUP

    @property
    def num_groups(self) -> int:
        """Groups of a row."""
        return self.data.shape[1] // BLOCK_BYTES[self.kind]

    @property
    def blocks(self) -> Tensor:
        """uint8 `[num_out, num_groups, block bytes]`."""
        return self.data.view(self.num_out, self.num_groups, BLOCK_BYTES[self.kind])

    @property
    def scales(self) -> Tensor:
        """float16 `[num_out, num_groups]`."""
        return self._half(0)

    @property
    def minimums(self) -> Tensor | None:
        """float16 `[num_out, num_groups]`, for Q4_1 alone."""
        return self._half(2) if self.kind == "q4_1" else None

    @property
    def codes(self) -> Tensor:
        """int8 `[num_out, num_groups, 32]`: -128 to 127 for Q8_0, 0 to 15 for the others."""
        if self.kind == "q8_0":
            return self.blocks[..., 2:].view(torch.int8)
        nibbles = self.blocks[..., -GROUP // 2 :]
        return torch.cat((nibbles & 15, nibbles >> 4), dim=-1).view(torch.int8)

    def _half(self, offset: int) -> Tensor:
        return self.blocks[..., offset : offset + 2].contiguous().view(torch.float16)[..., 0]


def dequantise(weight: GroupWeight) -> Tensor:
    """The float32 `[num_out, num_in]` matrix that the blocks stand for."""
    codes = weight.codes.float()
    if weight.kind == "q4_0":
        codes = codes - 8.0
    values = codes * weight.scales.float()[..., None]
    if weight.minimums is not None:
        values = values + weight.minimums.float()[..., None]
    return values.flatten(1)


def quantise_q8_0(weight: Tensor) -> GroupWeight:
    """8-bit groups of a float `[num_out, num_in]` weight: d = max |w| / 127 rounded to float16, codes to
    nearest.
    """
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 127.0).half()
    divisor = torch.where(scales == 0, torch.ones_like(scales), scales).float()[..., None]
    codes = (groups / divisor).round().clamp(-127, 127).to(torch.int8)
    blocks = torch.cat((scales[..., None].view(torch.uint8), codes.view(torch.uint8)), dim=-1)
    return GroupWeight(kind="q8_0", data=blocks.flatten(1))


def concat(weights: Sequence[GroupWeight]) -> GroupWeight:
    """Several weights of one kind and width as one, along the outputs."""
    kinds = {(w.kind, w.num_in) for w in weights}
    if len(kinds) != 1:
        raise ValueError(f"weights of several kinds or widths cannot be one: {sorted(kinds)}")
    return GroupWeight(kind=weights[0].kind, data=torch.cat([w.data for w in weights]))
