"""Decides, step by step, which drafts are verified and how much of each."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from itertools import accumulate

from msgspec import Struct
from msgspec.structs import replace

from ..cost_model import StepCost as PassCost
from ..promise import num_tokens_late
from ..sequence import Sequence
from .acceptance import Acceptance
from .base import Draft
from .drafting import Drafting, Prospect, Runner, ahead, choose_depth, worth_catching_up
from .lengths import Candidate, Choice, StepCost, choose_lengths
from .settings import SpeculationSettings

MAX_RESTING = 16
"""Steps without a look for drafts, at most: traffic may have changed meanwhile."""


class StepBounds(Struct, frozen=True, kw_only=True):
    """What a step's drafts must keep to.

    `num_sampled` sequences get a token without any draft. A row takes `least_row_s` at least. `max_rows` is
    what is left of the step's token budget, `max_step_s` how long the step may take by what running requests
    were promised. It ends at `ends_s` on the engine's clock if it has no drafts.
    """

    num_sampled: int
    max_rows: int
    least_row_s: float = 0.0
    max_step_s: float | None = None
    ends_s: float = -math.inf

    def after(self, seconds: float) -> StepBounds:
        """What is left when some of the step's time has passed."""
        return self if self.max_step_s is None else replace(self, max_step_s=self.max_step_s - seconds)


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
        self._drafting_credit_s = 0.0
        self._num_resting = 0

    def rests(self) -> bool:
        """Whether this step goes without drafts because to look for some did not pay lately."""
        self._num_resting -= 1
        return self._num_resting >= 0

    def rest(self, lost_s: float, step_s: float) -> None:
        """To look for drafts took so much longer than those that were found are expected to save, of a step
        of so long. That may cost no larger share of the time than probes: it rests for as many steps as that
        takes.
        """
        steps = lost_s / (step_s * self.settings.probe_share) if self.settings.probe_share else 0.0
        self._num_resting = max(0, min(int(steps), MAX_RESTING))

    def max_tokens(self, sequence: Sequence) -> int:
        """The longest draft that a sequence may have now: its last token needs none after it, and no row
        lies beyond the next boundary of its cache.
        """
        left = sequence.request.max_tokens - sequence.num_output_tokens - 1
        if (rule := sequence.cache_rule) is not None:
            boundary = rule.next_boundary(sequence.num_committed)
            left = left if boundary is None else min(left, boundary - sequence.num_committed - 1)
        return max(0, min(sequence.request.message.plan.speculation.max_draft, self.ceiling, left))

    def _min_gain(self, sequence: Sequence) -> float:
        return max(self.settings.min_gain, sequence.request.message.plan.speculation.min_gain)

    def choose(self, drafts: Seq[tuple[Sequence, Draft]], bounds: StepBounds, cost: StepCost) -> Choice:
        """Lengths for the drafts of a step, 0 for those that wait for better times."""
        candidates = [self._candidate(sequence, draft, bounds.ends_s) for sequence, draft in drafts]
        # A step earns the right to waste a share of its time, so that whoever was given up is tried again.
        # What was saved in good times is not wasted all at once when they end.
        self._credit_s = min(self._credit_s + cost(0) * self.settings.probe_share, cost(0))
        choice = choose_lengths(
            candidates,
            bounds.num_sampled,
            cost,
            max_rows=bounds.max_rows,
            least_row_s=bounds.least_row_s,
            max_step_s=bounds.max_step_s,
            probe_budget_s=self._credit_s,
        )
        self._credit_s -= choice.probe_s
        for (sequence, _), length in zip(drafts, choice.lengths, strict=True):
            if not length:
                self.acceptance.pass_over(sequence)
        return choice

    def _candidate(self, sequence: Sequence, draft: Draft, ends_s: float) -> Candidate:
        """A sequence that is late by its TPOT target needs what it is late by, as far as its draft goes."""
        survival = self.acceptance.survival(sequence, draft)
        num_late = num_tokens_late(sequence, ends_s)
        expected = accumulate(survival)
        needed = next((j for j, tokens in enumerate(expected, start=1) if tokens >= num_late), len(survival))
        return Candidate(survival, needed if num_late else 0, self._min_gain(sequence))

    def plan_drafting(
        self, prospects: Seq[Prospect], bounds: StepBounds, cost: StepCost, passes: PassCost
    ) -> Drafting:
        """How far a draft model should run ahead, for whom, given what its passes cost.

        Its probes have a share of time of their own: they cost a pass, those of `choose` a row.
        """
        self._drafting_credit_s += cost(0) * self.settings.probe_share
        token_s = cost(0) / bounds.num_sampled
        runners: list[Runner] = []
        chosen: list[Prospect] = []
        for prospect in prospects:
            survival = self.acceptance.survival(prospect.sequence, ahead((0,) * prospect.max_tokens))
            if worth_catching_up(prospect, survival, token_s, passes.row_s):
                runners.append(Runner(survival, prospect.num_rows, self._min_gain(prospect.sequence)))
                chosen.append(prospect)
        mean_context = sum(len(each.sequence.token_ids) for each in chosen) / max(len(chosen), 1)
        depth = choose_depth(
            runners,
            bounds.num_sampled,
            cost,
            lambda rows, sequences: passes.predict(rows, sequences, round(rows * mean_context)),
            max_rows=bounds.max_rows,
            max_step_s=bounds.max_step_s,
            probe_budget_s=self._drafting_credit_s,
        )
        max_catch_up = self.settings.max_catch_up
        if bounds.max_step_s is not None:
            spare_s = bounds.max_step_s - cost(0) - passes.predict(0, 0, 0)
            max_catch_up = min(max_catch_up, max(0, int(spare_s / max(passes.row_s, 1e-9))))
        if depth.probe_s:
            behind = sum(each.num_missing for each in chosen if not each.is_close)
            self._drafting_credit_s -= depth.probe_s + passes.row_s * min(behind, max_catch_up)
        wanted = [
            (prospect.sequence, min(depth.num_tokens, len(runner.survival)))
            for prospect, runner in zip(chosen, runners, strict=True)
        ]
        return Drafting(wanted if depth.num_tokens else [], max_catch_up)
