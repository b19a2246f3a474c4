"""What a policy sees and the one thing it does."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from surefoot.backends.types import ServingPlan


class Observation(Struct, frozen=True, kw_only=True):
    """All that a decision may depend on."""

    tenant_id: str
    model: str


class Policy(Protocol):
    """Chooses the plan of one request."""

    def decide(self, observation: Observation) -> ServingPlan:
        """A pure function: the same observation gives the same plan."""
