"""The forward pass of every Llama-family decoder, driven by its config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from surefoot.kernels.base import AnyWeight, Ops

from .model_config import ModelConfig
from .rope import rope_tables
from .weight_mode import WeightMode, convert, on_device, to_float
from .weights import WeightSource, layer_prefix

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`attend(layer, q [N, H, D], k [N, G, D], v [N, G, D]) -> [N, H, D]`; q and k are normed and rotated.

The three may be views whose row stride is longer than a row; no one reads them afterwards.
"""


class LayerWeights(Struct, frozen=True):
    """One decoder layer. `next_norm` is the next layer's input norm, or the final one after the last."""

    qkv: Any
    o: Any
    gate_up: Any
    down: Any
    mlp_norm: Tensor
    next_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    has_rope: bool


class Model:
    """A decoder. The cache and the attention are the caller's; all else happens here, through an op set."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        ops: Ops,
        *,
        mode: WeightMode,
        device: torch.device | str = "cpu",
        max_model_len: int | None = None,
    ) -> None:
        """Read the weights from `source`: matrices as `mode` says, the rest in float32.

        `max_model_len` bounds the positions that will be asked for (None: what the model takes).
        """
        self.config = config
        self.device = torch.device(device)
        self._ops = ops
        loader = _Loader(config, source, ops, mode, self.device)
        self._embedding = loader.linear("model.embed_tokens", has_bias=False)
        self._head = (
            self._embedding if config.tie_word_embeddings else loader.linear("lm_head", has_bias=False)
        )
        self._first_norm = loader.vector(layer_prefix(0) + "input_layernorm.weight")
        self._layers = [loader.layer(i) for i in range(config.num_layers)]
        length = min(max_model_len or config.max_model_len, config.max_model_len)
        cos, sin = rope_tables(config.rope, config.head_dim, length)
        self._cos, self._sin = cos.to(device), sin.to(device)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """`token_ids` and `positions` `[N]` int64 -> normed hidden states `[N, hidden]`."""
        ops, eps = self._ops, self.config.rms_norm_eps
        rope = ops.take(self._cos, positions), ops.take(self._sin, positions)
        residual = ops.embed(token_ids, self._embedding)
        x = ops.rms_norm(residual, self._first_norm, eps)
        for i, layer in enumerate(self._layers):
            # No name holds what is added: a long prompt's rows take memory as long as they are held.
            x = ops.add_rms_norm(residual, self._attended(i, layer, x, rope, attend), layer.mlp_norm, eps)
            x = ops.add_rms_norm(residual, self._fed(layer, x), layer.next_norm, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of hidden states `[R, hidden]` -> `[R, vocab]` in their dtype."""
        return self._ops.linear(hidden, self._head)

    def _attended(
        self, index: int, layer: LayerWeights, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        q, k, v = self._qkv(layer, x, rope)
        return self._ops.linear(attend(index, q, k, v).flatten(1), layer.o)

    def _fed(self, layer: LayerWeights, x: Tensor) -> Tensor:
        ops = self._ops
        return ops.linear(ops.silu_mul(ops.linear(x, layer.gate_up)), layer.down)

    def _qkv(
        self, layer: LayerWeights, x: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        config, ops = self.config, self._ops
        num_q, num_kv = config.num_heads, config.num_kv_heads
        qkv = ops.linear(x, layer.qkv).unflatten(1, (num_q + 2 * num_kv, config.head_dim))
        qk, v = qkv.split((num_q + num_kv, num_kv), dim=1)
        for norm, heads in zip((layer.q_norm, layer.k_norm), qk.split((num_q, num_kv), dim=1), strict=True):
            if norm is not None:
                ops.norm_heads(heads, norm, config.rms_norm_eps)
        if layer.has_rope:
            qk = ops.rope(qk, *rope)
        q, k = qk.split((num_q, num_kv), dim=1)
        return q, k, v


class _Loader(Struct, frozen=True):
    """Reads, fuses, converts and places weights."""

    config: ModelConfig
    source: WeightSource
    ops: Ops
    mode: WeightMode
    device: torch.device

    def layer(self, index: int) -> LayerWeights:
        config, prefix = self.config, layer_prefix(index)
        is_last = index == config.num_layers - 1
        next_norm = "model.norm.weight" if is_last else layer_prefix(index + 1) + "input_layernorm.weight"
        q, k, v = (f"{prefix}self_attn.{name}_proj" for name in "qkv")
        return LayerWeights(
            qkv=self.linear(q, k, v, has_bias=config.qkv_bias),
            o=self.linear(f"{prefix}self_attn.o_proj", has_bias=config.o_bias),
            gate_up=self.linear(f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj", has_bias=config.mlp_bias),
            down=self.linear(f"{prefix}mlp.down_proj", has_bias=config.mlp_bias),
            mlp_norm=self.vector(f"{prefix}post_attention_layernorm.weight"),
            next_norm=self.vector(next_norm),
            q_norm=self.vector(f"{prefix}self_attn.q_norm.weight") if config.qk_norm else None,
            k_norm=self.vector(f"{prefix}self_attn.k_norm.weight") if config.qk_norm else None,
            has_rope=index not in config.no_rope_layers,
        )

    def linear(self, *names: str, has_bias: bool) -> Any:
        """Linears over the same input, fused row by row."""
        bias = torch.cat([self.vector(f"{name}.bias") for name in names]) if has_bias else None
        return self.ops.prepare_linear([self.matrix(f"{name}.weight") for name in names], bias)

    def matrix(self, name: str) -> AnyWeight:
        return on_device(convert(self.source.tensor(name), self.mode), self.device)

    def vector(self, name: str) -> Tensor:
        return to_float(self.source.tensor(name)).to(self.device)
