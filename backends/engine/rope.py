"""The angles of rotary embedding (Su et al. 2021, arXiv 2104.09864) and their scalings for long contexts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .model_config import RopeConfig


def rope_tables(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 `[num_positions, head_dim / 2]`; angles are float64, exact beyond any context."""
    angles = torch.outer(
        torch.arange(num_positions, dtype=torch.float64), inverse_frequencies(rope, head_dim)
    )
    return (angles.cos() * rope.attention_factor).float(), (angles.sin() * rope.attention_factor).float()


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions, float64 `[head_dim / 2]`."""
    freqs = rope.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if rope.freq_factors:
        freqs = freqs / torch.tensor(rope.freq_factors, dtype=torch.float64)
    if rope.kind == "linear":
        return freqs / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, freqs)
    if rope.kind == "yarn":
        return _yarn(rope, freqs, head_dim)
    return freqs


def _llama3(rope: RopeConfig, freqs: Tensor) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended by where they lie."""
    turns = rope.original_max_positions * freqs / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return freqs * (kept + (1 - kept) / rope.factor)


def _yarn(rope: RopeConfig, freqs: Tensor, head_dim: int) -> Tensor:
    """Like llama3, but the blend is linear in the dimension (Peng et al. 2023, arXiv 2309.00071)."""

    def dimension_with(turns: float) -> float:
        return (
            head_dim
            * math.log(rope.original_max_positions / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = dimension_with(rope.beta_fast), dimension_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float64) - low) / width).clamp(0, 1)
    return freqs * (1 - stretched + stretched / rope.factor)
