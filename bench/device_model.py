"""A random model of a given shape for the device benchmark, and what a step of it cannot but read."""

from __future__ import annotations

import math
import zlib

import tokenizers
import torch
from msgspec import Struct
from msgspec.structs import replace
from tokenizers import decoders, models
from torch import Tensor

from surefoot.backends.engine.model import Model
from surefoot.backends.engine.model_config import ModelConfig, RopeConfig
from surefoot.backends.engine.prepare import LoadedModel
from surefoot.backends.engine.tokenizer import Tokenizer, TokenizerSpec
from surefoot.backends.engine.weight_mode import WeightMode
from surefoot.backends.engine.weights import Shapes, expected_shapes
from surefoot.kernels.base import Ops
from surefoot.kernels.layout import FULL, BlockLayout

LLAMA_8B = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    max_position_embeddings=2048,
    rope=RopeConfig(theta=500_000.0),
    tie_word_embeddings=False,
)
"""Llama-3.1-8B's shape, for short contexts."""

SLIM = replace(LLAMA_8B, vocab_size=1024, intermediate_size=512, num_layers=2, max_position_embeddings=1024)
"""As wide as `LLAMA_8B`, so that it runs the same kernels, and quick to make on a CPU."""

TINY = ModelConfig(
    family="llama",
    vocab_size=320,
    hidden_size=128,
    intermediate_size=192,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    max_position_embeddings=256,
    rope=RopeConfig(theta=10_000.0),
    tie_word_embeddings=False,
)


class RandomWeights(Struct, frozen=True):
    """A `WeightSource` of random matrices whose outputs are about as large as their inputs, made on `device`:
    the same each time, but another device has others.
    """

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype

    @property
    def shapes(self) -> Shapes:
        """Those of the config."""
        return expected_shapes(self.config)

    def tensor(self, name: str) -> Tensor:
        """Norms are 1; the rest is made where it is wanted."""
        shape = self.shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, device=self.device)
        random = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        matrix = torch.randn(shape, device=self.device, dtype=self.dtype, generator=random)
        return matrix.mul_(float(shape[1]) ** -0.5)


def random_model(
    config: ModelConfig,
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
    *,
    weights: RandomWeights | None = None,
) -> LoadedModel:
    """Ready to serve token ids; its texts are empty. `weights` are made where they are used, unless given."""
    mode = WeightMode.FLOAT32 if dtype == torch.float32 else WeightMode.BFLOAT16
    source = weights or RandomWeights(config, device, dtype)
    model = Model(config, source, ops, mode=mode, device=device)
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    words.decoder = decoders.ByteLevel()
    return LoadedModel(config, model, Tokenizer(words, TokenizerSpec()), "random")


def layer_matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a layer's matrices, fused as `Model` has them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "q, k and v": (queries + 2 * keys, hidden),
        "o": (hidden, queries),
        "gate and up": (2 * inner, hidden),
        "down": (hidden, inner),
    }


def step_bytes(config: ModelConfig, batch: int, context: int, dtype: torch.dtype) -> int:
    """What a decoding step cannot but read: every matrix once, of the embedding a row a token, and the cache
    of `batch` sequences of `context` tokens in full precision.
    """
    sizes = {name: math.prod(shape) for name, shape in expected_shapes(config).items()}
    embedding = "model.embed_tokens.weight"
    weights = sum(sizes.values()) - (0 if config.tie_word_embeddings else sizes[embedding])
    layout = BlockLayout(num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=dtype)
    cache = batch * context * config.num_layers * layout.bytes_per_token(FULL)
    return (weights + batch * config.hidden_size) * dtype.itemsize + cache
