"""Which policies there are: ours, and those of other packages.

A package adds one by an entry point whose name is the policy's, and whose object makes it when called without
arguments:

    [project.entry-points."surefoot.policies"]
    thrifty = "my_package:ThriftyPolicy"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points

from .adaptive import AdaptivePolicy
from .base import Policy
from .baseline import BaselinePolicy
from .fixed import FixedPolicy
from .schedule import SchedulePolicy
from .wrappers import ByName, Clamp, OrBaseline, Override, Repeatable

GROUP = "surefoot.policies"
BUILT_IN: Mapping[str, Callable[[], Policy]] = {
    "baseline": BaselinePolicy,
    "fixed": FixedPolicy,
    "schedule": SchedulePolicy,
    "adaptive": AdaptivePolicy,
}


class PolicyError(ValueError):
    """A package's policy cannot be used; the message names its entry point."""


def load_policies(found: Iterable[EntryPoint] | None = None) -> dict[str, Policy]:
    """Every policy by its name. `found` are the entry points, by default the installed ones.

    Raises `PolicyError` for a name that is taken and for a policy that cannot be made.
    """
    policies = {name: make() for name, make in BUILT_IN.items()}
    for point in entry_points(group=GROUP) if found is None else found:
        if point.name in policies:
            raise PolicyError(f"there are two policies '{point.name}'; the second one is {point.value}")
        policies[point.name] = _make(point)
    return policies


def serving_policy(policies: Mapping[str, Policy]) -> Policy:
    """What decides for all tenants: the policy that a file names, an operator's override, and the limits."""
    return Clamp(Repeatable(OrBaseline(Override(ByName(policies)))))


def _make(point: EntryPoint) -> Policy:
    try:
        policy = point.load()()
    except Exception as error:
        message = f"the policy '{point.name}' ({point.value}) cannot be made: {type(error).__name__}: {error}"
        raise PolicyError(message) from error
    if not callable(getattr(policy, "decide", None)):
        raise PolicyError(f"the policy '{point.name}' ({point.value}) has no method 'decide'")
    made: Policy = policy
    return made
