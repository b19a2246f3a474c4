"""The policy that never optimises."""

from __future__ import annotations

from surefoot.backends.types import BASELINE_PLAN, ServingPlan

from .base import Observation


class BaselinePolicy:
    """Always `BASELINE_PLAN`."""

    def decide(self, observation: Observation) -> ServingPlan:
        """Full-precision cache, no speculation, whatever is observed."""
        return BASELINE_PLAN
