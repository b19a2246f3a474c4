"""A model's shape from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .model_config import FAMILIES, ModelConfig, RopeConfig, every_nth, yarn_mscale
from .model_errors import BadModelFiles, UnsupportedModel


def config_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], freq_factors: tuple[float, ...]
) -> ModelConfig:
    """Read GGUF metadata. `shapes` are the tensors under our names, `freq_factors` is `rope_freqs.weight`."""
    family = metadata.get("general.architecture")
    if family not in FAMILIES:
        raise UnsupportedModel(f"The GGUF architecture is {family!r}")
    keys = _GgufKeys(metadata, family)
    if keys.get("expert_count", 0):
        raise UnsupportedModel(f"The model is a mixture of {keys.get('expert_count', 0)} experts")
    num_layers, num_heads = keys.require("block_count"), keys.require("attention.head_count")
    hidden_size = keys.require("embedding_length")
    head_dim = keys.get("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.get(key, head_dim) != head_dim:
            raise UnsupportedModel(
                f"{key} is {keys.get(key, head_dim)} beside a head dimension of {head_dim}"
            )
    return ModelConfig(
        family=family,
        vocab_size=shapes.get("model.embed_tokens.weight", (0,))[0],
        hidden_size=hidden_size,
        intermediate_size=keys.require("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=keys.get("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=keys.require("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=keys.require("context_length"),
        rope=_gguf_rope(keys, freq_factors),
        tie_word_embeddings="lm_head.weight" not in shapes,
        qkv_bias="model.layers.0.self_attn.q_proj.bias" in shapes,
        o_bias="model.layers.0.self_attn.o_proj.bias" in shapes,
        mlp_bias="model.layers.0.mlp.gate_proj.bias" in shapes,
        qk_norm=family == "qwen3",
        # GGUF has no key for these layers: llama.cpp, which defines the format, takes every fourth.
        no_rope_layers=every_nth(num_layers, 4) if family == "smollm3" else (),
        sliding_window=keys.get("attention.sliding_window", None),
    )


class _GgufKeys:
    """The keys under the architecture's own prefix."""

    def __init__(self, metadata: Mapping[str, Any], family: str) -> None:
        self._metadata, self._family = metadata, family

    def get(self, key: str, default: Any) -> Any:
        value = self._metadata.get(f"{self._family}.{key}", default)
        if isinstance(value, list):
            raise UnsupportedModel(f"{key} differs between layers")
        return value

    def require(self, key: str) -> Any:
        value = self.get(key, None)
        if value is None:
            raise BadModelFiles(f"The GGUF file lacks {self._family}.{key}")
        return value


def _gguf_rope(keys: _GgufKeys, freq_factors: tuple[float, ...]) -> RopeConfig:
    kind = keys.get("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModel(f"The GGUF rope scaling type is {kind!r}")
    factor = keys.get("rope.scaling.factor", 1.0)
    attention_factor = (
        yarn_mscale(factor) * keys.get("rope.scaling.attn_factor", 1.0) if kind == "yarn" else 1.0
    )
    return RopeConfig(
        theta=keys.get("rope.freq_base", 10_000.0),
        kind="default" if kind == "none" else kind,
        factor=factor,
        original_max_positions=keys.get(
            "rope.scaling.original_context_length", keys.require("context_length")
        ),
        beta_fast=keys.get("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.get("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=attention_factor,
        freq_factors=freq_factors,
    )
