"""The model runner on a GPU: steps travel there in one copy, decoding and verification are graphs."""

from __future__ import annotations

import gc
from collections import OrderedDict

import torch
from msgspec.structs import replace
from torch import Tensor

from surefoot.kernels.base import Ops, Program, Slots
from surefoot.kernels.layout import BLOCK_TOKENS, FORMATS, BlockLayout

from .demotion import Places
from .device import CPU, Capture, capture_on, measure_memory, place, wait
from .model import Model
from .runner import ModelRunner
from .settings import EngineSettings
from .step_input import StepInput
from .step_size import MAX_ROWS, StepSize, bucket_of, decode_buckets, fill, largest, size_of, views

MAX_GRAPHS = 128
"""Graphs that are kept, the latest used: each takes a few MB of a GPU's memory."""

SPARE_BLOCKS = 2
"""Of a sequence's block list, beyond its longest context: drafts, and a demotion's fresh blocks."""


class DeviceRunner(ModelRunner):
    """Queues a step's work and waits for nothing: whoever looks at the logits waits.

    A step in which every row needs logits is padded to one of few sizes, whose launches are captured when it
    comes for the second time and replayed from then on. The rest, steps with prefills, runs as it is.
    """

    def __init__(
        self, model: Model, ops: Ops, settings: EngineSettings, cache_dtype: torch.dtype, capture: Capture
    ) -> None:
        super().__init__(model, ops, settings, cache_dtype)
        self._device, self._capture = model.device, capture
        self._size = largest(
            settings.max_batched_tokens, settings.max_sequences, _table_width(model, settings)
        )
        self._words = torch.zeros(self._size.num_words, dtype=torch.int32, device=self._device)
        """A step, at an address that stays."""
        self._max_rows = min(settings.max_batched_tokens, MAX_ROWS)
        self._logits = torch.zeros(self._max_rows, model.config.vocab_size, device=self._device)
        self._programs: OrderedDict[StepSize, Program | None] = OrderedDict()
        """None for a size that came once."""
        self._sent: tuple[StepInput, StepInput, int] | None = None
        """The last step, the same on the device, and the row it begins at there."""

    @torch.inference_mode()
    def run(self, step: StepInput) -> Tensor:
        """Logits `[R, vocab_size]` (float32) of the step's `logit_rows`; good until the next run."""
        size = size_of(step)
        bucket = bucket_of(size, self._max_rows)
        if bucket is None:
            return self._forward(size, self._send(step, size, 0))
        first = bucket.num_plain - size.num_plain
        self._send(step, bucket, first)
        program = self._program(bucket)
        logits = self._run_bucket(bucket) if program is None else program.replay()
        return logits[first : first + step.num_rows]

    @torch.inference_mode()
    def commit(self, step: StepInput, rows: list[int] | None = None) -> None:
        """See `ModelRunner.commit`; the step is the one that ran last."""
        assert self._sent is not None
        sent, placed, first = self._sent
        assert sent is step
        kept: slice | Tensor = slice(first, first + step.num_rows)
        if rows is not None:
            kept = place(torch.tensor(rows) + first, self._device)
        step_k, step_v = self._step_k[:, kept], self._step_v[:, kept]
        self._ops.commit(self._cache, self.layout, step_k, step_v, placed.blocks[kept], placed.slots[kept])
        if not len(step.logit_rows):
            # Nobody else will, and the step would seem to take no longer than its launches.
            wait(self._device)

    @torch.inference_mode()
    def capture_decoding(self, max_sequences: int) -> None:
        """Capture what most steps will be before the first comes."""
        for size in decode_buckets(max_sequences, self._max_rows):
            self._programs[size] = self._capture(lambda size=size: self._run_bucket(size))  # type: ignore[misc]

    @torch.inference_mode()
    def run_largest(self) -> None:
        """A step that takes as much memory as any: a prompt's chunk, with the longest block lists of two
        formats.
        """
        self._words.zero_()
        size = self._size._replace(
            num_plain=self._size.max_rows, formats=FORMATS[:2], num_logit_rows=self._size.num_sequences
        )
        placed = views(self._words, size)
        placed.cu_rows[1:] = size.num_plain
        self._forward(size, placed)

    def _program(self, bucket: StepSize) -> Program | None:
        """What was captured for a size; None when it comes for the first time."""
        if bucket not in self._programs:
            self._programs[bucket] = None
        elif self._programs[bucket] is None:
            self._programs[bucket] = self._capture(lambda: self._run_bucket(bucket))
        self._programs.move_to_end(bucket)
        if len(self._programs) > MAX_GRAPHS:
            self._programs.popitem(last=False)
        return self._programs[bucket]

    def _send(self, step: StepInput, size: StepSize, first: int) -> StepInput:
        """Queue the copy of a step."""
        words = torch.zeros(size.num_words, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        fill(views(words, size), step, first)
        self._words[: size.num_words].copy_(words, non_blocking=True)
        placed = views(self._words, size)
        self._sent = step, placed, first
        return placed

    def _run_bucket(self, bucket: StepSize) -> Tensor:
        """Logits of all rows, at an address that stays."""
        logits = self._logits[: bucket.num_rows]
        return logits.copy_(self._model.logits(self._hidden(bucket, views(self._words, bucket))))

    def _forward(self, size: StepSize, placed: StepInput) -> Tensor:
        hidden = self._hidden(size, placed)
        return self._model.logits(hidden.index_select(0, placed.logit_rows)).float()

    def _hidden(self, size: StepSize, placed: StepInput) -> Tensor:
        attend = self._attend(size.num_rows, placed.cu_rows, placed.past, size.num_rotated, size.max_rows)
        return self._model.forward(placed.token_ids, placed.positions, attend)

    def _slots(self, places: Places) -> Slots:
        at = super()._slots(places)
        blocks, slots = place(at.blocks, self._device), place(at.slots, self._device)
        return Slots(blocks=blocks, slots=slots, format=at.format)


def make_runner(
    model: Model,
    ops: Ops,
    settings: EngineSettings,
    cache_dtype: torch.dtype,
    *,
    block_bytes_beside: int = 0,
) -> ModelRunner:
    """The runner for an op set. Where no size is said, the cache is what a profiling pass leaves; every block
    of it comes with `block_bytes_beside` bytes of a draft model's.
    """
    if not ops.is_asynchronous:
        return ModelRunner(model, ops, settings, cache_dtype)
    if settings.cache_bytes is None:
        block_bytes = bytes_of_block(model, cache_dtype)
        one_block = replace(settings, cache_bytes=block_bytes)
        memory = measure_memory(
            DeviceRunner(model, ops, one_block, cache_dtype, capture_on(CPU)).run_largest, model.device
        )
        gc.collect()  # a runner and what it replays hold each other
        num_blocks = memory.for_cache // (block_bytes + block_bytes_beside)
        if num_blocks < 1:
            raise ValueError(
                f"a step can take {memory.peak} bytes, and of {memory.total} on {model.device} only"
                f" {memory.free} are free beside the weights: nothing is left for the cache; lower"
                " max_model_len or max_batched_tokens"
            )
        settings = replace(settings, cache_bytes=num_blocks * block_bytes)
    runner = DeviceRunner(model, ops, settings, cache_dtype, capture_on(model.device))
    runner.capture_decoding(settings.max_sequences)
    return runner


def bytes_of_block(model: Model, cache_dtype: torch.dtype) -> int:
    """Of a block of the cache, in all layers."""
    config = model.config
    layout = BlockLayout(num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=cache_dtype)
    return config.num_layers * layout.block_bytes


def _table_width(model: Model, settings: EngineSettings) -> int:
    longest = min(settings.max_model_len or model.config.max_model_len, model.config.max_model_len)
    return -(-longest // BLOCK_TOKENS) + SPARE_BLOCKS
