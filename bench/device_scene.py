"""Sequences with random queries, keys, values and caches, for checks of attention."""

from __future__ import annotations

from itertools import accumulate

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from surefoot.backends.engine.step_size import TABLE_STEP
from surefoot.kernels.base import Observed, Ops, Past
from surefoot.kernels.layout import CacheFormat
from surefoot.kernels.reference import ReferenceOps

from .device_loads import Shape, on, slots_of


class Scene(Struct, frozen=True, kw_only=True):
    """What attention takes. `layer` holds every sequence's committed tokens, in blocks of random order."""

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    cu_rows: Tensor
    layer: Tensor
    pasts: tuple[Past, ...]

    @classmethod
    def random(cls, shape: Shape, rows: list[int], lengths: dict[CacheFormat, list[int]]) -> Scene:
        """Of so many rows and, in each format, committed tokens per sequence."""
        layout, total = shape.layout, sum(rows)
        heads = shape.num_heads, shape.num_kv_heads, shape.num_kv_heads
        # Rows of a fused projection: strided.
        q, k, v = torch.randn(total, sum(heads), shape.head_dim).to(shape.dtype).split(heads, dim=1)
        counts = {own: [-(-n // layout.capacity(own)) for n in each] for own, each in lengths.items()}
        num_blocks = 1 + sum(map(sum, counts.values()))
        layer, order = (
            torch.zeros(1, num_blocks, layout.block_bytes, dtype=torch.uint8),
            torch.randperm(num_blocks),
        )
        pasts = []
        for own, each in lengths.items():
            width = -(-max(counts[own]) // TABLE_STEP) * TABLE_STEP
            table = torch.zeros(len(rows), width, dtype=torch.int32)
            for b, (length, count) in enumerate(zip(each, counts[own], strict=True)):
                table[b, :count], order = order[:count], order[count:]
                at = slots_of(layout, own, torch.arange(length), first_block=0)
                keys, values = torch.randn(2, 1, length, shape.num_kv_heads, shape.head_dim)
                blocks = table[b][at.blocks.long()]
                ReferenceOps().commit(layer, layout, keys, values + 0.3, blocks, at.slots, own)
            pasts.append(Past(block_table=table, lengths=torch.tensor(each, dtype=torch.int32), format=own))
        cu_rows = torch.tensor([0, *accumulate(rows)], dtype=torch.int32)
        return cls(shape=shape, q=q, k=k, v=v, cu_rows=cu_rows, layer=layer[0], pasts=tuple(pasts))

    def on(self, device: torch.device) -> Scene:
        """The same on a device."""
        return replace(on(self, device), pasts=tuple(on(past, device) for past in self.pasts))

    def float(self) -> Scene:
        """The same numbers in float32, but for those in the cache."""
        return replace(self, q=self.q.float(), k=self.k.float(), v=self.v.float())

    def alone(self, sequence: int) -> Scene:
        """One sequence of it."""
        begin, end = self.cu_rows[sequence : sequence + 2].tolist()
        rows, own = slice(begin, end), slice(sequence, sequence + 1)
        return replace(
            self,
            q=self.q[rows],
            k=self.k[rows],
            v=self.v[rows],
            cu_rows=self.cu_rows[sequence : sequence + 2] - begin,
            pasts=tuple(
                Past(block_table=past.block_table[own], lengths=past.lengths[own], format=past.format)
                for past in self.pasts
            ),
        )

    def attention(self, ops: Ops) -> Tensor:
        """Over past and present."""
        args = self.q, self.k, self.v, self.cu_rows, self.layer, self.shape.layout, self.pasts
        return ops.attention(*args, self.shape.scale)

    def lse(self, ops: Ops) -> Tensor:
        """Log-sum-exp over past and present, in float32."""
        lse = torch.empty(self.q.shape[:2], device=self.q.device)
        args = self.q, self.k, self.v, self.cu_rows, self.layer, self.shape.layout, self.pasts
        ops.attention(*args, self.shape.scale, lse)
        return lse

    def past(self, ops: Ops) -> tuple[Tensor, Tensor]:
        """Over the past alone."""
        args = self.q, self.cu_rows, self.layer, self.shape.layout, self.pasts
        return ops.past_attention(*args, self.shape.scale)

    def present(self, ops: Ops) -> tuple[Tensor, Tensor]:
        """Over the rows alone."""
        return ops.present_attention(self.q, self.k, self.v, self.cu_rows, self.shape.scale)

    def masses(self, ops: Ops, observed: Observed) -> tuple[Tensor, Tensor]:
        """What the tokens of the first format, and the rows, received."""
        args = self.q, self.cu_rows, self.layer, self.shape.layout, self.pasts[0]
        past = ops.past_mass(*args, self.shape.scale, observed)
        return past, ops.present_mass(self.q, self.k, self.cu_rows, self.shape.scale, observed)
