"""How far a draft model should run ahead: decided before it runs, since running it is what costs.

Nothing is known yet of the tokens that it will propose, so the probabilities are those with which its
tokens turned out right before (`AHEAD`). Which of the real tokens are worth a row of the step is decided
after it has run, by what they are worth each (`lengths.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from msgspec import Struct

from ..sequence import Sequence
from .base import Draft
from .lengths import StepCost

AHEAD = "draft ahead"
"""Under this name `Acceptance` learns how often the draft model is right, whether or not its tokens were
verified: of a draft that was cut, the token that came after it tells of one more."""

GRADE = 2
"""Of all tokens alike: the first guess is hopeful, but less than of an n-gram that was long."""

CLOSE = 2
"""Tokens that a draft model lacks of a sequence that it drafts for at every step: the one that it did not
draft itself, and after an accepted draft that one's last."""

EARNING_STEPS = 64
"""Over so many steps, or as many as an answer may still have, the cost of catching up is spread."""

DraftCost = Callable[[int, int], float]
"""Predicted seconds of a draft model's forward pass over so many rows of so many sequences."""


class Prospect(Struct, frozen=True):
    """A sequence that a draft model could draft up to `max_tokens` for, once it has run `num_missing`."""

    sequence: Sequence
    max_tokens: int
    num_missing: int

    @property
    def num_steps(self) -> int:
        """Steps that are left to earn what catching up costs."""
        left = self.sequence.request.max_tokens - self.sequence.num_output_tokens
        return max(1, min(left, EARNING_STEPS))

    @property
    def is_close(self) -> bool:
        """Whether nothing is missing but what always is."""
        return self.num_missing <= CLOSE

    @property
    def num_rows(self) -> float:
        """Rows of the first pass that one step has to earn."""
        if self.is_close:
            return self.num_missing
        return max(1.0, self.num_missing / self.num_steps)


class Runner(Struct, frozen=True):
    """A prospect in numbers: see `Candidate`. `num_rows` is what it adds to the first pass."""

    survival: Seq[float]
    num_rows: float
    min_gain: float = 0.0


class Depth(Struct, frozen=True):
    """How many tokens to draft at most, and how much time is expected to be wasted by it: 0 where it pays."""

    num_tokens: int
    probe_s: float = 0.0


class Drafting(Struct, frozen=True):
    """For whom to draft and how many tokens at most, and how many tokens to catch up with before that."""

    wanted: list[tuple[Sequence, int]]
    max_catch_up: int


def ahead(token_ids: tuple[int, ...]) -> Draft:
    """The draft under whose name it is learnt how often the draft model is right."""
    return Draft(AHEAD, token_ids, (GRADE,) * len(token_ids))


def worth_catching_up(prospect: Prospect, survival: Seq[float], token_s: float, row_s: float) -> bool:
    """Whether what is missing could be earned back in the steps that are left, if drafting cost nothing.

    `token_s` is what a token takes without drafts, `row_s` what a missing one takes the draft model.
    """
    extra = sum(survival)
    saved_s = prospect.num_steps * token_s * extra / (1.0 + extra)
    return prospect.is_close or saved_s >= row_s * prospect.num_missing


def choose_depth(
    runners: Seq[Runner],
    num_sampled: int,
    cost: StepCost,
    draft_cost: DraftCost,
    *,
    max_rows: int,
    max_step_s: float | None = None,
    probe_budget_s: float = 0.0,
) -> Depth:
    """The depth that brings the most tokens per second, drafting and verifying counted; 0 for not to draft.

    Every runner drafts to the chosen depth or to the end of its survival: a pass over one sequence costs
    nearly what one over all does. One token more than pays is drafted if no more than `probe_budget_s`
    seconds are expected to be lost by it.
    """
    options = [(float(num_sampled), cost(0))]
    tokens, num_rows, drafting_s = float(num_sampled), 0, 0.0
    first_rows = round(sum(runner.num_rows for runner in runners))
    for depth in range(1, max((len(runner.survival) for runner in runners), default=0) + 1):
        drafting = [runner for runner in runners if len(runner.survival) >= depth]
        num_rows += len(drafting)
        tokens += sum(runner.survival[depth - 1] / (1.0 + runner.min_gain) for runner in drafting)
        drafting_s += draft_cost(first_rows if depth == 1 else len(drafting), len(drafting))
        step_s = cost(num_rows) + drafting_s
        if num_rows > max_rows or (max_step_s is not None and step_s > max_step_s):
            break
        options.append((tokens, step_s))
    best = max(range(len(options)), key=lambda depth: (options[depth][0] / options[depth][1], -depth))
    rate = options[best][0] / options[best][1]
    if best + 1 < len(options):
        tokens, step_s = options[best + 1]
        loss_s = max(0.0, step_s - tokens / rate)
        if loss_s <= probe_budget_s:
            return Depth(best + 1, loss_s)
    return Depth(best)
