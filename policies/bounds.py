"""What a tenant's file lets a policy choose from, and the plans within it.

A tenant's file has these as its tables `[speculation]`, `[cache]` and `[schedule]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta, Struct

from surefoot.backends.types import BASELINE_PLAN, CachePlan, ServingPlan, SpeculationPlan

Format = Literal["k16v16", "k8v8", "k8v4", "mixed", "k4v4"]
FORMATS: tuple[Format, ...] = ("k16v16", "k8v8", "k8v4", "mixed", "k4v4")
"""What a plan's tokens are demoted to, the most precise first. `mixed` is k8v4 for their latest quarter, and
k4v4 for the others.
"""
MIXED: Format = "mixed"
Moment = Literal["eager", "pressure"]
MOMENTS: tuple[Moment, ...] = ("eager", "pressure")
"""When tokens are demoted: at once, or when the cache is full."""
PRECISION: Mapping[str, int] = {name: rank for rank, name in enumerate(FORMATS)}
Proposer = Literal["ngram", "suffix", "prediction", "draft"]
DEFAULT = BASELINE_PLAN.cache
MAX_DRAFT = 64
"""No file and no request has a longer one."""
SPENDABLE = 0.8
"""The share of `max_loss` that a format beyond what all may have can use up: means of few answers vary."""
Tokens = Annotated[int, Meta(ge=0)]
Loss = Annotated[float, Meta(ge=0)]
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
    """The fewest tokens that keep full precision: the first, the latest, and those that are attended to most.

    None is as many as `CachePlan` has by itself.
    """

    sinks: Tokens | None = None
    recent: Tokens | None = None
    important: Tokens | None = None


class Losses(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nats per token that a format's answers lose in the mean against full precision.

    Measured on the default model after 4,096 tokens with the usual protection (docs/measurements.md,
    "Mixed-precision cache: the study"); `surefoot quality` measures another one's.
    """

    k8v8: Loss = 0.0001
    k8v4: Loss = 0.0008
    mixed: Loss = 0.0045
    k4v4: Loss = 0.0090

    def of(self, cache_format: str) -> float:
        """A format's; an unknown one counts as the least precise."""
        match cache_format:
            case "k16v16":
                return 0.0
            case "k8v8":
                return self.k8v8
            case "k8v4":
                return self.k8v4
            case "mixed":
                return self.mixed
            case _:
                return self.k4v4


class CacheBounds(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The least precise format, what is protected from it, when it is applied, and the longest context.

    `max_loss` is what answers may lose in the mean, in nats per token, where formats lose what `loss` says:
    one that loses more may have a part in that mean, but not be had by all. `demote` None is `eager`. With
    `per_request` a request may ask for more bits, more protection, demotion at once or a shorter context, by
    its field `cache`.
    """

    format: Format = "k16v16"
    max_loss: Loss | None = None
    loss: Losses = Losses()
    protect: Protection = Protection()
    demote: Moment | None = None
    max_context: Annotated[int, Meta(ge=1)] | None = None
    per_request: bool = False

    @property
    def lasting(self) -> Format:
        """The least precise format that keeps `max_loss` if every request has it."""
        if self.max_loss is None:
            return self.format
        for each in FORMATS[PRECISION[self.format] : 0 : -1]:
            if self.loss.of(each) <= self.max_loss:
                return each
        return FORMATS[0]

    def least_precise(self, quality_loss: float | None) -> Format:
        """The least precise format that a request may have, where so much was lost lately: the one after
        `lasting` as long as that is known to be clearly within `max_loss`.

        No later one: a single answer would use up the room of many.
        """
        lasting = self.lasting
        if self.max_loss is None or lasting == self.format:
            return lasting
        has_room = quality_loss is not None and quality_loss < SPENDABLE * self.max_loss
        return FORMATS[PRECISION[lasting] + has_room]

    def plan(self, cache_format: str) -> CachePlan:
        """A format with the protection, the moment and the context of these bounds."""
        return CachePlan(
            format=cache_format,
            sinks=DEFAULT.sinks if self.protect.sinks is None else self.protect.sinks,
            recent=DEFAULT.recent if self.protect.recent is None else self.protect.recent,
            demote=self.demote or DEFAULT.demote,
            max_context=self.max_context,
        )


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
    """The plan of these two choices, with what else the bounds say of drafts and of the cache."""
    speculation = SpeculationPlan(
        max_draft=max_draft, proposers=bounds.speculation.proposers, min_gain=bounds.speculation.min_gain
    )
    return named_plan(bounds.cache.plan(cache_format), speculation)


def named_plan(cache: CachePlan, speculation: SpeculationPlan) -> ServingPlan:
    """A plan named after what it does: `baseline`, `draft4`, `k8v4`, `k4v4-pressure+draft4`.

    Plans that do the same are equal: without proposers or a length there are no drafts, and where all bits
    are kept nothing is protected or demoted. Plans of one name may differ in their longest context: it is a
    limit, and no token before it depends on it.
    """
    if not (speculation.max_draft and speculation.proposers):
        speculation = BASELINE_PLAN.speculation
    if cache.format == DEFAULT.format:
        cache = DEFAULT if cache.max_context is None else CachePlan(max_context=cache.max_context)
    names = [] if cache.format == DEFAULT.format else [cache_name(cache)]
    names += [f"draft{speculation.max_draft}"] if speculation.max_draft else []
    return ServingPlan(name="+".join(names) or BASELINE_PLAN.name, cache=cache, speculation=speculation)


def cache_name(cache: CachePlan) -> str:
    """The format, and what of it is not as usual: `k8v4-recent256`, `k4v4-pressure`."""
    words = [cache.format]
    words += [f"sinks{cache.sinks}"] if cache.sinks != DEFAULT.sinks else []
    words += [f"recent{cache.recent}"] if cache.recent != DEFAULT.recent else []
    words += [cache.demote] if cache.demote != DEFAULT.demote else []
    return "-".join(words)


def more_precise(first: str, second: str) -> str:
    """Of two formats, the one with more bits; an unknown one counts as the least precise."""
    return first if PRECISION.get(first, len(FORMATS)) <= PRECISION.get(second, len(FORMATS)) else second
