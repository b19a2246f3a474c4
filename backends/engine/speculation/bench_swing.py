"""Load that swings between batch sizes and kinds of traffic, in virtual time: no fixed length suits it."""

from __future__ import annotations

from msgspec import Struct

from .bench_table import LENGTHS, StepTable
from .replay import Replay, Tally, fixed_tokens_per_s

PHASE_S = 10.0
NUM_CYCLES = 4


class Phase(Struct, frozen=True):
    """So long the same load: `batch` sequences of a kind whose draft tokens are accepted at `rate`."""

    batch: int
    kind: str
    rate: float


CYCLE = (Phase(1, "editing", 0.9), Phase(32, "chat", 0.3), Phase(1, "chat", 0.3), Phase(32, "editing", 0.9))


class Swing(Struct, frozen=True, kw_only=True):
    """Mean tokens per second over all phases: with each fixed length, and with the controller."""

    fixed: dict[int, float]
    adaptive: float

    @property
    def best_length(self) -> int:
        """The fixed length that brings most."""
        return max(self.fixed, key=self.fixed.__getitem__)

    @property
    def share(self) -> float:
        """The controller's tokens over those of the best fixed length."""
        return self.adaptive / self.fixed[self.best_length]


def swing(table: StepTable, replay: Replay) -> Swing:
    """All phases, several times over. Whatever ends with a phase takes nothing into the next one."""
    tally = Tally()
    for number, phase in enumerate(CYCLE * NUM_CYCLES, start=1):
        replay.switch(phase.kind)
        while tally.seconds < number * PHASE_S:
            replay.step(phase.batch, phase.rate, tally)
    fixed = {
        length: sum(fixed_tokens_per_s(table.step_s, each.batch, each.rate, length) for each in CYCLE)
        / len(CYCLE)
        for length in LENGTHS
    }
    return Swing(fixed=fixed, adaptive=tally.tokens_per_s)
