"""Lengths in tokens: fixed, uniform or normal."""

from __future__ import annotations

from random import Random

from msgspec import Struct

from .errors import BadArgument

EXPECTED = "expected 128 (fixed), 64:256 (uniform, both ends included) or 128~32 (normal, mean~deviation)"


class Length(Struct, frozen=True, kw_only=True):
    """A distribution of lengths. `text` is how it was written; `low` to `high` bounds what is drawn.

    A normal length is drawn around `mean` and cut at 1 and at twice the mean, which keeps the mean.
    """

    text: str
    low: int
    high: int
    mean: float
    deviation: float | None = None

    def draw(self, random: Random) -> int:
        """One length."""
        if self.deviation is None:
            return random.randint(self.low, self.high)
        return min(max(round(random.gauss(self.mean, self.deviation)), self.low), self.high)


def parse_length(text: str) -> Length:
    """`BadArgument` if the text is no length."""
    try:
        if "~" in text:
            mean, deviation = (float(part) for part in text.split("~"))
            length = Length(text=text, low=1, high=round(2 * mean) - 1, mean=mean, deviation=deviation)
        else:
            ends = [int(part) for part in text.split(":")]
            low, high = (ends[0], ends[0]) if len(ends) == 1 else (ends[0], ends[1])
            length = Length(text=text, low=low, high=high, mean=(low + high) / 2)
            if len(ends) > 2:
                raise ValueError
    except (ValueError, OverflowError):
        raise BadArgument(f"length {text!r}: {EXPECTED}") from None
    if not 1 <= length.low <= length.high or (length.deviation or 0) < 0:
        raise BadArgument(f"length {text!r}: {EXPECTED}, all of 1 token or more")
    return length
