"""Steps of a shape that comes again are recorded once and replayed: one call instead of hundreds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch
from msgspec import Struct
from torch import Tensor

from surefoot.kernels.base import Ops, Past, Program
from surefoot.kernels.layout import FORMATS, FULL, CacheFormat

from .model import Attend, Model
from .step_input import StepInput

MAX_ROWS = 128
"""Steps with more rows are long enough for Python not to count."""

MAX_PROGRAMS = 256
"""Recordings that are kept, the latest used; one takes some 100 KB."""


MakeAttend = Callable[[int, Tensor, tuple[Past, ...], int], Attend]


class Shape(NamedTuple):
    """What a recording holds for."""

    num_rows: int
    num_sequences: int
    formats: tuple[CacheFormat, ...] = (FULL,)
    num_rotated: int = 0


class StepReplay:
    """Runs steps in which every row needs logits: decoding, and the verification of drafts.

    A recording holds for a number of rows, of sequences and of rotated rows, and for the formats of the past.
    Which rows belong to which sequence, how long each past is and where its blocks lie are read from memory
    that every recording shares, and that is filled before a replay.
    """

    def __init__(self, model: Model, ops: Ops, attend: MakeAttend, max_rows: int) -> None:
        """`attend(num_rows, cu_rows, past, num_rotated)` gives the attention of a step."""
        self._model = model
        self._ops = ops
        self._attend = attend
        self._max_rows = min(max_rows, MAX_ROWS)
        self._inputs = _Inputs.empty(self._max_rows, table_width=64)
        self._programs: OrderedDict[Shape, Program | None] = OrderedDict()
        self._seen: set[Shape] = set()
        """Shapes that came once. Recording one takes as long as running it: it pays the second time."""
        self._known: set[tuple[bool, bool]] = set()
        """Whether any past is quantised and any row rotated, with which the model's pass can be recorded."""

    def run(self, step: StepInput) -> Tensor | None:
        """Logits `[N, vocab]` of the step, good until the next one; None for a step of another kind."""
        if not len(step.logit_rows) == step.num_rows <= self._max_rows:
            return None
        program = self._program(step)
        if program is None:
            return None
        self._inputs.fill(step)
        return program.replay()

    def _program(self, step: StepInput) -> Program | None:
        """The recording for a step's shape; None if it cannot be recorded."""
        shape = Shape(step.num_rows, len(step.cu_rows) - 1, step.formats, step.num_rotated)
        table_width = max(past.block_table.shape[1] for past in step.past)
        if table_width > self._inputs.tables.shape[2]:
            self._inputs = _Inputs.empty(self._max_rows, table_width=2 * table_width)
            self._programs.clear()
        if shape not in self._programs:
            if shape not in self._seen:
                self._seen.add(shape)
                return None
            code = len(shape.formats) > 1, shape.num_rotated > 0
            self._programs[shape] = self._ops.record(self._forward(shape), known=code in self._known)
            if self._programs[shape] is not None:
                self._known.add(code)
        self._programs.move_to_end(shape)
        if len(self._programs) > MAX_PROGRAMS:
            self._programs.popitem(last=False)
        return self._programs[shape]

    def _forward(self, shape: Shape) -> Callable[[], Tensor]:
        inputs = self._inputs.of(shape.num_rows, shape.num_sequences)

        def forward() -> Tensor:
            past = tuple(inputs.past(cache_format) for cache_format in shape.formats)
            attend = self._attend(shape.num_rows, inputs.cu_rows, past, shape.num_rotated)
            return self._model.logits(self._model.forward(inputs.token_ids, inputs.positions, attend))

        return forward


class _Inputs(Struct, frozen=True):
    """What differs from step to step, at addresses that do not. F formats, as `FORMATS` has them."""

    token_ids: Tensor  # int64 [N]
    positions: Tensor  # int64 [N]
    cu_rows: Tensor  # int32 [B + 1]
    lengths: Tensor  # int32 [F, B]
    tables: Tensor  # int32 [F, B, max_blocks]

    @classmethod
    def empty(cls, rows: int, *, table_width: int) -> _Inputs:
        """For as many rows, and as many sequences, as there may be."""
        return cls(
            token_ids=torch.zeros(rows, dtype=torch.int64),
            positions=torch.zeros(rows, dtype=torch.int64),
            cu_rows=torch.zeros(rows + 1, dtype=torch.int32),
            lengths=torch.zeros(len(FORMATS), rows, dtype=torch.int32),
            tables=torch.zeros(len(FORMATS), rows, table_width, dtype=torch.int32),
        )

    def of(self, rows: int, sequences: int) -> _Inputs:
        """The first rows and sequences, as views."""
        return _Inputs(
            token_ids=self.token_ids[:rows],
            positions=self.positions[:rows],
            cu_rows=self.cu_rows[: sequences + 1],
            lengths=self.lengths[:, :sequences],
            tables=self.tables[:, :sequences],
        )

    def past(self, cache_format: CacheFormat) -> Past:
        """The part of one format."""
        at = FORMATS.index(cache_format)
        return Past(block_table=self.tables[at], lengths=self.lengths[at], format=cache_format)

    def fill(self, step: StepInput) -> None:
        """Copy a step's content; what lies beyond it is left, and no one looks there."""
        rows = step.num_rows
        self.token_ids[:rows] = step.token_ids
        self.positions[:rows] = step.positions
        self.cu_rows[: len(step.cu_rows)] = step.cu_rows
        for past in step.past:
            own = self.past(past.format)
            sequences, table_width = past.block_table.shape
            own.lengths[:sequences] = past.lengths
            own.block_table[:sequences, :table_width] = past.block_table
