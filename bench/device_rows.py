"""What the device benchmark finds: checks, timings, and what went wrong instead of either."""

from __future__ import annotations

from msgspec import Struct


class Check(Struct, frozen=True, kw_only=True, tag=True):
    """One comparison: the error found, and the largest allowed."""

    name: str
    error: float
    limit: float

    @property
    def is_good(self) -> bool:
        """Whether the error is within the limit; what is no number is not."""
        return self.error <= self.limit

    @property
    def line(self) -> str:
        """For a reader."""
        return f"{'ok ' if self.is_good else 'BAD'} {self.name:36}{self.error:10.2e} of {self.limit:.0e}"


class Timing(Struct, frozen=True, kw_only=True, tag=True):
    """One measurement: the useful bytes or operations done in some seconds, the rate to compare with, and the
    least share of it that is good enough (None: it is only reported).
    """

    name: str
    seconds: float
    amount: float
    unit: str
    baseline: float
    least: float | None = None

    @property
    def rate(self) -> float:
        """Of the unit, a second."""
        return self.amount / self.seconds

    @property
    def share(self) -> float:
        """Of the baseline."""
        return self.rate / self.baseline

    @property
    def is_good(self) -> bool:
        """Whether the share is large enough."""
        return self.least is None or self.share >= self.least

    @property
    def line(self) -> str:
        """For a reader."""
        bar = "" if self.least is None else f" of {100.0 * self.least:.0f} %"
        rate = f"{self.rate / 1e9:10.2f} G{self.unit}/s"
        mark = _mark(self.least, self.is_good)
        return f"{mark} {self.name:36}{1e6 * self.seconds:12.1f} us{rate}{100.0 * self.share:8.1f} %{bar}"


class Ratio(Struct, frozen=True, kw_only=True, tag=True):
    """How many times as fast one thing is as another, and the least that is good enough."""

    name: str
    ratio: float
    least: float | None = None

    @property
    def is_good(self) -> bool:
        """Whether it is fast enough."""
        return self.least is None or self.ratio >= self.least

    @property
    def line(self) -> str:
        """For a reader."""
        bar = "" if self.least is None else f" of {self.least:.1f}"
        return f"{_mark(self.least, self.is_good)} {self.name:36}{self.ratio:10.2f} x{bar}"


class Fault(Struct, frozen=True, kw_only=True, tag=True):
    """Something could not be checked or timed."""

    name: str
    what: str

    @property
    def is_good(self) -> bool:
        """Never."""
        return False

    @property
    def line(self) -> str:
        """For a reader."""
        return f"BAD {self.name:36}{self.what}"


Row = Check | Timing | Ratio | Fault


class Part(Struct, frozen=True, kw_only=True):
    """What a section found, and how long it took."""

    name: str
    seconds: float
    rows: list[Row]

    @property
    def num_bad(self) -> int:
        """Checks that failed, and faults."""
        return sum(not row.is_good for row in self.rows if isinstance(row, Check | Fault))

    @property
    def num_low(self) -> int:
        """Rates below their bars."""
        return sum(not row.is_good for row in self.rows if isinstance(row, Timing | Ratio))

    @property
    def line(self) -> str:
        """For a reader."""
        counts = f"{len(self.rows):6} rows{self.num_bad:6} bad{self.num_low:6} low"
        return f"{self.name:24}{self.seconds:8.1f} s{counts}"


def timing(parts: list[Part], name: str) -> Timing | None:
    """The timing of that name, if there is one."""
    rows = (row for part in parts for row in part.rows)
    return next((row for row in rows if isinstance(row, Timing) and row.name == name), None)


def _mark(least: float | None, is_good: bool) -> str:
    if least is None:
        return "   "
    return "ok " if is_good else "LOW"
