"""Runs the model over one step: rows in, logits out, K and V kept until they are committed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from surefoot.kernels.base import Ops, Past, Slots
from surefoot.kernels.layout import BLOCK_TOKENS, FORMATS, FULL, BlockLayout, CacheFormat

from .demotion import Move, Places
from .model import Attend, Model
from .replay import StepReplay
from .scheduler import ScheduledChunk
from .sequence import NOTHING
from .sequence import Sequence as EngineSequence
from .settings import EngineSettings
from .step_input import StepInput

CACHE_LINE = 64


def build_step(chunks: list[ScheduledChunk]) -> StepInput:
    """Lay the chunks' tokens one after the other, those of sequences with a quantised format last.

    A chunk that samples needs its last row's logits and those of its draft's rows; one whose prompt is scored
    needs those of all rows.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    slots: list[int] = []
    num_rotated = 0
    logit_rows: list[int] = []
    logit_spans: list[range] = []
    cu_rows = [0]
    for chunk in chunks:
        seq, start = chunk.sequence, chunk.sequence.num_committed
        span = range(start, start + chunk.num_rows)
        token_ids += seq.token_ids[start : start + chunk.num_tokens]
        token_ids += chunk.draft_token_ids
        positions += span
        places = range(start - seq.num_demoted, start - seq.num_demoted + chunk.num_rows)
        blocks += (seq.block_table[place // BLOCK_TOKENS] for place in places)
        slots += (place % BLOCK_TOKENS for place in places)
        num_rotated += chunk.num_rows if seq.cache_rule is not None else 0
        cu_rows.append(len(token_ids))
        first = cu_rows[-2] if seq.wants_prompt_logprobs else cu_rows[-1] - chunk.num_sampled
        logit_rows += range(first, cu_rows[-1])
        logit_spans.append(range(len(logit_rows) - (cu_rows[-1] - first), len(logit_rows)))
    return StepInput(
        token_ids=torch.tensor(token_ids),
        positions=torch.tensor(positions),
        cu_rows=torch.tensor(cu_rows, dtype=torch.int32),
        past=_past_of([chunk.sequence for chunk in chunks]),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        logit_spans=logit_spans,
        blocks=torch.tensor(blocks, dtype=torch.int32),
        slots=torch.tensor(slots, dtype=torch.int32),
        num_rotated=num_rotated,
    )


def in_step_order(chunks: list[ScheduledChunk]) -> list[ScheduledChunk]:
    """Those whose keys are stored rotated come last, so that their rows are one piece."""
    return sorted(chunks, key=lambda chunk: chunk.sequence.cache_rule is not None)


def past_part(
    tables: Sequence[Sequence[int]], lengths: Sequence[int], cache_format: CacheFormat = FULL
) -> Past:
    """Block lists of a step's sequences as tensors."""
    widest = max(map(len, tables))
    return Past(
        block_table=torch.tensor([[*t, *[0] * (widest - len(t))] for t in tables], dtype=torch.int32),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        format=cache_format,
    )


def _past_of(sequences: Sequence[EngineSequence]) -> tuple[Past, ...]:
    """Full precision, then each format that some sequence has tokens in; others have none there."""
    held = [seq.held for seq in sequences]
    parts = []
    for cache_format in FORMATS:
        if cache_format == FULL or any(cache_format in own for own in held):
            own_parts = [own.get(cache_format, NOTHING) for own in held]
            tables, lengths = [part.table for part in own_parts], [part.num_tokens for part in own_parts]
            parts.append(past_part(tables, lengths, cache_format))
    return tuple(parts)


def kept_rows(chunks: Sequence[ScheduledChunk], verified: Sequence[Sequence[object]]) -> list[int] | None:
    """The step's rows but those of rejected drafts, given the tokens that each chunk gets; None for all."""
    rows: list[int] = []
    begin = 0
    for chunk, results in zip(chunks, verified, strict=True):
        rows += range(begin, begin + chunk.num_tokens + max(len(results) - 1, 0))
        begin += chunk.num_rows
    return None if len(rows) == begin else rows


def untouched_zeros(*shape: int) -> Tensor:
    """uint8 zeros in pages that the system gives on first use: torch would write them all now.

    They begin with a cache line. numpy's begin 16 bytes into one, so that every second vector would lie in
    two: attention over the past took a quarter longer.
    """
    size = math.prod(shape)
    memory = np.zeros(size + CACHE_LINE, dtype=np.uint8)
    return torch.from_numpy(memory[-memory.ctypes.data % CACHE_LINE :][:size]).view(shape)


class ModelRunner:
    """Owns the cache and the step buffer.

    The cache is uint8 `[num_layers, num_blocks, block_bytes]`. The step buffer holds K and V of the step's
    rows, `[num_layers, max_batched_tokens, num_kv_heads, head_dim]` in the cache's dtype: the *present*,
    which attends causally within its sequence and becomes *past* only when it is committed.
    """

    def __init__(self, model: Model, ops: Ops, settings: EngineSettings, cache_dtype: torch.dtype) -> None:
        config, device = model.config, model.device
        assert settings.cache_bytes is not None
        self._model = model
        self._ops = ops
        self.layout = BlockLayout(
            num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=cache_dtype
        )
        self.num_blocks = settings.cache_bytes // (config.num_layers * self.layout.block_bytes)
        if self.num_blocks < 1:
            raise ValueError(
                f"a cache of {int(settings.cache_bytes)} bytes holds no block of {BLOCK_TOKENS} tokens, which"
                f" takes {config.num_layers * self.layout.block_bytes} bytes in this model"
            )
        cache_shape = (config.num_layers, self.num_blocks, self.layout.block_bytes)
        if device.type == "cpu":
            self._cache = untouched_zeros(*cache_shape)
        else:
            self._cache = torch.zeros(cache_shape, dtype=torch.uint8, device=device)
        rows = (config.num_layers, settings.max_batched_tokens, config.num_kv_heads, config.head_dim)
        self._step_k = torch.zeros(rows, dtype=cache_dtype, device=device)
        self._step_v = torch.zeros(rows, dtype=cache_dtype, device=device)
        self._scale = config.attention_scale
        self._replay = StepReplay(model, ops, self._attend, max_rows=settings.max_batched_tokens)

    @torch.inference_mode()
    def run(self, step: StepInput) -> Tensor:
        """Logits `[R, vocab_size]` (float32) of the step's `logit_rows`; good until the next run."""
        replayed = self._replay.run(step)
        if replayed is not None:
            return replayed
        attend = self._attend(step.num_rows, step.cu_rows, step.past, step.num_rotated)
        hidden = self._model.forward(step.token_ids, step.positions, attend)
        return self._model.logits(hidden[step.logit_rows])

    def _attend(
        self,
        num_rows: int,
        cu_rows: Tensor,
        past: tuple[Past, ...],
        num_rotated: int,
        max_rows: int | None = None,
    ) -> Attend:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if num_rotated:
                self._ops.rotate_heads(q[num_rows - num_rotated :])
                self._ops.rotate_heads(k[num_rows - num_rotated :])
            self._ops.keep(k, v, self._step_k[layer, :num_rows], self._step_v[layer, :num_rows])
            cache = self._cache[layer], self.layout, past
            return self._ops.attention(q, k, v, cu_rows, *cache, self._scale, max_rows=max_rows)

        return attend

    @torch.inference_mode()
    def commit(self, step: StepInput, rows: list[int] | None = None) -> None:
        """Write K and V of the step's rows, all or those listed, to the cache blocks."""
        kept = slice(step.num_rows) if rows is None else torch.tensor(rows)
        self._ops.commit(
            self._cache,
            self.layout,
            self._step_k[:, kept],
            self._step_v[:, kept],
            step.blocks[kept],
            step.slots[kept],
        )

    @torch.inference_mode()
    def move(self, moves: Iterable[Move]) -> None:
        """Carry out what demotion planned, one after the other."""
        for move in moves:
            self._ops.demote(self._cache, self.layout, self._slots(move.source), self._slots(move.target))

    def _slots(self, places: Places) -> Slots:
        return Slots(
            blocks=torch.tensor(places.blocks, dtype=torch.int32),
            slots=torch.tensor(places.slots, dtype=torch.int32),
            format=places.format,
        )
