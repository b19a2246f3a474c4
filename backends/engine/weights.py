"""A model's weights under one naming: that of Hugging Face's Llama, wherever they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from surefoot.kernels.base import AnyWeight

from .model_config import ModelConfig
from .model_errors import BadModelFiles

Shapes = Mapping[str, tuple[int, ...]]


class WeightSource(Protocol):
    """Where weights are read from, one tensor at a time."""

    @property
    def shapes(self) -> Shapes:
        """Every tensor's shape by name."""

    def tensor(self, name: str) -> AnyWeight:
        """A tensor in a form of the source's choice, in memory of its own; a vector is in a float dtype."""


def layer_prefix(layer: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{layer}."


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that a model of this config has."""
    shapes = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        shapes.update({layer_prefix(layer) + name: shape for name, shape in _layer_shapes(config).items()})
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    shapes["input_layernorm.weight"] = shapes["post_attention_layernorm.weight"] = (hidden,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def check_weights(config: ModelConfig, shapes: Shapes) -> None:
    """Raise `BadModelFiles` with the names of tensors that are missing, unexpected or of another shape."""
    expected = expected_shapes(config)
    unexpected = [name for name in shapes if name not in expected and not _is_redundant(name, config)]
    faults = {
        "missing": sorted(expected.keys() - shapes.keys()),
        "not expected": sorted(unexpected),
        "of the wrong shape": [
            f"{name} {list(shapes[name])} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in shapes and tuple(shapes[name]) != shape
        ],
    }
    sentences = [f"{len(names)} {fault}: {_first(names)}" for fault, names in faults.items() if names]
    if sentences:
        raise BadModelFiles(f"The model's tensors do not fit its config: {'; '.join(sentences)}")


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Tensors that some files carry although the config already says what they hold."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _first(names: Sequence[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
