"""What the device benchmark runs: heads, contexts and batches, and where its tensors lie."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch
from msgspec import Struct
from torch import Tensor
from torch.nn.functional import pad

from surefoot.backends.engine.model_config import ModelConfig
from surefoot.backends.engine.step_input import StepInput
from surefoot.backends.engine.step_size import TABLE_STEP
from surefoot.kernels.base import Past, Slots
from surefoot.kernels.layout import BLOCK_TOKENS, BlockLayout, CacheFormat

from .device_model import LLAMA_8B, TINY, step_bytes

MIN_BYTES = 512 << 20
"""What one timing reads at least, in layers of their own: several times what a GPU's caches hold."""

Placed = TypeVar("Placed", bound=Struct)


class Shape(Struct, frozen=True, kw_only=True):
    """A model's heads, Llama-3.1-8B's if nothing is said, and the sizes to try."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    contexts: tuple[int, ...] = (2048, 8192, 32768)
    batches: tuple[int, ...] = (1, 16, 64)
    prompts: tuple[int, ...] = (512, 2048, 8192)
    rows: tuple[int, ...] = (1, 32, 2048)
    long: int = 2100
    """Tokens of a context that is checked: several splits in every format."""
    min_bytes: int = MIN_BYTES
    copy_bytes: int = 1 << 30
    dtype: torch.dtype = torch.bfloat16

    @property
    def layout(self) -> BlockLayout:
        """Blocks of the model's dtype."""
        return BlockLayout(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, dtype=self.dtype)

    @property
    def scale(self) -> float:
        """Of scores."""
        return float(self.head_dim**-0.5)


SMALL = Shape(
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    contexts=(100,),
    batches=(1, 3),
    prompts=(50,),
    rows=(3,),
    long=300,
    min_bytes=1 << 16,
    copy_bytes=1 << 16,
    dtype=torch.float32,
)
"""What a CPU does in a moment."""

MAX_DRAFT = 8
"""Tokens of a draft."""


class EngineLoad(Struct, frozen=True, kw_only=True):
    """Batches of equal requests: random weights, so that what they say does not matter."""

    config: ModelConfig = LLAMA_8B
    batches: tuple[int, ...] = (1, 32)
    num_prompt_tokens: int = 512
    num_output_tokens: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def max_model_len(self) -> int:
        """Of prompt and answer."""
        return self.num_prompt_tokens + self.num_output_tokens + MAX_DRAFT

    @property
    def max_batched_tokens(self) -> int:
        """Half of the largest batch's prompts."""
        return max(self.num_prompt_tokens, max(self.batches) * self.num_prompt_tokens // 2)

    def step_bytes(self, batch: int) -> int:
        """In the middle of the answers."""
        context = self.num_prompt_tokens + self.num_output_tokens // 2
        return step_bytes(self.config, batch, context, self.dtype)


SMALL_LOAD = EngineLoad(
    config=TINY, batches=(1, 2), num_prompt_tokens=20, num_output_tokens=60, dtype=torch.float32
)
"""What a CPU does in a moment."""


class DecodeLoad(Struct, frozen=True, kw_only=True):
    """One query row for each of some sequences, over `context` tokens in each layer of `cache`."""

    q: Tensor
    cu_rows: Tensor
    cache: Tensor
    past: Past
    layer_bytes: int
    """What one call cannot but read."""

    @property
    def useful_bytes(self) -> int:
        """Of all layers."""
        return len(self.cache) * self.layer_bytes


def decode_load(
    shape: Shape, cache_format: CacheFormat, batch: int, context: int, device: torch.device
) -> DecodeLoad:
    """Random numbers in blocks of random order."""
    layout = shape.layout
    blocks = -(-context // layout.capacity(cache_format))
    # Wide as an engine's block lists are, which Triton would else compile another kernel for.
    width = -(-blocks // TABLE_STEP) * TABLE_STEP
    layer_bytes = batch * context * layout.bytes_per_token(cache_format)
    layers = max(-(-shape.min_bytes // layer_bytes), 1)
    size = layers, batch * blocks, layout.block_bytes
    return DecodeLoad(
        q=torch.randn(batch, shape.num_heads, shape.head_dim, dtype=layout.dtype, device=device),
        cu_rows=torch.arange(batch + 1, dtype=torch.int32, device=device),
        # Bytes under 64: no number of 2 bytes is then infinite, or larger than 2.
        cache=torch.randint(0, 64, size, dtype=torch.uint8, device=device),
        past=Past(
            block_table=pad(
                torch.randperm(batch * blocks, device=device).int().view(batch, blocks), (0, width - blocks)
            ),
            lengths=torch.full((batch,), context, dtype=torch.int32, device=device),
            format=cache_format,
        ),
        layer_bytes=layer_bytes,
    )


def slots_of(layout: BlockLayout, cache_format: CacheFormat, tokens: Tensor, first_block: int) -> Slots:
    """Where tokens lie in blocks that follow one another."""
    capacity = layout.capacity(cache_format)
    return Slots(
        blocks=(first_block + tokens // capacity).int(), slots=(tokens % capacity).int(), format=cache_format
    )


def verification_step(lengths: Sequence[int], rows: Sequence[int]) -> StepInput:
    """The next rows of sequences that have so many tokens; sequence s owns 8 blocks, from block 8 * s on."""
    owners = [s for s, count in enumerate(rows) for _ in range(count)]
    positions = torch.tensor([lengths[s] + i for s, count in enumerate(rows) for i in range(count)])
    number = torch.arange(len(positions))
    return StepInput(
        token_ids=7 * positions + 3 * torch.tensor(owners),
        positions=positions,
        cu_rows=torch.tensor([0, *accumulate(rows)], dtype=torch.int32),
        past=(
            Past(
                block_table=torch.arange(8 * len(rows), dtype=torch.int32).view(-1, 8),
                lengths=torch.tensor(lengths[: len(rows)], dtype=torch.int32),
            ),
        ),
        logit_rows=number,
        logit_spans=[],
        blocks=(8 * torch.tensor(owners) + positions // BLOCK_TOKENS).int(),
        slots=(positions % BLOCK_TOKENS).int(),
    )


def on(value: Placed, device: torch.device) -> Placed:
    """The same with its tensors on `device`."""
    fields: dict[str, Any] = {name: getattr(value, name) for name in value.__struct_fields__}
    return type(value)(**{n: x.to(device) if isinstance(x, Tensor) else x for n, x in fields.items()})
