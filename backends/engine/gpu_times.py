"""What steps would take on a GPU that nobody measured: from data sheets, by what binds each part of a step.

A roofline: every part takes as long as its bytes or its operations, whichever take longer. The figures of
devices and of the model are public; what share of them a program reaches is an assumption, and named as one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from msgspec import Struct

from surefoot.kernels.layout import FULL, BlockLayout, CacheFormat

from .cost_model import StepCost, StepSample, StepShape, context_tokens, fit
from .demotion import Move
from .scheduler import ScheduledChunk


class Gpu(Struct, frozen=True, kw_only=True):
    """A device by its data sheet: bytes, bytes a second, dense 16-bit operations a second."""

    memory_bytes: float
    bytes_per_s: float
    flops: float


GPUS: Mapping[str, Gpu] = {
    "l40s": Gpu(memory_bytes=48e9, bytes_per_s=0.864e12, flops=362e12),
    "h100": Gpu(memory_bytes=80e9, bytes_per_s=3.35e12, flops=989e12),
    "h200": Gpu(memory_bytes=141e9, bytes_per_s=4.8e12, flops=989e12),
}
"""NVIDIA's data sheets, H100 and H200 in their SXM forms; operations are those without sparsity."""


class ModelShape(Struct, frozen=True, kw_only=True):
    """A transformer in 16 bits. `num_params` are all, `num_used` those that a token is multiplied with."""

    num_params: float
    num_used: float
    num_layers: int
    num_heads: int
    layout: BlockLayout

    @property
    def weight_bytes(self) -> float:
        """Of all parameters."""
        return 2 * self.num_params


LLAMA_8B = ModelShape(
    num_params=8.03e9,
    num_used=7.5e9,  # without the table of embeddings, of which a token reads one row
    num_layers=32,
    num_heads=32,
    layout=BlockLayout(num_kv_heads=8, head_dim=128, dtype=torch.bfloat16),
)
"""Llama-3.1-8B, by its model card and configuration: 131,072 bytes a token in the cache."""


class Reached(Struct, frozen=True, kw_only=True):
    """Assumptions: what is reached of a data sheet's figures.

    `demoted` is the bandwidth at which demoted tokens are read, beside that of full precision: unpacking
    takes instructions. `fixed_s` is what a step takes before any work: launches, sampling, the scheduler.
    """

    bytes_share: float = 0.8
    flops_share: float = 0.5
    demoted: float = 0.7
    fixed_s: float = 0.002
    memory_share: float = 0.9
    """Of the memory that is given to weights, cache and activations."""
    activation_bytes: float = 2e9


class GpuTimes:
    """The steps of a model on a GPU."""

    def __init__(self, gpu: Gpu, model: ModelShape = LLAMA_8B, reached: Reached | None = None) -> None:
        self._model = model
        self._reached = reached or Reached()
        self._gpu = gpu
        self._bytes_per_s = gpu.bytes_per_s * self._reached.bytes_share
        self._flops = gpu.flops * self._reached.flops_share

    @property
    def layout(self) -> BlockLayout:
        """Of the model's blocks."""
        return self._model.layout

    @property
    def num_blocks(self) -> int:
        """Blocks of 16 tokens that the memory has room for beside weights and activations."""
        reached, model = self._reached, self._model
        free = self._gpu.memory_bytes * reached.memory_share - model.weight_bytes - reached.activation_bytes
        return int(free / (model.layout.block_bytes * model.num_layers))

    def seconds(self, chunks: Sequence[ScheduledChunk], moves: Sequence[Move]) -> float:
        """Weights, attention of each chunk, and what is moved within the cache."""
        num_rows = sum(chunk.num_rows for chunk in chunks)
        attention_s = sum(
            self._attention_s(
                chunk.num_rows, {each: part.num_tokens for each, part in chunk.sequence.held.items()}
            )
            for chunk in chunks
        )
        return self._rest_s(num_rows) + attention_s + sum(self._move_s(move) for move in moves)

    def believed(self) -> StepCost:
        """What an engine's model of costs would make of such steps after its warm-up."""
        shapes = [(1, count, past) for count in (1, 8, 64, 256) for past in (128, 1024, 4096)]
        shapes += [(rows, 1, past) for rows in (64, 256, 512, 2048) for past in (0, 2048)]
        return fit(self._sample(*shape) for shape in shapes)

    def _sample(self, num_rows: int, num_sequences: int, num_past: int) -> StepSample:
        """A step of equal chunks in full precision."""
        num_context = num_sequences * context_tokens(num_rows, num_past)
        shape = StepShape(num_rows * num_sequences, num_sequences, num_context)
        attention_s = num_sequences * self._attention_s(num_rows, {FULL: num_past})
        return StepSample(shape, self._rest_s(shape.num_rows) + attention_s)

    def _rest_s(self, num_rows: int) -> float:
        """All but attention."""
        operations = 2 * self._model.num_used * num_rows
        return self._reached.fixed_s + max(
            2 * self._model.num_used / self._bytes_per_s, operations / self._flops
        )

    def _attention_s(self, num_rows: int, past: Mapping[CacheFormat, int]) -> float:
        """Of one chunk: its rows share what is read of the past, so many tokens in each format."""
        model = self._model
        read_s = sum(self._read_s(num_tokens, cache_format) for cache_format, num_tokens in past.items())
        num_context = context_tokens(num_rows, sum(past.values()))
        operations = 4 * model.num_layers * model.num_heads * model.layout.head_dim * num_context
        return max(read_s, operations / self._flops)

    def _read_s(self, num_tokens: int, cache_format: CacheFormat) -> float:
        share = 1.0 if cache_format.is_full else self._reached.demoted
        return num_tokens * self._token_bytes(cache_format) / (self._bytes_per_s * share)

    def _move_s(self, move: Move) -> float:
        """Read in one format, written in another."""
        num_bytes = self._token_bytes(move.source.format) + self._token_bytes(move.target.format)
        return len(move.source.slots) * num_bytes / self._bytes_per_s

    def _token_bytes(self, cache_format: CacheFormat) -> int:
        return self._model.num_layers * self._model.layout.bytes_per_token(cache_format)
