"""Whether two samples could be of one distribution: two rank tests, in the closed form of large samples."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from statistics import NormalDist

from msgspec import Struct


class Comparison(Struct, frozen=True, kw_only=True):
    """Two samples beside each other; a `*_p` is how often samples of one distribution differ as much.

    `share_below` is how often a value of the first sample is below one of the second, ties counting half.
    Mann and Whitney's test sees a shift, Kolmogorov and Smirnov's any difference in shape too.
    """

    share_below: float
    mann_whitney_p: float
    kolmogorov_smirnov_p: float


def compare_samples(a: Sequence[float], b: Sequence[float]) -> Comparison:
    """Both tests, two-sided."""
    share_below, p = mann_whitney(a, b)
    return Comparison(
        share_below=share_below, mann_whitney_p=p, kolmogorov_smirnov_p=kolmogorov_smirnov_p(a, b)
    )


def mann_whitney(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """The share of pairs in which `a` is below, and p by the normal approximation, corrected for ties."""
    num_a, num_b, total = len(a), len(b), len(a) + len(b)
    ties = Counter([*a, *b])
    ends = dict(zip(sorted(ties), accumulate(ties[value] for value in sorted(ties)), strict=True))
    rank_sum = sum(ends[value] - (ties[value] - 1) / 2 for value in a)
    below = num_a * num_b + num_a * (num_a + 1) / 2 - rank_sum
    spread = total + 1 - sum(size**3 - size for size in ties.values()) / (total * (total - 1))
    deviation = math.sqrt(num_a * num_b / 12 * spread)
    if deviation == 0:
        return 0.5, 1.0
    z = max(0.0, abs(below - num_a * num_b / 2) - 0.5) / deviation
    return below / (num_a * num_b), 2 * NormalDist().cdf(-z)


def kolmogorov_smirnov_p(a: Sequence[float], b: Sequence[float]) -> float:
    """p of the largest distance between the two distribution functions, by its limit with M. A. Stephens'
    correction for the sample size (J. R. Stat. Soc. B 32, 1970).
    """
    sorted_a, sorted_b = sorted(a), sorted(b)
    distance = max(
        abs(bisect_right(sorted_a, value) / len(a) - bisect_right(sorted_b, value) / len(b))
        for value in (*a, *b)
    )
    root = math.sqrt(len(a) * len(b) / (len(a) + len(b)))
    x = (root + 0.12 + 0.11 / root) * distance
    if x < 0.3:  # the sum converges slowly there, to 1 in every digit that is shown
        return 1.0
    return min(1.0, 2 * sum((1 if k % 2 else -1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101)))
