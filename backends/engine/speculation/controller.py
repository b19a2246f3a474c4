"""Decides, step by step, which drafts are verified and how much of each."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from msgspec import Struct

from ..sequence import Sequence
from .acceptance import Acceptance
from .base import Draft
from .lengths import Candidate, Choice, StepCost, choose_lengths
from .settings import SpeculationSettings


class StepBounds(Struct, frozen=True, kw_only=True):
    """What a step's drafts must keep to.

    `num_sampled` sequences get a token without any draft. `max_rows` is what is left of the step's token
    budget, `max_step_s` how long the step may take by what running requests were promised.
    """

    num_sampled: int
    max_rows: int
    max_step_s: float | None = None


class Controller:
    """Chooses draft lengths by what they are expected to bring, and now and then tries more than that.

    `ceiling` bounds every draft at once and may be lowered and raised from outside at any time; 0 stops
    speculation, and what was learnt stays, so that it goes on where it was.
    """

    def __init__(self, settings: SpeculationSettings) -> None:
        self.settings = settings
        self.ceiling = settings.max_draft
        self.acceptance = Acceptance()
        self._credit_s = 0.0

    def max_tokens(self, sequence: Sequence) -> int:
        """The longest draft that a sequence may have now: its last token needs none after it."""
        left = sequence.request.max_tokens - sequence.num_output_tokens - 1
        return max(0, min(sequence.request.message.plan.speculation.max_draft, self.ceiling, left))

    def choose(self, drafts: Seq[tuple[Sequence, Draft]], bounds: StepBounds, cost: StepCost) -> Choice:
        """Lengths for the drafts of a step, 0 for those that wait for better times."""
        candidates = [
            Candidate(
                self.acceptance.survival(sequence, draft),
                min_gain=sequence.request.message.plan.speculation.min_gain,
            )
            for sequence, draft in drafts
        ]
        # A step earns the right to waste a share of its time, so that whoever was given up is tried again.
        self._credit_s += cost(0) * self.settings.probe_share
        choice = choose_lengths(
            candidates,
            bounds.num_sampled,
            cost,
            max_rows=bounds.max_rows,
            max_step_s=bounds.max_step_s,
            probe_budget_s=self._credit_s,
        )
        self._credit_s -= choice.probe_s
        return choice
