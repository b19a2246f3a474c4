"""Prompt lookup: what followed the last time these tokens occurred in the request itself.

After "Prompt Lookup Decoding" (A. Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding), with an index
instead of a scan, and the longest repetition instead of a fixed one.
"""

from __future__ import annotations

from ..sequence import Sequence
from .base import Draft, strength_of_match
from .token_index import TokenIndex


class NgramProposer:
    """Looks the newest tokens up in the sequence's own prompt and output."""

    name = "ngram"

    def __init__(self) -> None:
        self._indices: dict[Sequence, TokenIndex] = {}

    def propose(self, sequence: Sequence, max_tokens: int) -> Draft | None:
        """What followed the longest repetition."""
        index = self._indices.setdefault(sequence, TokenIndex())
        index.extend(sequence.token_ids[len(index.token_ids) :])
        match = index.match(sequence.token_ids[-32:])
        if match is None:
            return None
        return Draft(
            self.name,
            tuple(index.continuation(match.position, max_tokens)),
            tuple(strength_of_match(match.length + j) for j in range(max_tokens)),
        )

    def finish(self, sequence: Sequence) -> None:
        """Drop the index."""
        self._indices.pop(sequence, None)
