"""Every op in plain torch: what it means. Complete, kept, and what the other sets are tested against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from msgspec import Struct
from torch import Tensor

from .base import AnyPast, AnyWeight, Observed, Past, SampleRows, Slots, in_fold_order
from .codes import Codes, quantise, rotate
from .codes import dequantise as dequantise_codes
from .layout import FULL, BlockLayout, CacheFormat
from .noise import gumbel_noise
from .plain import PlainOps
from .weights import GroupWeight, dequantise


class DenseWeight(Struct, frozen=True):
    """A `[out, in]` weight in 16 or 32 bits, with an optional `[out]` bias of the same dtype."""

    weight: Tensor
    bias: Tensor | None


class ReferenceOps(PlainOps):
    """The plain op set, on any device."""

    name = "reference"
    head_dims = range(1, 1 << 16)
    is_asynchronous = False

    def prepare_linear(
        self, weight: AnyWeight | Sequence[AnyWeight], bias: Tensor | None = None
    ) -> DenseWeight:
        """Groups become the float32 that they stand for."""
        weights = [weight] if isinstance(weight, (Tensor, GroupWeight)) else weight
        dense = torch.cat([w if isinstance(w, Tensor) else dequantise(w) for w in weights])
        return DenseWeight(dense, None if bias is None else bias.to(dense.dtype))

    def linear(self, x: Tensor, weight: DenseWeight) -> Tensor:
        """The product is taken in the weight's dtype, the result returned in `x`'s."""
        return F.linear(x.to(weight.weight.dtype), weight.weight, weight.bias).to(x.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Zhang and Sennrich 2019, arXiv 1910.07467."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The sum stays in `residual`."""
        residual += x
        return self.rms_norm(residual, weight, eps)

    def norm_heads(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """Each head by itself."""
        x.copy_(self.rms_norm(x, weight, eps))

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Su et al. 2021, arXiv 2104.09864; dimensions beyond the rotary ones pass through."""
        half = cos.shape[-1]
        cos, sin = cos[:, None, :], sin[:, None, :]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Shazeer 2020, arXiv 2002.05202."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rotate(self, x: Tensor) -> Tensor:
        """See `codes.rotate`."""
        return rotate(x)

    def rotate_heads(self, x: Tensor) -> None:
        """See `codes.rotate`."""
        x.copy_(rotate(x))

    def past_attention(
        self, q: Tensor, cu_rows: Tensor, layer: Tensor, layout: BlockLayout, past: AnyPast, scale: float
    ) -> tuple[Tensor, Tensor]:
        """One sequence at a time: its tokens of all formats side by side make K and V `[S, G, D]`."""
        out, lse = _empty_part(q)
        pasts = in_fold_order(past)
        for b, (begin, end) in enumerate(pairwise(cu_rows.tolist())):
            parts = [_read(layer, layout, _slots(p, b, layout), q.dtype) for p in pasts]
            k, v = (torch.cat(side) for side in zip(*parts, strict=True)) if parts else (q[:0], q[:0])
            if len(k) > 0:
                out[begin:end], lse[begin:end] = _attend(
                    q[begin:end], k.permute(1, 2, 0), v.transpose(0, 1), scale, mask=None
                )
        return out, lse

    def present_attention(
        self, q: Tensor, k: Tensor, v: Tensor, cu_rows: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """One sequence at a time under a lower-triangular mask."""
        out, lse = _empty_part(q)
        starts = cu_rows.tolist()
        for begin, end in pairwise(starts):
            rows = slice(begin, end)
            mask = torch.ones(end - begin, end - begin, dtype=torch.bool, device=q.device).tril()
            out[rows], lse[rows] = _attend(
                q[rows],
                k[rows].permute(1, 2, 0).to(q.dtype),
                v[rows].transpose(0, 1).to(q.dtype),
                scale,
                mask,
            )
        return out, lse

    def merge(self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Tensor:
        """The softmax over both parts' keys from each part's own softmax (Flash-Decoding's reduction)."""
        top = torch.maximum(lse_a, lse_b)
        weight_a, weight_b = torch.exp(lse_a - top), torch.exp(lse_b - top)
        total = weight_a + weight_b
        return out_a * (weight_a / total)[..., None] + out_b * (weight_b / total)[..., None]

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
        """The three ops one after another."""
        old, old_lse = self.past_attention(q, cu_rows, layer, layout, past, scale)
        new, new_lse = self.present_attention(q, k, v, cu_rows, scale)
        if lse is not None:
            torch.logaddexp(old_lse, new_lse, out=lse)
        return self.merge(old, old_lse, new, new_lse)

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
        """One row at a time."""
        size = past.block_table.shape[1] * layout.capacity(past.format)
        mass = q.new_zeros(len(observed.rows), layout.num_kv_heads, size)
        for own, row, b in zip(mass, observed.rows.tolist(), _sequences(cu_rows, observed.rows), strict=True):
            k, _ = _read(layer, layout, _slots(past, b, layout), q.dtype)
            own[:, : len(k)] = _mass(q[row], k, scale, observed.lse[row])
        return mass

    def present_mass(self, q: Tensor, k: Tensor, cu_rows: Tensor, scale: float, observed: Observed) -> Tensor:
        """One row at a time."""
        mass = q.new_zeros(len(observed.rows), k.shape[1], int(cu_rows.diff().max()))
        for own, row, b in zip(mass, observed.rows.tolist(), _sequences(cu_rows, observed.rows), strict=True):
            seen = k[int(cu_rows[b]) : row + 1].to(q.dtype)
            own[:, : len(seen)] = _mass(q[row], seen, scale, observed.lse[row])
        return mass

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
        """One layer at a time."""
        at = Slots(blocks=blocks, slots=slots, format=cache_format)
        for layer, layer_k, layer_v in zip(cache, k.to(layout.dtype), v.to(layout.dtype), strict=True):
            _write(layer, layout, at, layer_k, layer_v)

    def demote(self, cache: Tensor, layout: BlockLayout, source: Slots, target: Slots) -> None:
        """One layer at a time."""
        for layer in cache:
            if source.format != target.format:
                _write(layer, layout, target, *_read(layer, layout, source, torch.float32))
                continue
            for plane in layout.planes(layer, source.format):
                moved = plane[source.blocks.long(), :, :, source.slots.long()]
                plane[target.blocks.long(), :, :, target.slots.long()] = moved

    def sample(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """Greedy rows take the argmax of the logits; the rest add noise to what the filters leave."""
        tokens = logits.argmax(-1)
        for r in rows.temperature.nonzero().flatten().tolist():
            scaled = _filter(
                logits[r] / rows.temperature[r],
                int(rows.top_k[r]),
                float(rows.top_p[r]),
                float(rows.min_p[r]),
            )
            noise = gumbel_noise(int(rows.seed[r]), int(rows.choice[r]), int(rows.position[r]), len(scaled))
            tokens[r] = (scaled + noise.to(scaled.device)).argmax()
        return tokens


def _slots(past: Past, sequence: int, layout: BlockLayout) -> Slots:
    """Where a sequence's tokens lie, in order."""
    token = torch.arange(int(past.lengths[sequence]), device=past.block_table.device)
    capacity = layout.capacity(past.format)
    blocks = past.block_table[sequence, token // capacity]
    return Slots(blocks=blocks, slots=token % capacity, format=past.format)


def _read(layer: Tensor, layout: BlockLayout, at: Slots, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and V `[R, G, D]` of R tokens: what is stored, or what it stands for."""
    k, v, *pairs = (
        plane[at.blocks.long(), :, :, at.slots.long()] for plane in layout.planes(layer, at.format)
    )
    if at.format.is_full:
        return k.to(dtype), v.to(dtype)
    k_scale, k_zero, v_scale, v_zero = pairs[0].unbind(-1)
    return (
        dequantise_codes(Codes(packed=k, scale=k_scale, zero=k_zero), at.format.k_bits, dtype),
        dequantise_codes(Codes(packed=v, scale=v_scale, zero=v_zero), at.format.v_bits, dtype),
    )


def _write(layer: Tensor, layout: BlockLayout, at: Slots, k: Tensor, v: Tensor) -> None:
    """Store K and V `[R, G, D]` of R tokens."""
    values: tuple[Tensor, ...] = (k, v)
    if not at.format.is_full:
        keys, vals = quantise(k, at.format.k_bits), quantise(v, at.format.v_bits)
        pairs = torch.stack((keys.scale, keys.zero, vals.scale, vals.zero), dim=-1)
        values = keys.packed, vals.packed, pairs
    for plane, value in zip(layout.planes(layer, at.format), values, strict=True):
        plane[at.blocks.long(), :, :, at.slots.long()] = value.to(plane.dtype)


def _sequences(cu_rows: Tensor, rows: Tensor) -> list[int]:
    """The sequence that each of some rows belongs to."""
    found: list[int] = (torch.searchsorted(cu_rows, rows, right=True) - 1).tolist()
    return found


def _mass(q: Tensor, k: Tensor, scale: float, lse: Tensor) -> Tensor:
    """`q` `[H, D]`, `k` `[S, G, D]`, `lse` `[H]` -> weights, summed over the heads of a group: `[G, S]`."""
    grouped = q.unflatten(0, (k.shape[1], -1))
    scores = torch.einsum("gmd,sgd->gms", grouped, k) * scale
    return torch.exp(scores - lse.to(q.dtype).unflatten(0, (k.shape[1], -1))[..., None]).sum(1)


def _empty_part(q: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(q), torch.full(q.shape[:2], -math.inf, dtype=q.dtype, device=q.device)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """`q` `[T, H, D]`, `k` `[G, D, S]`, `v` `[G, S, D]`, `mask` `[T, S]` -> output `[T, H, D]`, log-sum-exp
    `[T, H]`.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, group = k.shape[0], num_heads // k.shape[0]
    grouped = (
        q.view(num_rows, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    )  # [G, group * T, D]
    scores = torch.bmm(grouped, k) * scale
    if mask is not None:
        scores.masked_fill_(~mask.repeat(group, 1), -math.inf)
    lse = scores.logsumexp(-1)
    out = torch.bmm(torch.exp(scores - lse[..., None]), v)
    back = (num_kv_heads, group, num_rows)
    return (
        out.view(*back, head_dim).permute(2, 0, 1, 3).reshape(q.shape),
        lse.view(back).permute(2, 0, 1).reshape(num_rows, num_heads),
    )


def _filter(scaled: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Drop tokens outside top-k, then outside the nucleus of what is left, then below `min_p` of the best."""
    if 0 < top_k < len(scaled):
        scaled = scaled.masked_fill(scaled < scaled.topk(top_k).values[-1], -math.inf)
    if top_p < 1.0:
        ordered, order = scaled.sort(descending=True, stable=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        scaled = scaled.index_fill(0, order[before >= top_p], -math.inf)
    if min_p > 0.0:
        scaled = scaled.masked_fill(scaled < scaled.max() + math.log(min_p), -math.inf)
    return scaled
