"""The policy that starts from all that the tenant allows and lets each rule take some of it back.

A rule only ever lowers: shorter drafts, more bits. So their order does not matter, what they say can be read
one by one, and the plan lies between the baseline and the tenant's bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from .base import Decision, Observation, Step
from .bounds import FORMATS, PRECISION, bounded_plan, more_precise

PRECISE, LEAST_PRECISE = FORMATS[0], FORMATS[-1]
FREE = "k8v4"
"""The least precise format whose loss could hardly be told from none: it needs no pressure to be taken."""
NO_LIMIT = 1_000_000
SHORT_PROMPT = 128
"""Fewer tokens are nearly all protected, so that fewer bits bring next to nothing."""
HEAVY_PROMPT = 1536
"""So many hold enough of the cache to have the last of what may be lost."""
LONG_PROMPT = 4096
"""So many take so much of the cache that fewer bits pay at any pressure."""
PRESSURE_BY_CLASS: Mapping[str, float] = {"interactive": 0.2, "standard": 0.1, "batch": 0.0}
"""From which cache pressure on a class gives up bits that cost quality: those that wait for nobody first."""
SPARED = 0.6
"""The share of a limit on loss that prompts of any length may use up."""
WORTHWHILE = 0.1
"""A drafted token that is reached and accepted less often than this is not worth its row."""
USUAL_MAX_LOSS = 0.02
"""Nats per token, where the tenant's file has no limit."""


class Opinion(Struct, frozen=True):
    """How far one rule would go at most, and why."""

    says: str
    max_draft: int = NO_LIMIT
    cache_format: str = LEAST_PRECISE


Rule = Callable[[Observation], Opinion]


def guard(seen: Observation) -> Opinion:
    """Hold back what a guard holds back."""
    if not seen.verdicts:
        return Opinion("no guard holds anything back")
    held = {verdict.optimisation: verdict.reason for verdict in seen.verdicts}
    return Opinion(
        "; ".join(f"a guard holds {name} back: {reason}" for name, reason in held.items()),
        max_draft=0 if "speculation" in held else NO_LIMIT,
        cache_format=PRECISE if "cache" in held else LEAST_PRECISE,
    )


def pressure(seen: Observation) -> Opinion:
    """Give up only what costs next to nothing while the cache has room for this class, unless the prompt is
    long.

    Where the engine demotes under pressure, it waits for that by itself, and with what it sees later.
    """
    if seen.bounds.cache.demote == "pressure" and not seen.must_repeat:
        return Opinion("bits are given up under pressure only, whatever the pressure now")
    least = PRESSURE_BY_CLASS.get(seen.service_class, PRESSURE_BY_CLASS["standard"])
    if seen.cache_pressure >= least:
        return Opinion(f"cache pressure {seen.cache_pressure:.2f} is {least:g} or more for this class")
    if (seen.num_prompt_tokens or 0) >= LONG_PROMPT:
        return Opinion(f"{seen.num_prompt_tokens} prompt tokens are {LONG_PROMPT} or more, at any pressure")
    says = f"cache pressure {seen.cache_pressure:.2f} is below {least:g} for class {seen.service_class}"
    return Opinion(f"{says}, so {FREE} at least", cache_format=FREE)


def prompt_length(seen: Observation) -> Opinion:
    """Keep all bits of a short prompt."""
    if seen.num_prompt_tokens is None:
        return Opinion("the prompt's length is not known")
    if seen.num_prompt_tokens < SHORT_PROMPT:
        says = f"{seen.num_prompt_tokens} prompt tokens are fewer than {SHORT_PROMPT}, so all bits"
        return Opinion(says, cache_format=PRECISE)
    return Opinion(f"{seen.num_prompt_tokens} prompt tokens are enough for fewer bits")


def max_loss(seen: Observation) -> Opinion:
    """Keep what is lost in the mean within the tenant's limit, and the last of it for prompts that fewer bits
    do most for.
    """
    cache, lost = seen.bounds.cache, seen.quality_loss
    if cache.max_loss is None:
        return Opinion("the tenant's file has no max_loss")
    least, lasting = seen.least_precise, cache.lasting
    known = "an unknown loss" if lost is None else f"{lost:.4f} nats lost lately"
    if lost is None or least == lasting:
        return Opinion(f"{known} and max_loss {cache.max_loss:g} leave {least}", cache_format=least)
    is_heavy = seen.num_prompt_tokens is None or seen.num_prompt_tokens >= HEAVY_PROMPT
    if is_heavy or lost <= SPARED * cache.max_loss:
        return Opinion(f"{known} leave room for {least} in max_loss {cache.max_loss:g}", cache_format=least)
    says = f"what max_loss {cache.max_loss:g} still leaves is for prompts of {HEAVY_PROMPT} tokens or more"
    return Opinion(says, cache_format=lasting)


def acceptance(seen: Observation) -> Opinion:
    """Draft as far as a token still has a chance, and at least one, since nothing else shows a recovery."""
    if seen.acceptance is None:
        return Opinion("acceptance is not known yet, so as far as allowed")
    if seen.acceptance >= 1:
        return Opinion("every draft was accepted, so as far as allowed")
    rate = max(seen.acceptance, 1e-6)
    longest = max(1, int(math.log(WORTHWHILE) / math.log(rate)))
    return Opinion(
        f"acceptance {seen.acceptance:.2f} makes drafts beyond {longest} useless", max_draft=longest
    )


def quality(seen: Observation) -> Opinion:
    """Give bits back where more was lost than may be."""
    cache, lost = seen.bounds.cache, seen.quality_loss
    limit = USUAL_MAX_LOSS if cache.max_loss is None else cache.max_loss
    if lost is None:
        return Opinion("the loss of quality is not known yet")
    if lost > 2 * limit:
        says = f"{lost:.4f} nats lost are more than twice {limit:g}, so all bits"
        return Opinion(says, cache_format=PRECISE)
    if lost > limit:
        better = FORMATS[max(PRECISION[cache.lasting] - 1, 0)]
        says = f"{lost:.4f} nats lost are more than {limit:g}, so {better} at least"
        return Opinion(says, cache_format=better)
    return Opinion(f"{lost:.4f} nats lost are within {limit:g}")


RULES: tuple[Rule, ...] = (guard, pressure, prompt_length, max_loss, acceptance, quality)


class AdaptivePolicy:
    """The tenant's bounds, cut by each of the rules."""

    def __init__(self, rules: Sequence[Rule] = RULES) -> None:
        self._rules = tuple(rules)

    def decide(self, observation: Observation) -> Decision:
        """What all rules agree to; the reason has those that took something back."""
        bounds = observation.bounds
        max_draft, cache_format = bounds.speculation.ceiling, str(bounds.cache.format)
        steps, cuts = [], []
        for rule in self._rules:
            opinion = rule(observation)
            steps.append(Step(rule.__name__, opinion.says))
            lowered = (min(max_draft, opinion.max_draft), more_precise(cache_format, opinion.cache_format))
            if lowered != (max_draft, cache_format):
                cuts.append(opinion.says)
            max_draft, cache_format = lowered
        plan = bounded_plan(bounds, max_draft, cache_format)
        why = "; ".join(cuts) or "no rule is against what the tenant's file allows"
        return Decision(plan, f"{plan.name}, because {why}", tuple(steps))
