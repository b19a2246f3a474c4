"""Ops that plain torch does as well as a kernel would, for the sets that take them as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Matrix(Protocol):
    """A prepared weight that is one `[out, in]` tensor."""

    @property
    def weight(self) -> Tensor:
        """Of any floating dtype."""


class PlainOps:
    """Lookups, checks and copies; nothing is recorded."""

    row_tile = 0

    def embed(self, numbers: Tensor, weight: Matrix) -> Tensor:
        """Widened, if the weight is in 16 bits."""
        return weight.weight.index_select(0, numbers).float()

    def take(self, table: Tensor, numbers: Tensor) -> Tensor:
        """As they are."""
        return table.index_select(0, numbers)

    def finite_rows(self, x: Tensor) -> Tensor:
        """Looks at every number."""
        return x.isfinite().all(-1)

    def keep(self, k: Tensor, v: Tensor, kept_k: Tensor, kept_v: Tensor) -> None:
        """Through the kept rows and back."""
        for rows, kept in ((k, kept_k), (v, kept_v)):
            kept.copy_(rows)
            rows.copy_(kept)

    def record(self, forward: Callable[[], Tensor], *, known: bool = False) -> None:
        """There are no launches of ours to note down."""
