"""Which tokens a plan keeps in full precision, and which formats the others get."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import torch
from msgspec import Struct
from torch import Tensor

from surefoot.kernels.layout import FULL, K8V4, BlockLayout, CacheFormat

from ..cache_rule import PLAN_FORMATS, format_name
from .branch import Branch


class Choice(StrEnum):
    """How the tokens of the better format are chosen."""

    RECENCY = "recency"
    IMPORTANCE = "importance"
    RANDOM = "random"


class QualityPlan(Struct, frozen=True, kw_only=True):
    """What happens to tokens at a boundary.

    The first `sinks` and the latest `recent` stay in full precision. Of the others a `share` has the format
    `high`, chosen anew at each boundary among those that have it and those that have just aged; the rest
    get `low`, None to drop them. What was lowered once stays so.
    """

    low: CacheFormat | None
    sinks: int = 4
    recent: int = 64
    high: CacheFormat = K8V4
    share: float = 0.0
    choice: Choice = Choice.RECENCY
    label: str | None = None
    """What tables call its formats, None for what they are."""

    @classmethod
    def served(cls, name: str, sinks: int, recent: int) -> QualityPlan:
        """What the engine does under a plan whose format has this name."""
        own = PLAN_FORMATS[name]
        return cls(low=own.low, high=own.high, share=own.share, sinks=sinks, recent=recent, label=name)

    @property
    def name(self) -> str:
        """For tables."""
        low = "drop" if self.low is None else format_name(self.low)
        if self.label or not self.share:
            return f"{self.label or low}, recent {self.recent}"
        return f"{self.share:.1%} {format_name(self.high)} by {self.choice}, rest {low}, recent {self.recent}"

    def targets(self, branch: Branch, scores: Tensor) -> dict[int, CacheFormat | None]:
        """The format of each token that is not protected. `scores` `[length]` say how important it is."""
        oldest_recent = branch.length - self.recent
        lowered = set(branch.held[self.low].positions) if self.low is not None else set()
        old = [p for held in branch.held.values() for p in held.positions if self.sinks <= p < oldest_recent]
        candidates = sorted(p for p in old if p not in lowered)
        kept = self._best(candidates, scores, round(self.share * len(old)))
        return {position: self.high if position in kept else self.low for position in candidates}

    def _best(self, candidates: Sequence[int], scores: Tensor, number: int) -> set[int]:
        if number == 0:
            return set()
        if self.choice is Choice.RECENCY:
            return set(candidates[-number:])
        if self.choice is Choice.RANDOM:
            generator = torch.Generator().manual_seed(0)
            scores = torch.rand(len(scores), generator=generator)
        order = scores[candidates].argsort(descending=True, stable=True)
        return {candidates[place] for place in order[:number].tolist()}


FULL_PRECISION = QualityPlan(low=FULL)


def num_blocks(plan: QualityPlan, layout: BlockLayout, length: int) -> int:
    """Blocks of a sequence of some length right after a boundary."""
    old = max(length - plan.sinks - plan.recent, 0)
    num_high = round(plan.share * old)
    tokens = {FULL: length - old}
    tokens[plan.high] = tokens.get(plan.high, 0) + num_high
    if plan.low is not None:
        tokens[plan.low] = tokens.get(plan.low, 0) + old - num_high
    return sum(-(-number // layout.capacity(kind)) for kind, number in tokens.items())


def window_of_equal_bytes(plan: QualityPlan, layout: BlockLayout, length: int) -> QualityPlan:
    """Full precision for the latest tokens, in as many blocks as a plan takes; the others dropped."""
    room = num_blocks(plan, layout, length) * layout.capacity(FULL)
    return QualityPlan(low=None, sinks=plan.sinks, recent=room - plan.sinks)


def full_share_of_equal_bytes(plan: QualityPlan, layout: BlockLayout) -> float:
    """The share in full precision that makes a plan of full precision and its `low` as large as it is."""
    assert plan.low is not None
    low, high, full = (layout.bytes_per_token(f) for f in (plan.low, plan.high, FULL))
    return plan.share * (high - low) / (full - low)
