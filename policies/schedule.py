"""The policy that optimises at some hours, or while there is little to do."""

from __future__ import annotations

from .base import Decision, Observation, Policy
from .baseline import BaselinePolicy
from .fixed import FixedPolicy


class SchedulePolicy:
    """One policy inside the tenant's `[schedule]`, another one outside."""

    def __init__(self, inside: Policy | None = None, outside: Policy | None = None) -> None:
        self._inside = inside or FixedPolicy()
        self._outside = outside or BaselinePolicy()

    def decide(self, observation: Observation) -> Decision:
        """By the hour and the load that were observed."""
        schedule = observation.bounds.schedule
        window = f"{schedule.from_hour:g} to {schedule.to_hour:g} UTC"
        if not schedule.includes(observation.hour):
            return self._choose(
                self._outside, observation, f"hour {observation.hour:.1f} is outside {window}"
            )
        if schedule.max_load is not None and observation.load > schedule.max_load:
            why = f"{observation.load} requests are more than max_load = {schedule.max_load}"
            return self._choose(self._outside, observation, why)
        why = f"hour {observation.hour:.1f} is within {window} and the load is within its limit"
        return self._choose(self._inside, observation, why)

    def _choose(self, policy: Policy, observation: Observation, why: str) -> Decision:
        decision = policy.decide(observation)
        return Decision(decision.plan, f"{why}, so {decision.plan.name}")
