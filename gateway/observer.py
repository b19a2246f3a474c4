"""What a policy is told of a request."""

from __future__ import annotations

from surefoot.backends.base import Backend
from surefoot.backends.types import ChatPrompt, Prompt, ServingPlan, TextPrompt
from surefoot.policies.base import Observation
from surefoot.policies.bounds import Protection
from surefoot.policies.recent_loss import RecentLoss, expected_loss

from .clock import Clock
from .hints import CacheWish
from .overrides import Overrides
from .schemas import ChatRequest, CompletionRequest
from .tenants import Tenant

CHARACTERS_PER_TOKEN = 4
"""A rule of thumb for English; the tokenizer lies behind the backend."""


class Observer:
    """Puts together what is known of a request that comes, and remembers what plans are expected to lose."""

    def __init__(self, overrides: Overrides, clock: Clock) -> None:
        self._overrides = overrides
        self._clock = clock
        self._recent = RecentLoss()

    def observe(
        self,
        tenant: Tenant,
        service_class: str,
        asked: ChatRequest | CompletionRequest,
        backend: Backend,
    ) -> Observation:
        """Of several prompts the longest counts. No text of them is in an observation."""
        prompts, stats = asked.prompts(), backend.stats
        kind = "chat" if isinstance(prompts[0], ChatPrompt) else "text"
        override = self._overrides.get(tenant.id)
        wish = asked.cache or CacheWish()
        return Observation(
            tenant_id=tenant.id,
            model=asked.model,
            policy=tenant.policy,
            service_class=service_class,
            kind=kind,
            num_prompt_tokens=max(map(estimate_tokens, prompts)),
            cache_pressure=stats.num_blocks_used / stats.num_blocks if stats.num_blocks else 0.0,
            load=stats.num_running + stats.num_waiting,
            acceptance=stats.speculation.acceptance.get(tenant.id, {}).get(kind),
            quality_loss=self._recent.get(_traffic(tenant.id, kind)),
            longest_draft=stats.speculation.max_draft,
            drafters=stats.speculation.proposers,
            hour=self._clock.time() % 86400 / 3600,
            override=override.plan if override else None,
            max_draft=asked.max_draft,
            cache_format=wish.format,
            protect=Protection(sinks=wish.protection.sinks, recent=wish.protection.recent),
            demotes_at_once=wish.demote == "eager",
            max_context=wish.max_context,
            has_seed=asked.seed is not None,
            bounds=tenant.bounds,
        )

    def note(self, seen: Observation, plan: ServingPlan) -> None:
        """Remember the plan that was chosen for a request."""
        loss = expected_loss(plan.cache, seen.bounds.cache.loss, seen.num_prompt_tokens)
        self._recent.choose(_traffic(seen.tenant_id, seen.kind), loss)


def _traffic(tenant_id: str, kind: str) -> str:
    """What is alike enough for one mean."""
    return f"{tenant_id} {kind}"


def estimate_tokens(prompt: Prompt) -> int:
    """Exact for token ids; for text by its length, rounded up."""
    if isinstance(prompt, TextPrompt):
        num_characters = len(prompt.text)
    elif isinstance(prompt, ChatPrompt):
        num_characters = sum(len(str(each.get("content", ""))) for each in prompt.messages)
    else:
        return len(prompt.token_ids)
    return -(-num_characters // CHARACTERS_PER_TOKEN)
