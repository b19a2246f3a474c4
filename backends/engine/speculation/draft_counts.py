"""How drafts fared, in numbers that only grow."""

from __future__ import annotations

from msgspec import Struct, field


class DraftCounts(Struct):
    """Of some drafts. `drafted_at[j]` counts those that had a token j, `accepted_at[j]` those of them whose
    token j was accepted.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def count(self, num_tokens: int, num_accepted: int) -> None:
        """Add a verified draft."""
        self.num_drafts += 1
        self.num_draft_tokens += num_tokens
        self.num_accepted_tokens += num_accepted
        missing = num_tokens - len(self.drafted_at)
        self.drafted_at += [0] * missing
        self.accepted_at += [0] * missing
        for j in range(num_tokens):
            self.drafted_at[j] += 1
            self.accepted_at[j] += j < num_accepted

    def add(self, other: DraftCounts) -> None:
        """Add all of another's."""
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self.drafted_at = _sums(self.drafted_at, other.drafted_at)
        self.accepted_at = _sums(self.accepted_at, other.accepted_at)


def _sums(a: list[int], b: list[int]) -> list[int]:
    short, long = sorted((a, b), key=len)
    return [x + y for x, y in zip(short, long, strict=False)] + long[len(short) :]
