"""What speculation did, in numbers that only grow."""

from __future__ import annotations

from msgspec import Struct, field

from surefoot.backends.types import DraftStats, SpeculationStats

from ..sequence import Sequence
from .base import Draft
from .draft_counts import DraftCounts
from .lengths import Choice


class SpeculationCounters(Struct):
    """Of an engine and those that replaced it.

    `drafting_s` is what proposing and choosing took. Over the steps that had drafts, `expected_tokens` is
    what was hoped for and `realised_tokens` what came, in `realised_s` (with the drafting of other steps);
    without drafts the same steps would have given `plain_tokens`, in `plain_s` by the cost model.
    """

    by_source: dict[tuple[str, str], DraftCounts] = field(default_factory=dict)
    """By flow and proposer."""
    drafting_s: float = 0.0
    num_drafted_steps: int = 0
    expected_tokens: float = 0.0
    plain_tokens: int = 0
    plain_s: float = 0.0
    realised_tokens: int = 0
    realised_s: float = 0.0

    @property
    def realised_gain(self) -> float:
        """Tokens per second of the steps with drafts over those of the same steps without; 0.1: 10 % more."""
        if not (self.realised_s and self.plain_tokens and self.plain_s):
            return 0.0
        return self.realised_tokens / self.realised_s / (self.plain_tokens / self.plain_s) - 1.0

    @property
    def expected_gain(self) -> float:
        """What `realised_gain` would be if every step had given what was expected of it, in its time."""
        if not self.realised_tokens:
            return 0.0
        return (1.0 + self.realised_gain) * self.expected_tokens / self.realised_tokens - 1.0

    def stats(self, acceptance: dict[str, dict[str, float]], *, is_synthetic: bool) -> SpeculationStats:
        """A copy for other threads, with what was learnt."""
        return SpeculationStats(
            drafts=tuple(
                DraftStats(
                    flow=flow,
                    proposer=proposer,
                    num_drafts=counts.num_drafts,
                    num_draft_tokens=counts.num_draft_tokens,
                    num_accepted_tokens=counts.num_accepted_tokens,
                    drafted_at=tuple(counts.drafted_at),
                    accepted_at=tuple(counts.accepted_at),
                )
                for (flow, proposer), counts in self.by_source.items()
            ),
            acceptance=acceptance,
            drafting_s_total=self.drafting_s,
            steps_total=self.num_drafted_steps,
            step_s_total=self.realised_s,
            plain_s_total=self.plain_s,
            expected_tokens_total=self.expected_tokens,
            realised_tokens_total=self.realised_tokens,
            plain_tokens_total=self.plain_tokens,
            expected_gain=self.expected_gain,
            realised_gain=self.realised_gain,
            is_synthetic=is_synthetic,
        )

    def expect(self, choice: Choice, num_sampled: int, plain_s: float, drafting_s: float) -> None:
        """Add what was chosen for a step."""
        self.drafting_s += drafting_s
        if any(choice.lengths):
            self.num_drafted_steps += 1
            self.expected_tokens += choice.num_tokens
            self.plain_tokens += num_sampled
            self.plain_s += plain_s
        else:
            # What was drafted in vain is part of what speculation costs; a lookup takes next to nothing.
            self.realised_s += drafting_s

    def realise(self, num_tokens: int, seconds: float) -> None:
        """Add what came of a step with drafts."""
        self.realised_tokens += num_tokens
        self.realised_s += seconds

    def count(self, sequence: Sequence, draft: Draft, num_accepted: int) -> None:
        """Add a verified draft, to its request as well."""
        flow = sequence.request.message.flow
        for counts in (
            self.by_source.setdefault((flow, draft.proposer), DraftCounts()),
            sequence.request.drafts.setdefault(draft.proposer, DraftCounts()),
        ):
            counts.count(len(draft), num_accepted)
