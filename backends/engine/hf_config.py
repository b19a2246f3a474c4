"""A model's shape from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from .model_config import FAMILIES, ROPE_KINDS, ModelConfig, RopeConfig, every_nth, yarn_mscale
from .model_errors import BadModelFiles, UnsupportedModel


class _HfConfig(Struct, kw_only=True):
    """The part of `config.json` that we read; what is absent takes transformers' or a cautious default."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    architectures: list[str] | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool | UnsetType = UNSET
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    sliding_window: int | UnsetType | None = UNSET
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int = 4
    quantization_config: dict[str, Any] | None = None


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a `config.json`; raises `UnsupportedModel` or `BadModelFiles`."""
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedModel(f"The model type is {family!r}")
    try:
        hf = msgspec.convert(raw, _HfConfig)
    except msgspec.ValidationError as error:
        raise BadModelFiles(f"config.json: {error}") from error
    _refuse_variants(hf)
    takes_attention_bias = family in ("llama", "qwen3", "smollm3")
    ties_by_default = family == "smollm3"
    return ModelConfig(
        family=family,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads or hf.num_attention_heads,
        head_dim=hf.head_dim or (128 if family == "qwen3" else hf.hidden_size // hf.num_attention_heads),
        rms_norm_eps=hf.rms_norm_eps,
        max_position_embeddings=_max_positions(hf),
        rope=_rope(hf),
        tie_word_embeddings=ties_by_default if hf.tie_word_embeddings is UNSET else hf.tie_word_embeddings,
        qkv_bias=family == "qwen2" or (takes_attention_bias and hf.attention_bias),
        o_bias=takes_attention_bias and hf.attention_bias,
        mlp_bias=family in ("llama", "smollm3") and hf.mlp_bias,
        qk_norm=family == "qwen3",
        no_rope_layers=_no_rope_layers(hf) if family == "smollm3" else (),
        sliding_window=_sliding_window(hf),
    )


def _refuse_variants(hf: _HfConfig) -> None:
    if hf.architectures and not any(name.endswith("ForCausalLM") for name in hf.architectures):
        raise UnsupportedModel(
            f"The architecture is {', '.join(hf.architectures)}, which does not generate text"
        )
    if hf.hidden_act != "silu":
        raise UnsupportedModel(f"The activation is {hf.hidden_act!r}")
    if hf.quantization_config is not None:
        method = hf.quantization_config.get("quant_method", "unknown")
        raise UnsupportedModel(f"The weights are quantised (quantization_config, method {method!r})")
    for kind in hf.layer_types or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModel(f"A layer's type is {kind!r}")


def _no_rope_layers(hf: _HfConfig) -> tuple[int, ...]:
    """`no_rope_layers` has a 1 for every layer that does rotate, whatever its name says."""
    if hf.no_rope_layers is None:
        return every_nth(hf.num_hidden_layers, hf.no_rope_layer_interval)
    return tuple(i for i, rotates in enumerate(hf.no_rope_layers[: hf.num_hidden_layers]) if not rotates)


def _sliding_window(hf: _HfConfig) -> int | None:
    """The window, if any layer has one."""
    if hf.model_type == "llama":
        return None
    if hf.model_type == "mistral":
        return 4096 if hf.sliding_window is UNSET else hf.sliding_window
    if not hf.use_sliding_window or not hf.sliding_window:
        return None
    if hf.layer_types is not None:
        slides = "sliding_attention" in hf.layer_types
    else:
        slides = hf.model_type == "smollm3" or hf.max_window_layers < hf.num_hidden_layers
    return hf.sliding_window if slides else None


def _max_positions(hf: _HfConfig) -> int:
    """YaRN is often switched on beside the length of training; the stretched one is meant."""
    rope = _rope(hf)
    stretched = int(rope.original_max_positions * rope.factor) if rope.kind == "yarn" else 0
    return max(hf.max_position_embeddings, stretched)


class _HfRope(Struct, kw_only=True, forbid_unknown_fields=True):
    """`rope_parameters` of transformers 5, or `rope_scaling` of earlier releases.

    Unknown keys are refused: they would change the angles.
    """

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    partial_rotary_factor: float | None = None


def _rope_settings(hf: _HfConfig) -> dict[str, Any]:
    settings = hf.rope_parameters or hf.rope_scaling or {}
    return {key: value for key, value in settings.items() if value is not None}


def _rope_kind(hf: _HfConfig) -> str:
    settings = _rope_settings(hf)
    return str(settings.get("rope_type", settings.get("type", "default")))


def _read_rope(hf: _HfConfig) -> _HfRope:
    kind = _rope_kind(hf)
    if kind not in ROPE_KINDS:
        raise UnsupportedModel(f"The rope type is {kind!r}")
    try:
        rope = msgspec.convert(_rope_settings(hf), _HfRope)
    except msgspec.ValidationError as error:
        raise UnsupportedModel(f"The rope parameters cannot be read: {error}") from error
    partial = rope.partial_rotary_factor or hf.partial_rotary_factor or 1.0
    if partial != 1.0:
        raise UnsupportedModel(f"Only a part ({partial}) of each head is rotated")
    if kind in ("linear", "llama3") and rope.factor is None:
        raise BadModelFiles(f"config.json: rope type {kind!r} without a factor")
    return rope


def _rope(hf: _HfConfig) -> RopeConfig:
    rope, kind = _read_rope(hf), _rope_kind(hf)
    default_theta = 2_000_000.0 if hf.model_type == "smollm3" else 10_000.0
    original = rope.original_max_position_embeddings or hf.max_position_embeddings
    factor = rope.factor or (hf.max_position_embeddings / original if kind == "yarn" else 1.0)
    return RopeConfig(
        theta=rope.rope_theta or hf.rope_theta or default_theta,
        kind=kind,
        factor=factor,
        original_max_positions=original,
        low_freq_factor=rope.low_freq_factor,
        high_freq_factor=rope.high_freq_factor,
        beta_fast=rope.beta_fast or 32.0,
        beta_slow=rope.beta_slow or 1.0,
        truncate=rope.truncate is not False,
        attention_factor=_yarn_attention_factor(rope, factor) if kind == "yarn" else 1.0,
    )


def _yarn_attention_factor(rope: _HfRope, factor: float) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(factor, rope.mscale) / yarn_mscale(factor, rope.mscale_all_dim)
    return yarn_mscale(factor)
