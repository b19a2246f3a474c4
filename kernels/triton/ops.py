"""The Triton op set: every op by its module's launcher."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..base import AnyPast, AnyWeight, Observed, Past, SampleRows, Slots
from ..layout import FULL, BlockLayout, CacheFormat
from ..plain import PlainOps
from . import attention, commit, demote, linear, mass, merge, rms_norm, rope, rotate, sample, silu_mul
from .linear import DenseLinear

HEAD_DIMS = range(16, 257, 8)
"""Multiples of 8 keep the layout's planes aligned for every format; 16 is a matrix instruction's depth."""


class TritonOps(PlainOps):
    """The ops on a GPU. Rows may be strided; the last dimension is contiguous.

    Norms return `dtype`, and each op what it was given: so activations are in `dtype` between the residual
    sums, which stay in float32. `batch_invariant` makes linear layers' bits independent of the batch, at the
    cost that `linear.py` states.
    """

    head_dims = HEAD_DIMS
    is_asynchronous = True

    def __init__(self, dtype: torch.dtype = torch.bfloat16, *, batch_invariant: bool = False) -> None:
        self.name = "triton (batch-invariant)" if batch_invariant else "triton"
        self._dtype = dtype
        self._linear = linear.invariant_linear if batch_invariant else linear.linear

    def prepare_linear(
        self, weight: AnyWeight | Sequence[AnyWeight], bias: Tensor | None = None
    ) -> DenseLinear:
        """Groups become numbers of the activations' dtype."""
        return linear.prepare_linear(weight, bias, self._dtype)

    def linear(self, x: Tensor, weight: DenseLinear) -> Tensor:
        """The product is taken in the weight's dtype, the result returned in `x`'s."""
        return self._linear(x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """In the activations' dtype."""
        return rms_norm.rms_norm(x, weight, eps, self._dtype)

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual` in float32, the norm in the activations' dtype."""
        return rms_norm.add_rms_norm(residual, x, weight, eps, self._dtype)

    def norm_heads(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """Heads are rows to the kernel."""
        x.copy_(rms_norm.rms_norm(x.reshape(-1, x.shape[-1]), weight, eps, x.dtype).view_as(x))

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`cos` and `sin` in float32."""
        return rope.rope(x, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """In float32 inside."""
        return silu_mul.silu_mul(gate_up)

    def rotate(self, x: Tensor) -> Tensor:
        """In float32 inside."""
        return rotate.rotate(x)

    def rotate_heads(self, x: Tensor) -> None:
        """By way of a copy."""
        x.copy_(rotate.rotate(x))

    def keep(self, k: Tensor, v: Tensor, kept_k: Tensor, kept_v: Tensor) -> None:
        """Rows that have the kept rows' dtype are rounded already."""
        if k.dtype != kept_k.dtype:
            super().keep(k, v, kept_k, kept_v)
        else:
            kept_k.copy_(k)
            kept_v.copy_(v)

    def past_attention(
        self, q: Tensor, cu_rows: Tensor, layer: Tensor, layout: BlockLayout, past: AnyPast, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The log-sum-exp in float32."""
        return attention.past_attention(q, cu_rows, layer, layout, past, scale)

    def present_attention(
        self, q: Tensor, k: Tensor, v: Tensor, cu_rows: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The log-sum-exp in float32."""
        return attention.present_attention(q, k, v, cu_rows, scale)

    def merge(self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
        """The log-sum-exps in float32."""
        return merge.merge(out_a, lse_a, out_b, lse_b)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_rows: Tensor,
        layer: Tensor,
        layout: BlockLayout,
        past: AnyPast,
        scale: float,
        lse: Tensor | None = None,
        *,
        max_rows: int | None = None,
    ) -> Tensor:
        """One softmax over both."""
        return attention.attention(q, k, v, cu_rows, layer, layout, past, scale, lse, max_rows=max_rows)

    def past_mass(
        self,
        q: Tensor,
        cu_rows: Tensor,
        layer: Tensor,
        layout: BlockLayout,
        past: Past,
        scale: float,
        observed: Observed,
    ) -> Tensor:
        """Recomputed from the scores, as few rows are observed."""
        return mass.past_mass(q, cu_rows, layer, layout, past, scale, observed)

    def present_mass(self, q: Tensor, k: Tensor, cu_rows: Tensor, scale: float, observed: Observed) -> Tensor:
        """The same for the step's own rows."""
        return mass.present_mass(q, k, cu_rows, scale, observed)

    def commit(
        self,
        cache: Tensor,
        layout: BlockLayout,
        k: Tensor,
        v: Tensor,
        blocks: Tensor,
        slots: Tensor,
        cache_format: CacheFormat = FULL,
    ) -> None:
        """All layers in one launch."""
        commit.commit(cache, layout, k, v, blocks, slots, cache_format)

    def demote(self, cache: Tensor, layout: BlockLayout, source: Slots, target: Slots) -> None:
        """By way of staging blocks."""
        demote.demote(cache, layout, source, target)

    def sample(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """No host synchronisation: all launches are made whatever the rows' filters are."""
        return sample.sample(logits, rows)
