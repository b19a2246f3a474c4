"""A model's shape, whichever file it was read from (`hf_config.py`, `gguf_config.py`)."""

from __future__ import annotations

import math

import msgspec
from msgspec import Struct

from .model_errors import BadModelFiles, UnsupportedModel

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


class RopeConfig(Struct, frozen=True, kw_only=True):
    """Rotary embedding. `attention_factor` scales cos and sin; `freq_factors` divide the frequencies.

    (GGUF files have no rope type llama3; they hold its outcome as factors.)
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    freq_factors: tuple[float, ...] = ()


class ModelConfig(Struct, frozen=True, kw_only=True):
    """What the forward pass depends on. `no_rope_layers` are the indices of layers that do not rotate."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    no_rope_layers: tuple[int, ...] = ()
    sliding_window: int | None = None

    @property
    def max_model_len(self) -> int:
        """The most tokens of prompt and output together.

        A model with a sliding window is served up to its window only: there every token sees all before it,
        so attention needs no window and the result is exact.
        """
        return min(self.max_position_embeddings, self.sliding_window or self.max_position_embeddings)

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by."""
        return 1 / math.sqrt(self.head_dim)

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if type(value) is int and value < 1:
                raise BadModelFiles(f"The model's {name} is {value}, but must be positive")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(f"{self.num_heads} heads do not divide over {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise UnsupportedModel(f"The head dimension is {self.head_dim}, which is odd")


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """The temperature of YaRN's attention (Peng et al. 2023, arXiv 2309.00071)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def every_nth(num_layers: int, interval: int) -> tuple[int, ...]:
    """The indices of layers `interval`, `2 * interval`, ... counted from 1."""
    return tuple(range(interval - 1, num_layers, interval))
