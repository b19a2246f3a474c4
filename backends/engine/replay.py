"""Steps of a shape that comes again are recorded once and replayed: one call instead of hundreds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from msgspec import Struct
from torch import Tensor

from surefoot.kernels.base import Ops, Past, Program

from .model import Attend, Model
from .step_input import StepInput

MAX_ROWS = 128
"""Steps with more rows are long enough for Python not to count."""

MAX_PROGRAMS = 256
"""Recordings that are kept, the latest used; one takes some 100 KB."""


class StepReplay:
    """Runs steps in which every row needs logits: decoding, and the verification of drafts.

    A recording holds for a number of rows and of sequences. Which rows belong to which sequence, how long
    each past is and where its blocks lie are read from memory that every recording shares, and that is
    filled before a replay.
    """

    def __init__(
        self, model: Model, ops: Ops, attend: Callable[[int, Tensor, Past], Attend], max_rows: int
    ) -> None:
        """`attend(num_rows, cu_rows, past)` gives the attention of a step."""
        self._model = model
        self._ops = ops
        self._attend = attend
        self._max_rows = min(max_rows, MAX_ROWS)
        self._inputs = _Inputs.empty(self._max_rows, table_width=64)
        self._programs: OrderedDict[tuple[int, int], Program | None] = OrderedDict()
        self._seen: set[tuple[int, int]] = set()
        """Shapes that came once. Recording one takes as long as running it: it pays the second time."""
        self._is_known = False
        """Whether the model's forward pass turned out to be one that can be recorded."""

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
        num_rows, (num_sequences, table_width) = step.num_rows, step.past.block_table.shape
        if table_width > self._inputs.table.shape[1]:
            self._inputs = _Inputs.empty(self._max_rows, table_width=2 * table_width)
            self._programs.clear()
        shape = num_rows, num_sequences
        if shape not in self._programs:
            if shape not in self._seen:
                self._seen.add(shape)
                return None
            forward = self._forward(self._inputs.of(num_rows, num_sequences))
            self._programs[shape] = self._ops.record(forward, known=self._is_known)
            self._is_known = self._programs[shape] is not None
        self._programs.move_to_end(shape)
        if len(self._programs) > MAX_PROGRAMS:
            self._programs.popitem(last=False)
        return self._programs[shape]

    def _forward(self, inputs: _Inputs) -> Callable[[], Tensor]:
        def forward() -> Tensor:
            past = Past(block_table=inputs.table, lengths=inputs.lengths)
            attend = self._attend(len(inputs.token_ids), inputs.cu_rows, past)
            return self._model.logits(self._model.forward(inputs.token_ids, inputs.positions, attend))

        return forward


class _Inputs(Struct, frozen=True):
    """What differs from step to step, at addresses that do not."""

    token_ids: Tensor  # int64 [N]
    positions: Tensor  # int64 [N]
    cu_rows: Tensor  # int32 [B + 1]
    lengths: Tensor  # int32 [B]
    table: Tensor  # int32 [B, max_blocks]

    @classmethod
    def empty(cls, rows: int, *, table_width: int) -> _Inputs:
        """For as many rows, and as many sequences, as there may be."""
        return cls(
            token_ids=torch.zeros(rows, dtype=torch.int64),
            positions=torch.zeros(rows, dtype=torch.int64),
            cu_rows=torch.zeros(rows + 1, dtype=torch.int32),
            lengths=torch.zeros(rows, dtype=torch.int32),
            table=torch.zeros(rows, table_width, dtype=torch.int32),
        )

    def of(self, rows: int, sequences: int) -> _Inputs:
        """The first rows and sequences, as views."""
        return _Inputs(
            token_ids=self.token_ids[:rows],
            positions=self.positions[:rows],
            cu_rows=self.cu_rows[: sequences + 1],
            lengths=self.lengths[:sequences],
            table=self.table[:sequences],
        )

    def fill(self, step: StepInput) -> None:
        """Copy a step's content; what lies beyond it is left, and no one looks there."""
        rows, (sequences, table_width) = step.num_rows, step.past.block_table.shape
        self.token_ids[:rows] = step.token_ids
        self.positions[:rows] = step.positions
        self.cu_rows[: sequences + 1] = step.cu_rows
        self.lengths[:sequences] = step.past.lengths
        self.table[:sequences, :table_width] = step.past.block_table
