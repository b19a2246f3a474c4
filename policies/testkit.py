"""What any policy must pass, ours and other people's: `check_policy(MyPolicy)` in a test.

It asks the policy about several hundred observations, ordinary and odd, and raises `PolicyProblem` with the
first one that shows a fault. A policy must be

* deterministic: the same observation gives the same decision, whatever was asked before and in between;
* pure: it reads no clock, opens no file or connection and draws no random numbers;
* harmless: the frozen observation is as it was;
* bounded: no longer drafts, other proposers, fewer bits or less protected than the tenant's file allows;
* explained: one line of text, without a full stop;
* fast: at most `MAX_CALLS` calls of functions a decision, which takes well under 50 microseconds.
"""

from __future__ import annotations

import builtins
import gc
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from types import FrameType
from typing import Any, NoReturn

import msgspec
from msgspec.structs import replace

from .base import Decision, GuardVerdict, Observation, Policy
from .bounds import CacheBounds, PlanBounds, Protection, ScheduleBounds, SpeculationBounds, named_plan
from .wrappers import within_bounds

MAX_CALLS = 150
"""Calls of Python and C functions; one takes 0.05 to 0.2 microseconds."""

FORBIDDEN: tuple[tuple[Any, str], ...] = (
    (builtins, "open"),
    (random, "random"),
    (socket, "socket"),
    (time, "monotonic"),
    (time, "perf_counter"),
    (time, "time"),
    (time, "time_ns"),
)
"""What a pure function has no use for. (`datetime.now` cannot be watched; it is forbidden all the same.)"""


class PolicyProblem(AssertionError):
    """What a policy did wrong, and for which observation."""


def check_policy(make: Callable[[], Policy], observations: Sequence[Observation] | None = None) -> None:
    """Raise `PolicyProblem` if the policy that `make` makes breaks one of the rules above."""
    seen = list(sample_observations()) if observations is None else observations
    policy, twin = make(), make()
    decisions = [_check_one(policy, each) for each in seen]
    for each, decision in reversed(list(zip(seen, decisions, strict=True))):
        for again in (policy.decide(each), twin.decide(each)):
            _require(again == decision, f"decided {decision} at first, then {again}", each)
        num_calls = count_calls(partial(policy.decide, each))
        _require(num_calls <= MAX_CALLS, f"made {num_calls} calls, more than {MAX_CALLS}", each)


def sample_observations() -> Iterator[Observation]:
    """Every combination of bounds with what may be observed, one thing at a time."""
    base = Observation(tenant_id="acme", model="smollm2", hour=12.0)
    changes: list[dict[str, Any]] = [{}]
    values: dict[str, tuple[Any, ...]] = {
        "policy": ("fixed", "no such policy"),
        "service_class": ("interactive", "batch", "of somebody's own"),
        "kind": ("text",),
        "num_prompt_tokens": (0, 1, 511, 3000, 10**6),
        "cache_pressure": (0.5, 0.95, 1.0),
        "load": (1, 1000),
        "acceptance": (0.0, 0.1, 0.5, 0.99, 1.0),
        "quality_loss": (-0.01, 0.0, 0.03, 5.0),
        "longest_draft": (0, 1, 64),
        "drafters": ((), ("ngram",)),
        "hour": (0.0, 23.99),
        "override": ("baseline", "fixed"),
        "max_draft": (0, 2),
        "cache_format": ("k16v16", "k4v4"),
        "protect": (Protection(sinks=0, recent=0), Protection(recent=500)),
        "demotes_at_once": (True,),
        "max_context": (100,),
        "has_seed": (True,),
        "verdicts": ((GuardVerdict("speculation", "too slow"),),),
    }
    changes += [{name: value} for name, options in values.items() for value in options]
    changes.append({"num_prompt_tokens": 20_000, "cache_pressure": 1.0, "acceptance": 0.9, "load": 64})
    for bounds, change in product(sample_bounds(), changes):
        yield replace(base, bounds=bounds, **change)


def sample_bounds() -> Iterator[PlanBounds]:
    """Bounds from nothing to everything."""
    drafts = (
        SpeculationBounds(),
        SpeculationBounds(max_draft=1),
        SpeculationBounds(max_draft=8, min_gain=0.05, proposers=("suffix", "ngram")),
        SpeculationBounds(enabled=False, max_draft=8),
    )
    caches = (
        CacheBounds(),
        CacheBounds(format="k8v8", max_context=4096),
        CacheBounds(format="k4v4"),
        CacheBounds(format="k8v4", protect=Protection(sinks=8, recent=256), demote="pressure"),
        CacheBounds(format="k4v4", max_loss=0.002),
    )
    for speculation, cache in product(drafts, caches):
        yield PlanBounds(speculation=speculation, cache=cache)
    schedule = ScheduleBounds(from_hour=22, to_hour=6, max_load=8)
    yield PlanBounds(speculation=drafts[2], cache=caches[3], schedule=schedule, reproducible=True)


def count_calls(work: Callable[[], object]) -> int:
    """Functions that are called on the way: the same number on every machine, unlike a time."""
    num_calls = 0

    def count(_: FrameType, event: str, __: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    before = sys.getprofile()
    with _uncollected():
        sys.setprofile(count)
        try:
            work()
        finally:
            sys.setprofile(before)
    return num_calls


@contextmanager
def _uncollected() -> Iterator[None]:
    """No collection of garbage, whose finalizers do anything in the midst of whatever happens to run."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_one(policy: Policy, observation: Observation) -> Decision:
    before = msgspec.json.encode(observation)
    with _uncollected(), _watched(observation):
        decision = policy.decide(observation)
    _require(msgspec.json.encode(observation) == before, "changed the observation", observation)
    _require(isinstance(decision, Decision), f"returned {decision!r}, which is no Decision", observation)
    plan = named_plan(decision.plan.cache, decision.plan.speculation)
    bounded = within_bounds(plan, observation.bounds, observation.quality_loss)
    _require(bounded == plan, f"went beyond the bounds with {plan}", observation)
    reason = decision.reason
    sentence = bool(reason.strip()) and "\n" not in reason and not reason.endswith(".")
    _require(sentence, f"gave {reason!r} as the reason, not one sentence without a full stop", observation)
    return decision


@contextmanager
def _watched(observation: Observation) -> Iterator[None]:
    """Within the block whatever is in `FORBIDDEN` raises."""
    originals = [(place, name, getattr(place, name)) for place, name in FORBIDDEN]

    def forbid(name: str) -> Callable[..., NoReturn]:
        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise PolicyProblem(f"called {name}, which no pure function does, for {observation}")

        return refuse

    try:
        for place, name in FORBIDDEN:
            setattr(place, name, forbid(name))
        yield
    finally:
        for place, name, original in originals:
            setattr(place, name, original)


def _require(holds: bool, problem: str, observation: Observation) -> None:
    if not holds:
        raise PolicyProblem(f"the policy {problem}, for {observation}")
