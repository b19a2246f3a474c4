"""How long a simulated step takes: by the linear cost model, which the scheduler believes in too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from .cache_rule import format_name
from .cost_model import StepCost
from .demotion import Move
from .scheduler import ScheduledChunk, shape_of

READ_COST: Mapping[str, float] = {"k16v16": 1.0, "k8v8": 0.82, "k8v4": 0.82, "k4v4": 0.74}
"""What attending to a token takes, beside one in full precision, on the CPU (docs/cpu-kernels.md: AVX-512,
two threads, batches of 8 after 2,048 tokens).
"""


class StepTimes(Protocol):
    """What the steps of a machine take."""

    def seconds(self, chunks: Sequence[ScheduledChunk], moves: Sequence[Move]) -> float:
        """Of one step, with what is moved within the cache before it. Nothing of it is committed yet."""


class LinearTimes:
    """A `StepCost`, with demoted tokens that are read at `read_cost`. Moves take no time."""

    def __init__(self, cost: StepCost, read_cost: Mapping[str, float] = READ_COST) -> None:
        self._cost = cost
        self._read_cost = read_cost

    def seconds(self, chunks: Sequence[ScheduledChunk], moves: Sequence[Move]) -> float:
        """As the engine's own model would predict it, less what needs not be read."""
        shape = shape_of(chunks)
        unread = sum(
            (1 - self._read_cost[format_name(cache_format)]) * chunk.num_rows * part.num_tokens
            for chunk in chunks
            for cache_format, part in chunk.sequence.held.items()
        )
        num_context = shape.num_context_tokens - round(unread)
        return self._cost.predict(shape.num_rows, shape.num_sequences, num_context)
