"""Means with intervals, over texts: neighbouring tokens go together, texts do not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct

NUM_RESAMPLES = 2000


class Estimate(Struct, frozen=True):
    """A mean, and the middle 95 % of the means of samples drawn again (Efron 1979), always the same draws."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"


def estimate(values: Sequence[float]) -> Estimate:
    """Of at least one value."""
    sample = torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(0, len(sample), (NUM_RESAMPLES, len(sample)), generator=generator)
    means = sample[draws].mean(1).sort().values
    low, high = (float(means[round(share * (NUM_RESAMPLES - 1))]) for share in (0.025, 0.975))
    return Estimate(float(sample.mean()), low, high)


def difference(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """The mean of paired differences."""
    return estimate([value - other for value, other in zip(values, others, strict=True)])
