"""What drafts are, and where they come from."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from ..sequence import Sequence

STRENGTHS = 5
"""How many grades of evidence a draft token may rest on, 0 the weakest."""

_STRENGTH_OF_MATCH = (0, 0, 0, 1, 1, 2, 2, 2, 2)


class Draft(Struct, frozen=True):
    """Tokens that may come next, and how strong the evidence for each is.

    `strengths[j]` grades token j given that all before it were right; what a grade is worth is learnt, per
    proposer, from what is accepted (`acceptance.py`).
    """

    proposer: str
    token_ids: tuple[int, ...]
    strengths: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.token_ids)

    def cut(self, num_tokens: int) -> Draft:
        """Its first tokens."""
        return Draft(self.proposer, self.token_ids[:num_tokens], self.strengths[:num_tokens])


class Proposer(Protocol):
    """Guesses tokens. It cannot be wrong, only useless: every draft is verified."""

    name: str

    def propose(self, sequence: Sequence, max_tokens: int) -> Draft | None:
        """A draft of 1 to `max_tokens` tokens that continues `sequence.token_ids`, None for no idea."""

    def finish(self, sequence: Sequence) -> None:
        """The sequence is over: learn from it, and forget what was kept for it."""


def strength_of_match(length: int) -> int:
    """The grade of a token that follows a repetition of so many tokens."""
    if length < len(_STRENGTH_OF_MATCH):
        return _STRENGTH_OF_MATCH[length]
    return 3 if length <= 16 else 4
