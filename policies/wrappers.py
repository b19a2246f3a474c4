"""Policies made of policies: each has the same interface as what it wraps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from surefoot.backends.types import BASELINE_PLAN, ServingPlan, SpeculationPlan

from .base import Decision, Observation, Policy, Step
from .baseline import BaselinePolicy
from .bounds import FORMATS, PlanBounds, cache_name, more_precise, named_plan
from .fixed import FixedPolicy

FORCIBLE: Mapping[str, Policy] = {"baseline": BaselinePolicy(), "fixed": FixedPolicy()}
"""What an operator may force: nothing, or all that the tenant's file allows."""


class ByName:
    """The policy that the tenant's file names; baseline where there is none of that name."""

    def __init__(self, policies: Mapping[str, Policy]) -> None:
        self._policies = policies

    def decide(self, observation: Observation) -> Decision:
        """Ask the policy of that name."""
        policy = self._policies.get(observation.policy)
        if policy is None:
            return Decision(BASELINE_PLAN, f"there is no policy {observation.policy}, so baseline")
        return policy.decide(observation)


class Override:
    """What an operator forces for now, else what the wrapped policy decides."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def decide(self, observation: Observation) -> Decision:
        """Ask the wrapped policy only where nothing is forced."""
        forced = FORCIBLE.get(observation.override or "")
        if forced is None:
            return self._policy.decide(observation)
        plan = forced.decide(observation).plan
        says = f"an operator forces {observation.override} for now"
        return Decision(plan, says, (Step("override", says),))


class OrBaseline:
    """The baseline where the wrapped policy fails: somebody's module must not fail requests."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def decide(self, observation: Observation) -> Decision:
        """The wrapped policy's decision, if it makes one."""
        try:
            return self._policy.decide(observation)
        except Exception as error:
            reason = f"the policy {observation.policy} failed with {type(error).__name__}, so baseline"
            return Decision(BASELINE_PLAN, reason, (Step("failure", reason),))


class Repeatable:
    """For what must repeat, a plan in which the cache depends on nothing else that the server does.

    The wrapped policy sees an idle server of which no loss is known, and what it would demote under pressure
    is demoted at once. Drafts change no answer, so where the file allows no other format than full precision
    all stays as it is.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def decide(self, observation: Observation) -> Decision:
        """Say in the reason what was not looked at, and why."""
        why = observation.must_repeat
        if why is None or observation.bounds.cache.format == FORMATS[0]:
            return self._policy.decide(observation)
        decision = self._policy.decide(replace(observation, cache_pressure=0.0, load=0, quality_loss=None))
        plan, says = decision.plan, f"as on an idle server, since {why}"
        if plan.cache.demote == "pressure":
            plan = named_plan(replace(plan.cache, demote="eager"), plan.speculation)
            says = f"demoted at once and {says}, so {plan.name}"
        return Decision(plan, f"{decision.reason}; {says}", (*decision.steps, Step("repeatable", says)))


class Clamp:
    """The wrapped policy's plan, cut to what the server drafts, the tenant's bounds and the request's wish.

    The plan is named anew after what it does, so that a name in a header or a fingerprint can be relied on.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def decide(self, observation: Observation) -> Decision:
        """Say in the reason what was cut."""
        decision = self._policy.decide(observation)
        wanted = within_context(decision.plan, observation)
        served = within_server(wanted, observation)
        allowed = within_bounds(served, observation.bounds, observation.quality_loss)
        wished = within_wish(allowed, observation)
        cuts = []
        if served.name != wanted.name:
            cuts.append(Step("server", f"{wanted.name} is more than the server drafts"))
        if allowed != served:
            cuts.append(Step("bounds", f"{served.name} is more than the tenant's file allows"))
        if wished != allowed:
            cuts.append(Step("request", f"the request wants {_wish(allowed, wished)}"))
        if not cuts:
            return Decision(wished, decision.reason, decision.steps)
        reason = "; but ".join([decision.reason, *(cut.says for cut in cuts)])
        return Decision(wished, f"{reason}, so {wished.name}", (*decision.steps, *cuts))


def within_context(plan: ServingPlan, seen: Observation) -> ServingPlan:
    """The plan under its name, with the longest context that the file, the request and itself agree to.

    A limit like those on tokens: it holds whatever a policy chooses, the baseline too.
    """
    limits = (plan.cache.max_context, seen.bounds.cache.max_context, seen.max_context)
    longest = min((each for each in limits if each is not None), default=None)
    return named_plan(replace(plan.cache, max_context=longest), plan.speculation)


def within_server(plan: ServingPlan, seen: Observation) -> ServingPlan:
    """As much of a plan's drafts as the server makes, for a name that says what is done."""
    drafts = plan.speculation
    if seen.longest_draft is not None:
        drafts = replace(drafts, max_draft=min(drafts.max_draft, seen.longest_draft))
    if seen.drafters is not None:
        drafts = replace(drafts, proposers=_common(drafts.proposers, seen.drafters))
    return named_plan(plan.cache, drafts)


def within_bounds(plan: ServingPlan, bounds: PlanBounds, quality_loss: float | None = None) -> ServingPlan:
    """As much of a plan as the tenant's file allows: no fewer bits, no less protected, no longer drafts.

    To demote under pressure is for the file to choose; at once is always allowed. `quality_loss` is what was
    lost lately, None if that is not known.
    """
    least = bounds.cache.plan(bounds.cache.least_precise(quality_loss))
    limits = bounds.speculation
    cache = replace(
        plan.cache,
        format=more_precise(plan.cache.format, least.format),
        sinks=max(plan.cache.sinks, least.sinks),
        recent=max(plan.cache.recent, least.recent),
        demote=plan.cache.demote if least.demote == "pressure" else "eager",
    )
    speculation = SpeculationPlan(
        max_draft=min(plan.speculation.max_draft, limits.ceiling),
        proposers=_common(plan.speculation.proposers, limits.proposers),
        min_gain=max(plan.speculation.min_gain, limits.min_gain),
    )
    return named_plan(cache, speculation)


def within_wish(plan: ServingPlan, seen: Observation) -> ServingPlan:
    """As much of a plan as the request wants: all of it where it wants nothing."""
    cache, speculation = plan.cache, plan.speculation
    cache = replace(
        cache,
        format=more_precise(cache.format, seen.cache_format or cache.format),
        sinks=max(cache.sinks, seen.protect.sinks or 0),
        recent=max(cache.recent, seen.protect.recent or 0),
        demote="eager" if seen.demotes_at_once else cache.demote,
    )
    if seen.max_draft is not None:
        speculation = replace(speculation, max_draft=min(speculation.max_draft, seen.max_draft))
    return plan if (cache, speculation) == (plan.cache, plan.speculation) else named_plan(cache, speculation)


def _wish(allowed: ServingPlan, wished: ServingPlan) -> str:
    """What of a plan a request did not want, in words."""
    words = []
    if wished.cache != allowed.cache:
        words.append(f"{cache_name(wished.cache)} at least")
    if wished.speculation != allowed.speculation:
        words.append(f"drafts of {wished.speculation.max_draft} at most")
    return " and ".join(words)


def _common(wanted: Sequence[str], allowed: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in wanted if name in allowed)
