"""Policies: what each decides, what all of them keep to, and who may add one."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import EntryPoint
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from surefoot.backends.types import BASELINE_PLAN, CachePlan, ServingPlan, SpeculationPlan
from surefoot.policies.adaptive import AdaptivePolicy
from surefoot.policies.base import Decision, GuardVerdict, Observation, Policy
from surefoot.policies.baseline import BaselinePolicy
from surefoot.policies.bounds import (
    FORMATS,
    CacheBounds,
    Losses,
    PlanBounds,
    Protection,
    ScheduleBounds,
    SpeculationBounds,
    named_plan,
)
from surefoot.policies.fixed import FixedPolicy
from surefoot.policies.recent_loss import MEMORY, RecentLoss, expected_loss
from surefoot.policies.registry import BUILT_IN, PolicyError, load_policies, serving_policy
from surefoot.policies.replay import RecordError, read_records, replay
from surefoot.policies.schedule import SchedulePolicy
from surefoot.policies.testkit import PolicyProblem, check_policy, count_calls, sample_observations
from surefoot.policies.wrappers import Clamp, within_bounds

BOUNDS = PlanBounds(
    speculation=SpeculationBounds(max_draft=8, proposers=("suffix", "ngram"), min_gain=0.02),
    cache=CacheBounds(format="k8v4"),
)
SMALL = replace(BOUNDS, cache=CacheBounds(format="k4v4"))
PRESSURE = replace(BOUNDS, cache=CacheBounds(format="k4v4", demote="pressure"))
LIMITED = replace(BOUNDS, cache=CacheBounds(format="k4v4", max_loss=0.004))
BUSY: dict[str, Any] = {"cache_pressure": 0.8, "num_prompt_tokens": 1000, "bounds": LIMITED}
SEEN = Observation(tenant_id="acme", model="m", bounds=BOUNDS)


@pytest.mark.parametrize("name", BUILT_IN)
def test_our_policies_pass_the_test_kit(name: str) -> None:
    """Each built-in policy is pure, bounded, explained and quick, bare and as it serves."""
    check_policy(BUILT_IN[name])
    named = [replace(each, policy=name) for each in sample_observations()]
    check_policy(lambda: serving_policy(load_policies([])), named)


def test_without_bounds_every_policy_is_the_baseline() -> None:
    """What a tenant's file does not allow no policy does."""
    for make in BUILT_IN.values():
        for seen in sample_observations():
            assert make().decide(replace(seen, bounds=PlanBounds())).plan == BASELINE_PLAN


class Greedy:
    """Wants the most of everything, whatever is allowed."""

    def __init__(self, cache_format: str = "k4v4") -> None:
        self._cache_format = cache_format

    def decide(self, observation: Observation) -> Decision:
        """Nothing that a tenant allows."""
        speculation = SpeculationPlan(max_draft=64, proposers=("draft", "oracle", "ngram"))
        plan = ServingPlan(
            name="my\nplan", cache=CachePlan(format=self._cache_format), speculation=speculation
        )
        return Decision(plan, "more is more")


@pytest.mark.parametrize("cache_format", ["k4v4", "k1v1"])
def test_clamp_cuts_to_the_bounds(cache_format: str) -> None:
    """What serves is never beyond the tenant's file, nor what nobody has heard of; it has the name of what it
    does, and says what was cut.
    """
    decision = Clamp(Greedy(cache_format)).decide(SEEN)
    assert decision.plan == ServingPlan(
        name="k8v4+draft8",
        cache=CachePlan(format="k8v4"),
        speculation=SpeculationPlan(max_draft=8, proposers=("ngram",), min_gain=0.02),
    )
    assert decision.reason == (
        f"more is more; but {cache_format}+draft64 is more than the tenant's file allows, so k8v4+draft8"
    )


@pytest.mark.parametrize(
    ("max_draft", "name"), [(None, "draft8"), (9, "draft8"), (3, "draft3"), (0, "baseline")]
)
def test_a_request_only_lowers(max_draft: int | None, name: str) -> None:
    """What a request wants of drafts is a bound like the file's: it shortens them, and the reason says so."""
    bounds = replace(BOUNDS, cache=CacheBounds())
    decision = Clamp(FixedPolicy()).decide(replace(SEEN, bounds=bounds, max_draft=max_draft))
    assert decision.plan.name == name
    assert ("the request wants drafts of" in decision.reason) == (name != "draft8")


NO_DRAFTS = BASELINE_PLAN.speculation


@pytest.mark.parametrize(
    ("longest", "drafters", "name", "proposers"),
    [
        (4, None, "draft4", ("draft", "ngram")),
        (64, None, "draft8", ("draft", "ngram")),
        (0, None, "baseline", NO_DRAFTS.proposers),
        (None, ("ngram", "suffix"), "draft8", ("ngram",)),
        (None, ("suffix",), "baseline", NO_DRAFTS.proposers),
        (4, ("ngram",), "draft4", ("ngram",)),
    ],
)
def test_a_plan_is_what_the_server_drafts(
    longest: int | None, drafters: tuple[str, ...] | None, name: str, proposers: tuple[str, ...]
) -> None:
    """A file may allow longer drafts than the server makes, or a proposer that it lacks: the plan is named
    after what is done, and the reason says so.
    """
    bounds = PlanBounds(speculation=SpeculationBounds(max_draft=8, proposers=("draft", "ngram")))
    seen = replace(SEEN, bounds=bounds, longest_draft=longest, drafters=drafters)
    decision = Clamp(FixedPolicy()).decide(seen)
    assert (decision.plan.name, decision.plan.speculation.proposers) == (name, proposers)
    assert ("draft8 is more than the server drafts" in decision.reason) == (name != "draft8")


KEPT = Protection(sinks=8, recent=256)


@pytest.mark.parametrize(
    ("cache", "name", "plan"),
    [
        (CacheBounds(format="k4v4"), "k4v4", CachePlan(format="k4v4")),
        (CacheBounds(format="k8v4", demote="eager"), "k8v4", CachePlan(format="k8v4")),
        (
            CacheBounds(format="k4v4", demote="pressure"),
            "k4v4-pressure",
            CachePlan(format="k4v4", demote="pressure"),
        ),
        (
            CacheBounds(format="k8v4", protect=KEPT, demote="pressure", max_context=900),
            "k8v4-sinks8-recent256-pressure",
            CachePlan(format="k8v4", sinks=8, recent=256, demote="pressure", max_context=900),
        ),
        (
            CacheBounds(format="k8v8", protect=Protection(sinks=0)),
            "k8v8-sinks0",
            CachePlan(format="k8v8", sinks=0),
        ),
        (CacheBounds(protect=KEPT, demote="pressure"), "baseline", CachePlan()),
        (CacheBounds(max_context=900), "baseline", CachePlan(max_context=900)),
    ],
)
def test_the_files_cache_becomes_a_plan(cache: CacheBounds, name: str, plan: CachePlan) -> None:
    """All of `[cache]` reaches the plan, whose name tells what is not as usual; equal plans are equal."""
    decision = Clamp(FixedPolicy()).decide(replace(SEEN, bounds=PlanBounds(cache=cache)))
    assert (decision.plan.name, decision.plan.cache) == (name, plan)
    assert decision.steps == ()


@pytest.mark.parametrize("policy", BUILT_IN)
def test_the_longest_context_holds_for_every_policy(policy: str) -> None:
    """A limit on contexts is in every plan, the baseline too: the file's, or the request's if it is lower."""
    serving = serving_policy(load_policies([]))
    seen = replace(SEEN, policy=policy, bounds=replace(BOUNDS, cache=CacheBounds(max_context=900)))
    for wish, longest in ((None, 900), (100, 100), (1000, 900)):
        assert serving.decide(replace(seen, max_context=wish)).plan.cache.max_context == longest


@pytest.mark.parametrize(
    ("wish", "name"),
    [(None, "k8v4+draft8"), ("k4v4", "k8v4+draft8"), ("k8v8", "k8v8+draft8"), ("k16v16", "draft8")],
)
def test_a_request_only_adds_bits(wish: str | None, name: str) -> None:
    """A request's format is a bound like the file's: it makes a plan more precise, never less."""
    decision = Clamp(FixedPolicy()).decide(replace(SEEN, cache_format=wish))
    assert decision.plan.name == name
    assert (f"the request wants {wish} at least" in decision.reason) == (name != "k8v4+draft8")
    both = Clamp(FixedPolicy()).decide(replace(SEEN, cache_format="k8v8", max_draft=1))
    assert both.reason.endswith("the request wants k8v8 at least and drafts of 1 at most, so k8v8+draft1")


def test_a_request_only_adds_protection() -> None:
    """What it wants protected is a bound like the file's; it can leave the demotion by pressure that the file
    allows, and have none that it does not allow.
    """
    bounds = replace(PRESSURE, cache=CacheBounds(format="k4v4", protect=KEPT, demote="pressure"))
    seen = replace(SEEN, bounds=bounds, max_draft=0)
    for wish, name in (
        (Protection(), "sinks8-recent256"),
        (Protection(sinks=0, recent=512), "sinks8-recent512"),
        (Protection(sinks=9, recent=1), "sinks9-recent256"),
    ):
        decision = Clamp(FixedPolicy()).decide(replace(seen, protect=wish))
        assert decision.plan.name == f"k4v4-{name}-pressure"
    decision = Clamp(FixedPolicy()).decide(replace(seen, demotes_at_once=True))
    assert decision.plan.name == "k4v4-sinks8-recent256"
    assert "the request wants k4v4-sinks8-recent256 at least" in decision.reason
    everything = replace(seen, protect=Protection(recent=999), demotes_at_once=True, bounds=PlanBounds())
    assert Clamp(FixedPolicy()).decide(everything) == FixedPolicy().decide(everything)


MUST_REPEAT = pytest.mark.parametrize(
    ("has_seed", "why"),
    [(True, "the request has a seed"), (False, "the tenant's file says reproducible")],
)


@pytest.mark.parametrize("policy", ["fixed", "adaptive", "schedule"])
@MUST_REPEAT
def test_what_must_repeat_is_never_demoted_by_pressure(policy: str, has_seed: bool, why: str) -> None:
    """A seed, or a reproducible tenant, gets the format at once, and the reason says why."""
    serving = serving_policy(load_policies([]))
    seen = replace(SEEN, policy=policy, bounds=PRESSURE, num_prompt_tokens=5000)
    assert serving.decide(seen).plan.name == "k4v4-pressure+draft8"
    bounds = replace(PRESSURE, reproducible=not has_seed)
    decision = serving.decide(replace(seen, has_seed=has_seed, bounds=bounds))
    assert decision.plan.name == "k4v4+draft8"
    assert decision.reason.endswith(
        f"; demoted at once and as on an idle server, since {why}, so k4v4+draft8"
    )
    assert decision.steps[-1].rule == "repeatable"


@pytest.mark.parametrize("policy", BUILT_IN)
@MUST_REPEAT
def test_what_must_repeat_has_one_plan(policy: str, has_seed: bool, why: str) -> None:
    """With a seed, or for a reproducible tenant, no load and no pressure changes the cache's format."""
    serving = serving_policy(load_policies([]))
    bounds = replace(PRESSURE, schedule=ScheduleBounds(max_load=8), reproducible=not has_seed)
    seen = replace(SEEN, policy=policy, num_prompt_tokens=1000, bounds=bounds, has_seed=has_seed)
    formats = {
        serving.decide(replace(seen, cache_pressure=pressure, load=load, quality_loss=lost)).plan.cache
        for pressure in (0.0, 0.8, 1.0)
        for load in (0, 1000)
        for lost in (None, 0.0, 0.03)
    }
    assert len(formats) == 1
    full = replace(seen, bounds=replace(bounds, cache=CacheBounds()))
    assert why not in serving.decide(full).reason


def test_a_policy_cannot_protect_less() -> None:
    """What a policy of somebody's own leaves unprotected, or demotes by pressure, is cut to the file's."""
    loose = CachePlan(format="k8v4", sinks=0, recent=1, demote="pressure")
    firm = CachePlan(format="k8v4", sinks=16, recent=512)
    bounds = PlanBounds(cache=CacheBounds(format="k8v4", protect=KEPT))
    assert within_bounds(named_plan(loose, SpeculationPlan()), bounds).name == "k8v4-sinks8-recent256"
    assert within_bounds(named_plan(firm, SpeculationPlan()), bounds).cache == firm


@pytest.mark.parametrize(
    ("max_loss", "lasting"),
    [(None, "k4v4"), (0.02, "k4v4"), (0.002, "k8v4"), (0.0008, "k8v4"), (0.0005, "k8v8"), (0.0, "k16v16")],
)
def test_a_limit_on_loss_bounds_every_policy(max_loss: float | None, lasting: str) -> None:
    """Under `max_loss` every policy is cut to the least precise format that keeps it for all requests, until
    it is known that less was lost, then the next one at most; `fixed` is there of itself.
    """
    bounds = PlanBounds(cache=CacheBounds(format="k4v4", max_loss=max_loss))
    seen = replace(SEEN, bounds=bounds)
    assert bounds.cache.lasting == FixedPolicy().decide(seen).plan.cache.format == lasting
    assert Clamp(Greedy()).decide(seen).plan.cache.format == lasting
    spent = 0.0 if max_loss is None else 0.95 * max_loss
    assert Clamp(Greedy()).decide(replace(seen, quality_loss=spent)).plan.cache.format == lasting
    with_room = Clamp(Greedy()).decide(replace(seen, quality_loss=0.0)).plan.cache.format
    if max_loss and lasting != "k4v4":
        assert FORMATS.index(with_room) == FORMATS.index(lasting) + 1
    else:
        assert with_room == lasting


def test_what_formats_lose_can_be_measured_anew() -> None:
    """An operator's own figures take the place of ours."""
    cache = CacheBounds(format="k4v4", max_loss=0.002, loss=Losses(k4v4=0.0015))
    assert cache.lasting == "k4v4"
    assert replace(cache, loss=Losses(k8v4=0.003)).lasting == "k8v8"


def test_recent_loss_is_a_mean_that_scores_correct() -> None:
    """A plan counts when it is chosen; what answers turned out to lose scales the mean; old answers fade."""
    recent = RecentLoss()
    assert recent.get("a") is None
    recent.choose("a", 0.009)
    recent.choose("a", 0.001)
    assert recent.get("a") == pytest.approx(0.005)
    recent.score("a", 0.001, 0.003)
    assert recent.get("a") == pytest.approx(0.015)
    assert recent.get("b") is None
    for _ in range(10 * MEMORY):
        recent.choose("a", 0.0)
    assert recent.get("a") == pytest.approx(0.0, abs=1e-5)
    recent.choose("b", 0.0)
    recent.score("b", 0.0, 0.004)
    assert recent.get("b") == 0.004


def test_what_is_protected_loses_nothing() -> None:
    """A prompt within sinks and recent window costs nothing in any format; an unknown one may."""
    plan = CachePlan(format="k4v4")
    assert [expected_loss(plan, Losses(), length) for length in (68, 69, None)] == [0.0, 0.009, 0.009]


def test_fixed_takes_all() -> None:
    """`fixed` is the bounds, and disabled drafts are none."""
    assert FixedPolicy().decide(SEEN).plan.name == "k8v4+draft8"
    off = replace(BOUNDS, speculation=replace(BOUNDS.speculation, enabled=False))
    assert FixedPolicy().decide(replace(SEEN, bounds=off)).plan.name == "k8v4"


@pytest.mark.parametrize(
    ("schedule", "hour", "load", "inside"),
    [
        (ScheduleBounds(), 3.0, 10**6, True),
        (ScheduleBounds(from_hour=9, to_hour=17), 9.0, 0, True),
        (ScheduleBounds(from_hour=9, to_hour=17), 17.0, 0, False),
        (ScheduleBounds(from_hour=22, to_hour=6), 23.5, 0, True),
        (ScheduleBounds(from_hour=22, to_hour=6), 5.9, 0, True),
        (ScheduleBounds(from_hour=22, to_hour=6), 6.0, 0, False),
        (ScheduleBounds(from_hour=7, to_hour=7), 1.0, 0, True),
        (ScheduleBounds(max_load=8), 1.0, 8, True),
        (ScheduleBounds(max_load=8), 1.0, 9, False),
    ],
)
def test_schedule(schedule: ScheduleBounds, hour: float, load: int, inside: bool) -> None:
    """`schedule` optimises within its hours, which may pass midnight, and within its load."""
    seen = replace(SEEN, bounds=replace(BOUNDS, schedule=schedule), hour=hour, load=load)
    assert (SchedulePolicy().decide(seen).plan.name != "baseline") == inside


@pytest.mark.parametrize(
    ("observed", "plan", "word"),
    [
        ({"num_prompt_tokens": 1000}, "k8v4+draft8", "no rule is against"),
        ({"num_prompt_tokens": 1000, "bounds": SMALL}, "k8v4+draft8", "pressure 0.00 is below 0.1"),
        ({"num_prompt_tokens": 1000, "bounds": SMALL, "cache_pressure": 0.1}, "k4v4+draft8", "no rule is"),
        (
            {
                "num_prompt_tokens": 1000,
                "bounds": SMALL,
                "cache_pressure": 0.15,
                "service_class": "interactive",
            },
            "k8v4+draft8",
            "below 0.2",
        ),
        (
            {"num_prompt_tokens": 1000, "bounds": SMALL, "service_class": "batch"},
            "k4v4+draft8",
            "no rule is",
        ),
        ({"num_prompt_tokens": 5000, "bounds": SMALL}, "k4v4+draft8", "no rule is against"),
        ({"num_prompt_tokens": 100, "cache_pressure": 1.0}, "draft8", "fewer than 128"),
        ({"cache_pressure": 1.0, "acceptance": 0.5}, "k8v4+draft3", "beyond 3 useless"),
        ({"cache_pressure": 1.0, "acceptance": 0.0}, "k8v4+draft1", "beyond 1 useless"),
        ({"cache_pressure": 1.0, "acceptance": 1.0}, "k8v4+draft8", "no rule is against"),
        ({"cache_pressure": 1.0, "quality_loss": 0.03}, "k8v8+draft8", "so k8v8 at least"),
        ({"cache_pressure": 1.0, "quality_loss": 0.06}, "draft8", "all bits"),
        ({"num_prompt_tokens": 1000, "bounds": PRESSURE}, "k4v4-pressure+draft8", "no rule is against"),
        ({"num_prompt_tokens": 100, "bounds": PRESSURE}, "draft8", "fewer than 128"),
        (
            {"num_prompt_tokens": 1000, "bounds": PRESSURE, "has_seed": True},
            "k8v4-pressure+draft8",
            "below 0.1",
        ),
        ({**BUSY, "quality_loss": None}, "k8v4+draft8", "unknown loss and max_loss 0.004 leave k8v4"),
        ({**BUSY, "quality_loss": 0.001}, "mixed+draft8", "0.0010 nats lost lately leave room for mixed"),
        ({**BUSY, "quality_loss": 0.003}, "k8v4+draft8", "for prompts of 1536 tokens or more"),
        (
            {**BUSY, "quality_loss": 0.003, "num_prompt_tokens": 2000},
            "mixed+draft8",
            "0.0030 nats lost lately leave room for mixed",
        ),
        ({**BUSY, "quality_loss": 0.0037}, "k8v4+draft8", "0.0037 nats lost lately and max_loss 0.004"),
        ({**BUSY, "quality_loss": 0.005}, "k8v8+draft8", "more than 0.004, so k8v8 at least"),
        ({**BUSY, "quality_loss": 0.01}, "draft8", "more than twice 0.004, so all bits"),
        (
            {"verdicts": (GuardVerdict("speculation", "too slow"),)},
            "k8v4",
            "holds speculation back: too slow",
        ),
        ({"verdicts": (GuardVerdict("cache", "loops"),)}, "draft8", "holds cache back: loops"),
    ],
)
def test_adaptive(observed: dict[str, Any], plan: str, word: str) -> None:
    """Each rule of `adaptive` takes back what it should, and the reason names it."""
    decision = AdaptivePolicy().decide(replace(SEEN, **observed))
    assert decision.plan.name == plan
    assert word in decision.reason
    assert [step.rule for step in decision.steps] == [
        "guard",
        "pressure",
        "prompt_length",
        "max_loss",
        "acceptance",
        "quality",
    ]


def test_an_override_goes_before_the_policy() -> None:
    """What an operator forces holds whatever the tenant's policy says, and stays within the bounds."""
    serving = serving_policy(load_policies([]))
    for policy, override, plan in (
        ("fixed", "baseline", "baseline"),
        ("baseline", "fixed", "k8v4+draft8"),
        ("fixed", None, "k8v4+draft8"),
    ):
        decision = serving.decide(replace(SEEN, policy=policy, override=override))
        assert decision.plan.name == plan
        assert ("an operator forces" in decision.reason) == (override is not None)


class Broken:
    """Fails always."""

    def decide(self, observation: Observation) -> Decision:
        """Nothing."""
        raise ZeroDivisionError("secret")


def test_a_policy_that_fails_is_the_baseline() -> None:
    """An error in somebody's module costs the optimisation, not the request; the reason names its type."""
    decision = serving_policy({"broken": Broken()}).decide(replace(SEEN, policy="broken"))
    assert decision.plan == BASELINE_PLAN
    assert decision.reason == "the policy broken failed with ZeroDivisionError, so baseline"


class Counting:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.num_asked = 0

    def decide(self, observation: Observation) -> Decision:
        """Another reason every time."""
        self.num_asked += 1
        return Decision(BASELINE_PLAN, f"asked {self.num_asked} times")


class Clocked:
    """Looks at the clock."""

    def decide(self, observation: Observation) -> Decision:
        """The baseline, but not purely."""
        return Decision(BASELINE_PLAN, "it is early" if time.time() < 1 else "it is late")


class Random:
    """Draws lots."""

    def decide(self, observation: Observation) -> Decision:
        """The baseline, but not purely."""
        return Decision(BASELINE_PLAN, f"the lot is {random.random()}")


class Silent:
    """Does not say why."""

    def decide(self, observation: Observation) -> Decision:
        """The baseline."""
        return Decision(BASELINE_PLAN, " ")


class Slow:
    """Calls too many functions."""

    def decide(self, observation: Observation) -> Decision:
        """The baseline, after a while."""
        return Decision(BASELINE_PLAN, f"the sum is {sum(abs(each) for each in range(200))}")


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (Greedy, "went beyond the bounds"),
        (Counting, "decided"),
        (Clocked, "called time"),
        (Random, "called random"),
        (Silent, "as the reason"),
        (Slow, "calls, more than"),
    ],
)
def test_the_test_kit_finds(make: type[Policy], word: str) -> None:
    """Each way to be no good policy is found and named."""
    with pytest.raises(PolicyProblem, match=word):
        check_policy(make)


def test_a_decision_takes_few_calls() -> None:
    """What serves calls at most 150 functions for a request, so that 50 microseconds are plenty."""
    serving = serving_policy(load_policies([]))
    seen = [replace(each, policy="adaptive") for each in sample_observations()]
    calls = [count_calls(partial(serving.decide, each)) for each in seen]
    assert max(calls) <= 150


class Litter:
    """A cycle whose finalizer a collection of garbage calls, which may do what a policy may not."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.time()


def drop_litter() -> None:
    """Work that leaves garbage behind."""
    for _ in range(20):
        Litter()


def test_garbage_of_others_counts_no_calls() -> None:
    """A collection that falls into the work would call finalizers; they are nothing of the work's."""
    with garbage_collected_often():
        with_litter = count_calls(drop_litter)
    assert gc.isenabled()
    assert with_litter == count_calls(drop_litter)


class Littering:
    """Leaves garbage behind, which is nobody's business."""

    def decide(self, observation: Observation) -> Decision:
        """The baseline."""
        drop_litter()
        return Decision(BASELINE_PLAN, "the floor is not swept")


def test_finalizers_are_not_the_policys() -> None:
    """What a finalizer does in a collection that falls into a decision is not held against the policy."""
    with garbage_collected_often():
        check_policy(Littering, [SEEN])


@contextmanager
def garbage_collected_often() -> Iterator[None]:
    """At nearly every object that is made."""
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def entry_point(name: str, value: str) -> EntryPoint:
    """An entry point as an installed package would have it."""
    return EntryPoint(name, value, "surefoot.policies")


def test_packages_add_policies() -> None:
    """A policy of an entry point is found by its name and serves like ours."""
    policies = load_policies([entry_point("night", "surefoot.policies.schedule:SchedulePolicy")])
    assert set(policies) == {*BUILT_IN, "night"}
    assert serving_policy(policies).decide(replace(SEEN, policy="night")).plan.name == "k8v4+draft8"
    assert set(load_policies()) >= set(BUILT_IN)


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("fixed", "surefoot.policies.fixed:FixedPolicy", "two policies 'fixed'"),
        ("mine", "no_such_package:Mine", r"'mine' \(no_such_package:Mine\) cannot be made: ModuleNotFound"),
        ("mine", "surefoot.policies.base:Observation", "cannot be made: TypeError"),
        ("mine", "builtins:dict", "no method 'decide'"),
    ],
)
def test_packages_with_faults_are_refused(name: str, value: str, word: str) -> None:
    """A policy that cannot be used is refused at start, by its entry point."""
    with pytest.raises(PolicyError, match=word):
        load_policies([entry_point(name, value)])


def test_replay_says_what_would_have_changed() -> None:
    """Recorded requests are asked again: the plan of the log stands against that of another policy."""
    planned = {"event": "request.planned", "plan": "baseline", "observation": msgspec.to_builtins(SEEN)}
    lines = [
        msgspec.json.encode(planned),
        b'{"event": "request.finished", "plan": "baseline"}',
        b"",
        msgspec.json.encode(replace(SEEN, policy="fixed")),
    ]
    serving = serving_policy(load_policies([]))
    result = replay(read_records(lines), serving, "fixed")
    assert (result.num_requests, result.changes) == (2, {("baseline", "k8v4+draft8"): 1})
    assert "the policy is fixed" in result.reasons["baseline", "k8v4+draft8"]
    same = replay(read_records(lines), serving, None)
    assert (same.num_requests, same.changes) == (2, {})


@pytest.mark.parametrize("line", [b"{", b'{"tenant_id": "a"}', b'{"observation": {"tenant_id": 1}}'])
def test_a_bad_line_is_named(line: bytes) -> None:
    """A line that begins an object and is none, or has no observation, is refused by its number."""
    with pytest.raises(RecordError, match="line 2: "):
        list(read_records([b"{}", line]))


def test_baseline_is_what_it_says() -> None:
    """`baseline` ignores everything."""
    assert {BaselinePolicy().decide(each).plan for each in sample_observations()} == {BASELINE_PLAN}
