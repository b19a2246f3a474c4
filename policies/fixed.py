"""The policy that always takes all that the tenant's file allows."""

from __future__ import annotations

from .base import Decision, Observation
from .bounds import bounded_plan


class FixedPolicy:
    """The longest drafts, and the least precise format whose loss keeps the limit if all requests have it."""

    def decide(self, observation: Observation) -> Decision:
        """The same plan for all requests of a tenant."""
        bounds = observation.bounds
        plan = bounded_plan(bounds, bounds.speculation.ceiling, bounds.cache.lasting)
        return Decision(plan, f"the policy is fixed, and the tenant's file allows {plan.name}")
