"""What a tenant's file lets a policy choose from, and the plans within it.

A tenant's file has these as its tables `[speculation]`, `[cache]` and `[schedule]`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from surefoot.backends.types import BASELINE_PLAN, CachePlan, ServingPlan, SpeculationPlan

Format = Literal["k16v16", "k8v8", "k8v4", "k4v4"]
FORMATS: tuple[Format, ...] = ("k16v16", "k8v8", "k8v4", "k4v4")
"""Cache formats, the most precise first."""
Proposer = Literal["ngram", "suffix", "prediction", "draft"]
MAX_DRAFT = 64
"""No file and no request has a longer one."""
Tokens = Annotated[int, Meta(ge=0)]
Hour = Annotated[float, Meta(ge=0, le=24)]


class SpeculationBounds(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The most that may be drafted, by whom, and the least gain (0.02 is 2 %) for which it is done.

    With `per_request` a request may ask for less, by its field `speculation`.
    """

    enabled: bool = True
    max_draft: Annotated[int, Meta(ge=0, le=MAX_DRAFT)] = 0
    min_gain: Annotated[float, Meta(ge=0, le=1)] = 0.0
    proposers: tuple[Proposer, ...] = ("ngram",)
    per_request: bool = False

    @property
    def ceiling(self) -> int:
        """The longest draft, 0 for none."""
        return self.max_draft if self.enabled and self.proposers else 0


class Protection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many tokens keep full precision: the first, the latest, and those that are attended to most.

    None leaves it to the engine.
    """

    sinks: Tokens | None = None
    recent: Tokens | None = None
    important: Tokens | None = None


class CacheBounds(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The least precise format, what is protected from it, when it is applied, and the longest context."""

    format: Format = "k16v16"
    protect: Protection = Protection()
    demote: Literal["eager", "pressure"] | None = None
    max_context: Annotated[int, Meta(ge=1)] | None = None


class ScheduleBounds(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When `schedule` optimises: between two hours (UTC), and while at most `max_load` requests are there.

    A window may pass midnight; one of equal ends is the whole day. `max_load` None is no limit.
    """

    from_hour: Hour = 0.0
    to_hour: Hour = 24.0
    max_load: Annotated[int, Meta(ge=0)] | None = None

    def includes(self, hour: float) -> bool:
        """Whether an hour lies in the window; its end does not."""
        if self.from_hour < self.to_hour:
            return self.from_hour <= hour < self.to_hour
        return self.from_hour == self.to_hour or hour >= self.from_hour or hour < self.to_hour


class PlanBounds(Struct, frozen=True, kw_only=True):
    """All of it. Under `reproducible` no plan may depend on what else the server does."""

    speculation: SpeculationBounds = SpeculationBounds()
    cache: CacheBounds = CacheBounds()
    schedule: ScheduleBounds = ScheduleBounds()
    reproducible: bool = False


def bounded_plan(bounds: PlanBounds, max_draft: int, cache_format: str) -> ServingPlan:
    """The plan of these two choices, with the bounds' proposers and least gain."""
    speculation = SpeculationPlan(
        max_draft=max_draft, proposers=bounds.speculation.proposers, min_gain=bounds.speculation.min_gain
    )
    return named_plan(CachePlan(format=cache_format), speculation)


def named_plan(cache: CachePlan, speculation: SpeculationPlan) -> ServingPlan:
    """A plan named after what it does: `baseline`, `draft4`, `k8v4`, `k8v4+draft4`.

    Plans that do the same are equal: without proposers or a length there are no drafts.
    """
    if not (speculation.max_draft and speculation.proposers):
        speculation = BASELINE_PLAN.speculation
    names = [] if cache == BASELINE_PLAN.cache else [cache.format]
    names += [f"draft{speculation.max_draft}"] if speculation.max_draft else []
    return ServingPlan(name="+".join(names), cache=cache, speculation=speculation) if names else BASELINE_PLAN


def more_precise(first: str, second: str) -> str:
    """Of two formats, the one with more bits; an unknown one counts as the least precise."""
    return min(first, second, key=lambda each: FORMATS.index(each) if each in FORMATS else len(FORMATS))
