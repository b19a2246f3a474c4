"""Runs the model over branches, and watches which tokens attention cares about."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from msgspec import Struct
from torch import Tensor

from surefoot.kernels.base import Observed, Past, SampleRows, Slots
from surefoot.kernels.layout import BlockLayout

from ..backend import EngineParts
from ..model import Attend
from .branch import BlockStore, Branch, pasts_of

MAX_ROWS = 512
"""Tokens of a step, as the engine's own default."""


class Piece(Struct, frozen=True):
    """The next tokens of a branch."""

    branch: Branch
    token_ids: Sequence[int]


class Reader:
    """A model and the blocks that its branches lie in.

    Attention sees what the engine's does: committed tokens in the formats they have, the step's own tokens
    rounded to the cache's dtype; q and K are rotated in every format, full precision included.
    """

    def __init__(self, parts: EngineParts, num_blocks: int) -> None:
        config = parts.loaded.config
        layout = BlockLayout(
            num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=parts.cache_dtype
        )
        self.store = BlockStore(parts.ops, layout, config.num_layers, num_blocks)
        self.tokenizer = parts.loaded.tokenizer
        self._model, self._ops, self._scale = parts.loaded.model, parts.ops, config.attention_scale
        rows = (config.num_layers, MAX_ROWS, config.num_kv_heads, config.head_dim)
        self._step_k = torch.zeros(rows, dtype=parts.cache_dtype)
        self._step_v = torch.zeros(rows, dtype=parts.cache_dtype)

    def read(self, branch: Branch, token_ids: Sequence[int]) -> None:
        """Commit tokens in full precision."""
        for begin in range(0, len(token_ids), MAX_ROWS):
            self.run([Piece(branch, token_ids[begin : begin + MAX_ROWS])])

    @torch.inference_mode()
    def run(self, pieces: Sequence[Piece], *, commit: bool = True) -> Tensor:
        """One step; hidden states `[N, hidden]`. Without `commit` a branch may come several times."""
        return self._step(pieces, [], [], commit=commit)

    @torch.inference_mode()
    def watch(self, piece: Piece, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """One step of one branch. Also the share of attention that each position received from each of some
        rows, `[len(rows), length]`: the most over the KV heads, the mean over layers.
        """
        masses: list[Tensor] = []
        hidden = self._step([piece], rows, masses, commit=True)
        return hidden, torch.stack(masses).mean(0)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Of rows of hidden states: float32 `[R, vocab]`."""
        return self._model.logits(hidden)

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: SampleRows) -> list[int]:
        """A token for each row of logits."""
        tokens: list[int] = self._ops.sample(logits, rows).tolist()
        return tokens

    def _step(
        self, pieces: Sequence[Piece], watched: Sequence[int], masses: list[Tensor], *, commit: bool
    ) -> Tensor:
        token_ids = torch.tensor([token for piece in pieces for token in piece.token_ids])
        positions = torch.cat([torch.arange(len(p.token_ids)) + p.branch.length for p in pieces])
        ends = accumulate((len(piece.token_ids) for piece in pieces), initial=0)
        cu_rows = torch.tensor(list(ends), dtype=torch.int32)
        attend = self._attend(pieces, cu_rows, torch.tensor(watched, dtype=torch.int32), masses)
        hidden = self._model.forward(token_ids, positions, attend)
        if commit:
            self._commit(pieces)
        return hidden

    def _attend(
        self, pieces: Sequence[Piece], cu_rows: Tensor, watched: Tensor, masses: list[Tensor]
    ) -> Attend:
        pasts = pasts_of([piece.branch for piece in pieces])
        branch, ops = pieces[0].branch, self._ops

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = ops.rotate(q), ops.rotate(k)
            ops.keep(k, v, self._step_k[layer, : len(k)], self._step_v[layer, : len(k)])
            cache, lse = (self.store.data[layer], self.store.layout), torch.empty(q.shape[:2])
            out = ops.attention(q, k, v, cu_rows, *cache, pasts, self._scale, lse)
            if len(watched):
                seen = Observed(rows=watched, lse=lse)
                old = [ops.past_mass(q, cu_rows, *cache, past, self._scale, seen) for past in pasts]
                new = ops.present_mass(q, k, cu_rows, self._scale, seen)
                masses.append(_by_position(branch, pasts, old, new))
            return out

        return attend

    def _commit(self, pieces: Sequence[Piece]) -> None:
        begin = 0
        for piece in pieces:
            end = begin + len(piece.token_ids)
            at: Slots = piece.branch.extend(len(piece.token_ids))
            rows = self._step_k[:, begin:end], self._step_v[:, begin:end]
            self._ops.commit(self.store.data, self.store.layout, *rows, at.blocks, at.slots)
            begin = end


def _by_position(branch: Branch, pasts: Sequence[Past], old: Sequence[Tensor], new: Tensor) -> Tensor:
    """The most over KV heads, in order of positions: `[rows, length]`; 0 for tokens that were dropped."""
    mass = torch.zeros(len(new), branch.length + new.shape[-1])
    mass[:, branch.length :] = new.amax(1)
    for past, part in zip(pasts, old, strict=True):
        positions = branch.held[past.format].positions
        mass[:, positions] = part.amax(1)[:, : len(positions)]
    return mass
