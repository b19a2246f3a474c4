"""The policy that never optimises."""

from __future__ import annotations

from surefoot.backends.types import BASELINE_PLAN

from .base import Decision, Observation


class BaselinePolicy:
    """Always `BASELINE_PLAN`."""

    def decide(self, observation: Observation) -> Decision:
        """Full-precision cache, no speculation, whatever is observed."""
        return Decision(BASELINE_PLAN, "the policy is baseline, whatever is observed")
