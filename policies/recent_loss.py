"""What a tenant's latest answers are expected to lose: for whoever asks policies, which remember nothing."""

from __future__ import annotations

from surefoot.backends.types import CachePlan

from .bounds import Losses

MEMORY = 200
"""Answers that a mean is taken over; the older ones fade."""


class _Mean:
    """Of all values at first, then of about the latest `MEMORY`."""

    def __init__(self) -> None:
        self.value = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        self._count = min(self._count + 1, MEMORY)
        self.value += (value - self.value) / self._count


class RecentLoss:
    """Means by key, in nats per token: of what each plan's format is known to lose, from when it is chosen,
    and corrected by what answers turned out to lose where somebody scores them.

    To count a plan when it is chosen, and not when its answer ends, is what keeps many requests at once from
    all taking the same room.
    """

    def __init__(self) -> None:
        self._chosen: dict[str, _Mean] = {}
        self._scored: dict[str, tuple[_Mean, _Mean]] = {}
        """Expected and measured, of the answers that were scored."""

    def get(self, key: str) -> float | None:
        """What was lost lately; None before the first plan."""
        if (chosen := self._chosen.get(key)) is None:
            return None
        if key not in self._scored:
            return chosen.value
        expected, measured = self._scored[key]
        if expected.value > 0:
            return chosen.value * measured.value / expected.value
        return max(chosen.value, measured.value)

    def choose(self, key: str, loss: float) -> None:
        """Count a plan that was chosen, by `expected_loss`."""
        self._chosen.setdefault(key, _Mean()).add(loss)

    def score(self, key: str, expected: float, measured: float) -> None:
        """Count an answer whose loss was measured."""
        means = self._scored.setdefault(key, (_Mean(), _Mean()))
        means[0].add(expected)
        means[1].add(measured)


def expected_loss(plan: CachePlan, losses: Losses, num_prompt_tokens: int | None) -> float:
    """Nats per token of an answer under a plan: none where the whole prompt is protected."""
    if num_prompt_tokens is not None and num_prompt_tokens <= plan.sinks + plan.recent:
        return 0.0
    return losses.of(plan.format)
