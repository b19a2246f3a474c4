"""How large a step is, to what sizes steps are padded, and how one travels to a GPU: in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from surefoot.kernels.base import Past
from surefoot.kernels.layout import FORMATS, FULL, CacheFormat

from .step_input import StepInput

MAX_ROWS = 256
"""Steps with more rows keep a GPU busy for longer than their launches take."""

MAX_WINDOW = 32
"""Rows of one sequence in a padded step, enough for 16 drafts: beyond, attention takes another kernel
(`FEW_ROWS` in `kernels/triton/splits.py`), which wants rows from 0 on.
"""

MIN_TABLE_WIDTH = 64
"""Blocks: contexts of up to 1024 tokens in full precision share a size."""

ALIGNED = 4
"""Parts begin at multiples of 16 bytes, or Triton compiles a kernel for each alignment that it meets."""

TABLE_STEP = 16
"""Block lists of any step are as wide as a multiple of this, for the same reason."""


class StepSize(NamedTuple):
    """The sizes of a step's tensors. Rows of sequences whose keys are stored rotated come last."""

    num_plain: int
    num_rotated: int
    num_sequences: int
    max_rows: int
    """Of one sequence."""
    formats: tuple[CacheFormat, ...]
    table_width: int
    num_logit_rows: int

    @property
    def num_rows(self) -> int:
        """Of both kinds."""
        return self.num_plain + self.num_rotated

    @property
    def parts(self) -> list[int]:
        """How many int32 each tensor of a step takes, in the order of `views`; int64 take two each."""
        tables = [self.num_sequences * self.table_width, self.num_sequences] * len(self.formats)
        rows = self.num_rows
        return [2 * rows, 2 * rows, 2 * self.num_logit_rows, self.num_sequences + 1, rows, rows, *tables]

    @property
    def num_words(self) -> int:
        """int32 of the whole step."""
        return sum(map(_aligned, self.parts))


def size_of(step: StepInput) -> StepSize:
    """As it is, but for the width of block lists."""
    return StepSize(
        num_plain=step.num_rows - step.num_rotated,
        num_rotated=step.num_rotated,
        num_sequences=len(step.cu_rows) - 1,
        max_rows=int(step.cu_rows.diff().max()),
        formats=step.formats,
        table_width=_up_to(max(past.block_table.shape[1] for past in step.past), TABLE_STEP),
        num_logit_rows=len(step.logit_rows),
    )


def bucket_of(size: StepSize, max_rows: int) -> StepSize | None:
    """The size that a step is padded to, so that few sizes serve all: where every row needs logits, as in
    decoding and verification, and there are at most `max_rows`. None for others, which run as they are.

    Every row of a bucket needs logits, which it does not have to say.
    """
    rows = _rounded(size.num_plain), _rounded(size.num_rotated)
    if size.num_logit_rows < size.num_rows or size.max_rows > MAX_WINDOW or sum(rows) > max_rows:
        return None
    return StepSize(
        num_plain=rows[0],
        num_rotated=rows[1],
        num_sequences=_rounded(size.num_sequences),
        max_rows=_power_of_two(size.max_rows),
        formats=tuple(f for f in FORMATS if f in size.formats),
        table_width=max(_power_of_two(size.table_width), MIN_TABLE_WIDTH),
        num_logit_rows=0,
    )


def decode_buckets(max_sequences: int, max_rows: int) -> list[StepSize]:
    """Of steps in which up to so many sequences decode a token each in full precision and short contexts, the
    largest first: what it takes, the others find there.
    """
    batches = {_rounded(batch) for batch in range(1, max_sequences + 1)}
    return [
        StepSize(batch, 0, batch, 1, (FULL,), MIN_TABLE_WIDTH, 0)
        for batch in sorted(batches, reverse=True)
        if batch <= max_rows
    ]


def largest(max_rows: int, max_sequences: int, table_width: int) -> StepSize:
    """What no step goes beyond, padded or not."""
    return StepSize(
        num_plain=max(max_rows, MAX_ROWS),
        num_rotated=0,
        num_sequences=_rounded(max_sequences),
        max_rows=max_rows,
        formats=FORMATS,
        table_width=max(_power_of_two(table_width), MIN_TABLE_WIDTH),
        num_logit_rows=max_rows,
    )


def views(words: Tensor, size: StepSize) -> StepInput:
    """A step's tensors as views of the first of some int32 `[>= num_words]`."""
    pieces = iter(_cut(words, size.parts))
    token_ids, positions, logit_rows = (next(pieces).view(torch.int64) for _ in range(3))
    cu_rows, blocks, slots = (next(pieces) for _ in range(3))
    past = tuple(
        Past(
            block_table=next(pieces).view(size.num_sequences, size.table_width),
            lengths=next(pieces),
            format=cache_format,
        )
        for cache_format in size.formats
    )
    return StepInput(
        token_ids=token_ids,
        positions=positions,
        cu_rows=cu_rows,
        past=past,
        logit_rows=logit_rows,
        logit_spans=[],
        blocks=blocks,
        slots=slots,
        num_rotated=size.num_rotated,
    )


def fill(target: StepInput, step: StepInput, first: int) -> None:
    """Copy `step` into zeros of its size or of its bucket's; its rows begin at row `first`.

    Padding rows belong to no sequence, and padding sequences have no rows: nothing is computed of the latter,
    and what is computed of the former is looked at by nobody. Rows are aligned to where the rotated ones
    begin, which is the same in all steps of a bucket.
    """
    rows = slice(first, first + step.num_rows)
    target.token_ids[rows] = step.token_ids
    target.positions[rows] = step.positions
    target.blocks[rows] = step.blocks
    target.slots[rows] = step.slots
    target.cu_rows[:] = step.num_rows + first
    target.cu_rows[: len(step.cu_rows)] = step.cu_rows + first
    target.logit_rows.copy_(step.logit_rows[: len(target.logit_rows)])
    own = {past.format: past for past in target.past}
    for past in step.past:
        sequences, width = past.block_table.shape
        own[past.format].block_table[:sequences, :width] = past.block_table
        own[past.format].lengths[:sequences] = past.lengths


def _cut(words: Tensor, parts: Sequence[int]) -> list[Tensor]:
    starts, at = [], 0
    for part in parts:
        starts.append(at)
        at += _aligned(part)
    return [words[start : start + part] for start, part in zip(starts, parts, strict=True)]


def _aligned(words: int) -> int:
    return _up_to(words, ALIGNED)


def _rounded(count: int) -> int:
    """Up: to 0, a power of two up to 8, a multiple of 8 up to 64, a multiple of 32."""
    if count <= 8:
        return _power_of_two(count)
    return _up_to(count, 8 if count <= 64 else 32)


def _up_to(count: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-count // step) * step


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length() if count > 0 else 0
