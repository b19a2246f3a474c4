"""What the model runs over: a step as tensors."""

from __future__ import annotations

from msgspec import Struct
from torch import Tensor

from surefoot.kernels.base import Past
from surefoot.kernels.layout import CacheFormat


class StepInput(Struct, frozen=True):
    """A step as tensors: N rows of B sequences, and which R rows need logits."""

    token_ids: Tensor  # int64 [N]
    positions: Tensor  # int64 [N]
    cu_rows: Tensor  # int32 [B + 1]
    past: tuple[Past, ...]  # of all sequences, full precision first
    logit_rows: Tensor  # int64 [R]
    logit_spans: list[range]  # per sequence, its part of the R rows
    blocks: Tensor  # int32 [N], where each row will be committed
    slots: Tensor  # int32 [N]
    num_rotated: int = 0  # the last rows of the step, whose keys are stored rotated

    @property
    def formats(self) -> tuple[CacheFormat, ...]:
        """Of the past."""
        return tuple(past.format for past in self.past)

    @property
    def num_rows(self) -> int:
        """Tokens of the step."""
        return len(self.token_ids)
