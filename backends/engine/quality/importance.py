"""One number per token: how much of later queries' attention it received."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .reader import Piece, Reader

PROMPT_QUERIES = 16
"""The last so many queries of a prompt are observed."""

EVERY = 16
"""After the prompt, a query in so many."""


class Importance:
    """The mean, over the observed queries after a token, of the attention it received, times the tokens that
    the query could see: 1 is an even share, however early or late the query.
    """

    def __init__(self) -> None:
        self._sums, self._counts = torch.zeros(0), torch.zeros(0)

    def copy(self) -> Importance:
        """To go on with on its own."""
        other = Importance()
        other._sums, other._counts = self._sums.clone(), self._counts.clone()
        return other

    def add(self, mass: Tensor, positions: Sequence[int]) -> None:
        """`mass` `[rows, length]` is what the queries at `positions` gave."""
        grown = mass.shape[1] - len(self._sums)
        self._sums, self._counts = (torch.cat((t, torch.zeros(grown))) for t in (self._sums, self._counts))
        for row, position in zip(mass, positions, strict=True):
            self._sums[:position] += row[:position] * (position + 1)
            self._counts[:position] += 1

    def scores(self, length: int) -> Tensor:
        """`[length]`; 0 for tokens that no observed query could see."""
        scores = torch.zeros(length)
        scores[: len(self._sums)] = self._sums / self._counts.clamp(min=1)
        return scores


def watch(reader: Reader, piece: Piece, importance: Importance, rows: Sequence[int]) -> Tensor:
    """Run a piece; what its `rows` attend to is added. Hidden states `[N, hidden]`."""
    if not rows:
        return reader.run([piece])
    first = piece.branch.length
    hidden, mass = reader.watch(piece, rows)
    importance.add(mass, [first + row for row in rows])
    return hidden
