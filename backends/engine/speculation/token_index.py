"""Finds where the newest tokens of a text have occurred before, without reading the text again."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

ORDERS = (4, 2)
"""Lengths of the runs that are indexed: the longer one finds the right place among many."""

MAX_PLACES = 8
"""Places kept of each run, the newest ones: a lookup's cost stays the same in a text of any length."""

MAX_MATCH = 32
"""A longer agreement says no more."""


class Match(Struct, frozen=True):
    """`position` is where the text went on after a run of `length` tokens that the context ends with."""

    position: int
    length: int


class TokenIndex:
    """A text that grows, with the places of every run of `ORDERS` tokens that something follows."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append to the text. Runs are indexed only when their continuation is known."""
        for token_id in token_ids:
            here = len(self.token_ids)
            for order in ORDERS:
                if here >= order:
                    places = self._places.setdefault(tuple(self.token_ids[here - order :]), [])
                    places.append(here)
                    if len(places) > MAX_PLACES:
                        del places[0]
            self.token_ids.append(token_id)

    def match(self, context: Sequence[int], *, after: int = 0) -> Match | None:
        """The longest run that `context` ends with and that occurred before; of equals the newest.

        With `after`, of equals the first one at or beyond that position, if there is one.
        """
        best: Match | None = None
        for order in ORDERS:
            for position in reversed(self._places.get(tuple(context[-order:]), ())):
                length = self._agreement(context, position)
                if best is None or length > best.length or (length == best.length and position >= after > 0):
                    best = Match(position, length)
            if best is not None:
                return best
        return None

    def continuation(self, position: int, max_tokens: int) -> list[int]:
        """What follows `position`; a repetition that reaches the end of the text goes on repeating itself."""
        period = len(self.token_ids) - position
        found = self.token_ids[position : position + max_tokens]
        while len(found) < max_tokens:
            found.append(found[-period])
        return found

    def _agreement(self, context: Sequence[int], position: int) -> int:
        limit = min(MAX_MATCH, position, len(context))
        for length in range(limit):
            if self.token_ids[position - 1 - length] != context[-1 - length]:
                return length
        return limit
