"""Tiny random models of every family, as Hugging Face folders and as GGUF files, and a plain attention."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from surefoot.backends.engine.hf_folder import read_config
from surefoot.backends.engine.model import Model
from surefoot.backends.engine.model_config import ModelConfig
from surefoot.backends.engine.safetensors_folder import SafetensorsFolder
from surefoot.backends.engine.tokenizer import byte_level_alphabet
from surefoot.backends.engine.weight_mode import WeightMode
from surefoot.backends.engine.weights import check_weights
from surefoot.kernels.base import Ops
from surefoot.kernels.reference import ReferenceOps

SHAPE = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-linear": ("llama", {"rope_parameters": _LINEAR}),
    "llama-llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN}),
    "llama-yarn-mscale": (
        "llama",
        {
            "rope_parameters": {
                **_YARN,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "beta_fast": 16.0,
                "truncate": False,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral-window": ("mistral", {"sliding_window": 256}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "smollm3": ("smollm3", {}),
    "smollm3-chosen-layers": ("smollm3", {"no_rope_layers": [1, 0, 0, 1], "tie_word_embeddings": False}),
}
"""By name: a family and what its config has beside `SHAPE`."""


def tiny_hf_model(name: str, **changes: Any) -> PreTrainedModel:
    """A variant with every parameter random, biases and norms included; the same each time. `changes` are to
    its config.
    """
    family, extra = VARIANTS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[family](**{**SHAPE, **extra, **changes}), attn_implementation="eager"
    )
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.15)
    return model.eval()


def load_folder(folder: Path, mode: WeightMode = WeightMode.FLOAT32, ops: Ops | None = None) -> Model:
    """The model of a Hugging Face folder that has no tokenizer; on the reference ops if none are given."""
    config = read_config(folder)
    with SafetensorsFolder(folder) as source:
        check_weights(config, source.shapes)
        return Model(config, source, ops or ReferenceOps(), mode=mode)


class PlainAttention:
    """Causal attention in float32 over all that was passed before. K and V are rounded to `cache_dtype`."""

    def __init__(self, config: ModelConfig, cache_dtype: torch.dtype = torch.float32) -> None:
        self._scale, self._dtype = config.attention_scale, cache_dtype
        self._past: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The model's `attend`."""
        k, v = k.to(self._dtype).float(), v.to(self._dtype).float()
        if layer in self._past:
            k, v = torch.cat((self._past[layer][0], k)), torch.cat((self._past[layer][1], v))
        self._past[layer] = k, v
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(group, 1)) * self._scale
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(k) - len(q) + 1)
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        return torch.einsum("hnm,mhd->nhd", weights, v.repeat_interleave(group, 1))


@torch.inference_mode()
def our_logits(model: Model, token_ids: Tensor, cache_dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits at every position, computed in pieces of 50 tokens."""
    attention = PlainAttention(model.config, cache_dtype)
    pieces = zip(token_ids.split(50), torch.arange(len(token_ids)).split(50), strict=True)
    return torch.cat([model.logits(model.forward(tokens, at, attention)) for tokens, at in pieces])


@torch.inference_mode()
def hf_logits(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """What transformers computes."""
    logits: Tensor = model(token_ids[None]).logits[0]
    return logits


def error_ratio(got: Tensor, want: Tensor) -> float:
    """The norm of the difference over the norm of what is wanted."""
    return float((got - want).norm() / want.norm())


def random_tokens(count: int) -> Tensor:
    """Token ids of a tiny model."""
    return torch.randint(0, SHAPE["vocab_size"], (count,), generator=torch.Generator().manual_seed(1))


def interleave(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """The order that llama.cpp's converter gives to the rows of q and k: each half's rows in turn."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
    freq_factors: np.ndarray[Any, Any] | None = None,
) -> None:
    """Write a model as llama.cpp's converter would.

    `kinds` quantises tensors by the end of their Hugging Face name; `model` gets the rounded weights, so that
    it stays the reference.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    _add_shape(writer, config)
    add_tiny_tokenizer(writer)
    if freq_factors is not None:
        writer.add_tensor("rope_freqs.weight", freq_factors.astype(np.float32))
    for name, parameter in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            kind = next((kind for end, kind in (kinds or {}).items() if name.endswith(end)), None)
            _add_weight(writer, config, name, parameter, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.model_type == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings", 512))


def _add_weight(
    writer: gguf.GGUFWriter, config: Any, name: str, parameter: Tensor, kind: gguf.GGMLQuantizationType | None
) -> None:
    arch = next(key for key, arch_name in gguf.MODEL_ARCH_NAMES.items() if arch_name == config.model_type)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    their_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
    weight = parameter.numpy().copy()
    if kind is not None:
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(dequantize(quantize(weight, kind), kind)))
    if config.model_type in ("llama", "smollm3") and ".q_proj." in name:
        weight = interleave(weight, config.num_attention_heads)
    if config.model_type in ("llama", "smollm3") and ".k_proj." in name:
        weight = interleave(weight, config.num_key_value_heads)
    if kind is None:
        writer.add_tensor(their_name, weight)
    else:
        writer.add_tensor(their_name, quantize(weight, kind), raw_dtype=kind)


TINY_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def add_tiny_tokenizer(writer: gguf.GGUFWriter) -> None:
    """A byte-level vocabulary: the 256 bytes, two merges, two control tokens, and unused ones."""
    words = ["Ġt", "he"]
    control = ["<|im_start|>", "<|im_end|>"]
    unused = [f"[unused{i}]" for i in range(SHAPE["vocab_size"] - 260)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*byte_level_alphabet(), *words, *control, *unused])
    writer.add_token_types([1] * 258 + [3] * 2 + [5] * len(unused))
    writer.add_token_merges(["Ġ t", "h e"])
    writer.add_eos_token_id(259)
    writer.add_chat_template(TINY_TEMPLATE)
