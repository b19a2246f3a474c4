"""Speculation in a step: drafts in, what was accepted out."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from msgspec import Struct, field

from ..sequence import Sequence
from .base import Draft, Proposer
from .controller import Controller, StepBounds
from .lengths import StepCost
from .ngram import NgramProposer
from .prediction import PredictionProposer
from .settings import SpeculationSettings
from .suffix import SuffixProposer


class ProposerCounters(Struct):
    """What only grows, of one proposer. `accepted_at[j]` counts drafts whose token j was accepted."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)

    def count(self, draft: Draft, num_accepted: int) -> None:
        """Add a verified draft."""
        self.num_drafts += 1
        self.num_draft_tokens += len(draft)
        self.num_accepted_tokens += num_accepted
        while len(self.accepted_at) < len(draft):
            self.accepted_at.append(0)
        for j in range(num_accepted):
            self.accepted_at[j] += 1


class Speculator:
    """Asks the proposers of each sequence's plan, in their order, and keeps what the controller says pays."""

    def __init__(self, settings: SpeculationSettings) -> None:
        self.controller = Controller(settings)
        self.suffix = SuffixProposer()
        proposers: list[Proposer] = [NgramProposer(), PredictionProposer(), self.suffix]
        self._proposers: Mapping[str, Proposer] = {proposer.name: proposer for proposer in proposers}
        self.counters: dict[str, ProposerCounters] = {}

    @property
    def proposers(self) -> list[str]:
        """Names that a plan may use."""
        return list(self._proposers)

    def draft(self, sequences: Seq[Sequence], bounds: StepBounds, cost: StepCost) -> dict[Sequence, Draft]:
        """Drafts, of at least one token each, for those of a step's decoding sequences that they pay for."""
        drafts = [(seq, draft) for seq in sequences if (draft := self._propose(seq)) is not None]
        if not drafts:
            return {}
        choice = self.controller.choose(drafts, bounds, cost)
        return {
            seq: draft.cut(length)
            for (seq, draft), length in zip(drafts, choice.lengths, strict=True)
            if length
        }

    def observe(self, sequence: Sequence, draft: Draft, num_accepted: int) -> None:
        """Learn from a draft that was verified."""
        self.controller.acceptance.observe(sequence, draft, num_accepted)
        self.counters.setdefault(draft.proposer, ProposerCounters()).count(draft, num_accepted)

    def finish(self, sequence: Sequence) -> None:
        """The sequence is over."""
        for proposer in self._proposers.values():
            proposer.finish(sequence)
        self.controller.acceptance.finish(sequence)

    def _propose(self, sequence: Sequence) -> Draft | None:
        max_tokens = self.controller.max_tokens(sequence)
        if max_tokens == 0:
            return None
        for name in sequence.request.message.plan.speculation.proposers:
            proposer = self._proposers.get(name)
            if proposer is not None and (draft := proposer.propose(sequence, max_tokens)) is not None:
                return draft
        return None
