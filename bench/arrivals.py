"""When requests arrive in an open loop: a Poisson process, of a constant rate or along a ramp."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

from msgspec import Struct

from .errors import BadArgument

EXPECTED = "expected requests per second: 4, or a ramp from one rate to another such as 1:10"


class Rate(Struct, frozen=True, kw_only=True):
    """Requests per second, going from `start` to `end` in a straight line over the run."""

    start: float
    end: float

    def ramp_s(self, num_requests: int | None, duration_s: float | None) -> float:
        """How long the ramp takes: the run's duration, or as long as the requests are expected to take."""
        if duration_s is not None:
            return duration_s
        assert num_requests is not None
        return num_requests / ((self.start + self.end) / 2)


def parse_rate(text: str) -> Rate:
    """`BadArgument` if the text is no rate."""
    try:
        rates = [float(part) for part in text.split(":")]
    except ValueError:
        rates = []
    usable = any(rates) and all(math.isfinite(rate) and rate >= 0 for rate in rates)
    if not usable or len(rates) > 2:
        raise BadArgument(f"rate {text!r}: {EXPECTED}")
    return Rate(start=rates[0], end=rates[-1])


def arrivals(rate: Rate, seed: int, num_requests: int | None, duration_s: float | None) -> Iterator[float]:
    """Seconds from the start at which requests arrive: the same for the same arguments.

    Gaps of a unit Poisson process are mapped through the inverse of the expected number of arrivals
    by time t, `start * t + (end - start) * t^2 / (2 * ramp)`. After the ramp the rate stays at `end`.
    """
    random = Random(f"arrivals-{seed}")
    ramp_s = rate.ramp_s(num_requests, duration_s)
    expected, sent = 0.0, 0
    while num_requests is None or sent < num_requests:
        expected += random.expovariate(1.0)
        at = _time_of(expected, rate, ramp_s)
        if at is None or (duration_s is not None and at >= duration_s):
            return
        yield at
        sent += 1


def _time_of(expected: float, rate: Rate, ramp_s: float) -> float | None:
    """When that many arrivals are expected; None for never."""
    slope = (rate.end - rate.start) / ramp_s
    by_end = (rate.start + rate.end) / 2 * ramp_s
    if expected > by_end:
        return ramp_s + (expected - by_end) / rate.end if rate.end else None
    # The root in the form that does not lose its digits when the slope is near 0.
    return 2 * expected / (rate.start + math.sqrt(max(rate.start**2 + 2 * slope * expected, 0.0)))
