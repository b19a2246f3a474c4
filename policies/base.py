"""What a policy sees and the one thing it does."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from surefoot.backends.types import ServingPlan

from .bounds import PlanBounds, Protection


class GuardVerdict(Struct, frozen=True):
    """An optimisation (`speculation` or `cache`) that is to be held back for now, and why."""

    optimisation: str
    reason: str


class Observation(Struct, frozen=True, kw_only=True):
    """All that a decision may depend on; None for what is not known."""

    tenant_id: str
    model: str
    policy: str = "baseline"
    """The policy that the tenant's file names."""
    service_class: str = "standard"
    kind: str = "chat"
    """The kind of traffic: `chat` or `text`, by the endpoint."""
    num_prompt_tokens: int | None = None
    """Exact for prompts of token ids, else an estimate."""
    cache_pressure: float = 0.0
    """Share of the cache's blocks in use, 0 to 1."""
    load: int = 0
    """Requests that run or wait in the backend."""
    acceptance: float | None = None
    """Share of drafted tokens that were accepted lately, of those whose predecessors were, of this tenant and
    kind.
    """
    quality_loss: float | None = None
    """Nats per token that the tenant's plans of this kind lost lately against the baseline."""
    longest_draft: int | None = None
    """The longest draft that the server makes for anyone."""
    drafters: tuple[str, ...] | None = None
    """The proposers that the server has."""
    hour: float = 0.0
    """Hours since midnight, UTC; passed in, because a policy has no clock."""
    override: str | None = None
    """What an operator forces for now: a name of `wrappers.FORCIBLE`."""
    max_draft: int | None = None
    """The longest draft that the request itself wants."""
    cache_format: str | None = None
    """The least precise format that the request itself wants."""
    protect: Protection = Protection()
    """The fewest tokens that the request itself wants to keep all bits."""
    demotes_at_once: bool = False
    """Whether the request itself wants no demotion by pressure."""
    max_context: int | None = None
    """The longest context that the request itself wants."""
    has_seed: bool = False
    """Whether the request has a `seed`, and so must be given the same answer again."""
    verdicts: tuple[GuardVerdict, ...] = ()
    bounds: PlanBounds = PlanBounds()

    @property
    def least_precise(self) -> str:
        """The least precise format that the tenant's file allows, by what was lost lately."""
        return self.bounds.cache.least_precise(self.quality_loss)

    @property
    def must_repeat(self) -> str | None:
        """Why the plan may not depend on what else the server does; None if it may."""
        if self.bounds.reproducible:
            return "the tenant's file says reproducible"
        return "the request has a seed" if self.has_seed else None


class Step(Struct, frozen=True):
    """What one rule said on the way to a decision."""

    rule: str
    says: str


class Decision(Struct, frozen=True):
    """A plan and why: one sentence without a full stop, so that a wrapper may go on.

    `steps` has what each rule said, in order, where a policy has several.
    """

    plan: ServingPlan
    reason: str
    steps: tuple[Step, ...] = ()


class Policy(Protocol):
    """Chooses the plan of one request."""

    def decide(self, observation: Observation) -> Decision:
        """A pure function: the same observation gives the same decision."""
