"""Finds where the newest tokens of a text have occurred before, without reading the text again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
        self._places = [_Places(order) for order in ORDERS]

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append to the text. Runs are indexed only when their continuation is known."""
        begin = len(self.token_ids)
        self.token_ids += token_ids
        for places in self._places:
            places.extend(self.token_ids, begin)

    def match(self, context: Sequence[int], *, after: int = 0) -> Match | None:
        """The longest run that `context` ends with and that occurred before; of equals the newest.

        With `after`, of equals the first one at or beyond that position, if there is one.
        """
        best: Match | None = None
        for places in self._places:
            for position in places.of(context):
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


class _Places:
    """Where runs of `order` tokens were followed by something: the newest place of each run, and for each
    place the one before it of the same run, 0 if there is none.
    """

    def __init__(self, order: int) -> None:
        self._order = order
        self._newest: dict[tuple[int, ...], int] = {}
        self._earlier = [0] * order

    def extend(self, text: list[int], begin: int) -> None:
        """The text has grown from `begin` tokens."""
        order, newest, earlier = self._order, self._newest, self._earlier
        for place in range(max(begin, order), len(text)):
            run = tuple(text[place - order : place])
            earlier.append(newest.get(run, 0))
            newest[run] = place

    def of(self, context: Sequence[int]) -> Iterator[int]:
        """At most `MAX_PLACES`, the newest first."""
        place = self._newest.get(tuple(context[-self._order :]), 0)
        for _ in range(MAX_PLACES):
            if not place:
                return
            yield place
            place = self._earlier[place]
