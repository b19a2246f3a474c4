"""What is remembered of one request until its end, when it becomes one log event and some metrics."""

from __future__ import annotations

import time
from itertools import zip_longest
from typing import Any

from msgspec import Struct, field

from surefoot.backends.types import (
    CacheUsage,
    Chunk,
    Event,
    Finished,
    SpeculationUsage,
    Started,
    Timings,
    Usage,
)
from surefoot.policies.base import Decision, Observation

from .answers import Totals
from .rate_limits import Quota
from .sla import Promise, SlaClass


class RequestRecord(Struct, kw_only=True):
    """Filled in as the request goes its way; None for what it has not reached. No text of it is kept."""

    request_id: str
    method: str
    path: str
    begun_s: float = field(default_factory=time.perf_counter)
    route: str | None = None
    status: int | None = None
    error: str | None = None
    client_gone: bool = False
    refusal: str | None = None
    """Why a good request was not taken, in one word."""
    tenant_id: str | None = None
    quota: Quota | None = None
    promise: Promise | None = None
    model: str | None = None
    completion_id: str | None = None
    stream: bool | None = None
    plan: str | None = None
    plan_reason: str | None = None
    observation: Observation | None = None
    """What the plan was chosen by."""
    counted: bool = False
    """Whether metrics and usage have it already."""
    started: bool = False
    """Whether the backend took the request; one that it refused has no latency to speak of."""
    first_token_s: float | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    drafts: SpeculationUsage = SpeculationUsage()
    cache: CacheUsage | None = None
    """None where no prompt has finished in a quantised format."""
    finish_reasons: list[str] = field(default_factory=list)
    timings: list[Timings] = field(default_factory=list)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request's first line came in."""
        return time.perf_counter() - self.begun_s

    @property
    def num_tokens(self) -> int | None:
        """Tokens of prompt and output so far; None if no backend took the request."""
        return self.num_prompt_tokens + self.num_output_tokens if self.started else None

    @property
    def aborted(self) -> bool:
        """Whether the client went away before the end."""
        return self.client_gone or self.error == "cancelled"

    @property
    def within_target(self) -> bool | None:
        """Whether what was promised was kept; None where nothing was, or nobody waited for it.

        A request that failed, or ended by its deadline, was not kept.
        """
        if self.promise is None or not self.promise.sla.has_targets or not self.started or self.aborted:
            return None
        sla = self.promise.sla
        return self.error is None and all(_kept(each, sla) for each in self.timings)

    @property
    def end_reasons(self) -> list[str]:
        """Why each choice ended, and what ended the request if that was not its choices."""
        if not self.started:
            return []
        if self.aborted:
            return [*self.finish_reasons, "abort"]
        if self.error is None:
            return self.finish_reasons
        return [*self.finish_reasons, "deadline" if self.error == "deadline_exceeded" else "error"]

    def note_plan(self, observation: Observation, decision: Decision) -> None:
        """Remember what was decided, why, and from what."""
        self.observation = observation
        self.plan, self.plan_reason = decision.plan.name, decision.reason

    @property
    def totals(self) -> Totals:
        """Counts over all prompts and choices."""
        usage = Usage(
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=self.num_cached_tokens,
        )
        return Totals(usage, self.drafts, self.cache)

    def observe(self, event: Event) -> None:
        """Count what a backend's event says."""
        if isinstance(event, Chunk):
            self.num_output_tokens += len(event.token_ids)
            if event.token_ids and self.first_token_s is None:
                self.first_token_s = self.elapsed_s
            if event.finish_reason is not None:
                self.finish_reasons.append(event.finish_reason)
        elif isinstance(event, Started):
            self.started = True
            self.num_prompt_tokens += event.num_prompt_tokens
        elif isinstance(event, Finished):
            self.num_cached_tokens += event.usage.num_cached_tokens
            self.num_preemptions += event.num_preemptions
            if event.speculation is not None:
                self.drafts = _added(self.drafts, event.speculation)
            if event.cache is not None:
                self.cache = event.cache if self.cache is None else _together(self.cache, event.cache)
            self.timings.append(event.timings)

    def _draft_fields(self) -> dict[str, Any]:
        """Nothing where nothing was drafted."""
        drafts = self.drafts
        if not drafts.num_drafts:
            return {}
        return {
            "drafts": drafts.num_drafts,
            "draft_tokens": drafts.num_draft_tokens,
            "accepted_tokens": drafts.num_accepted_tokens,
            "mean_acceptance_length": _round(1.0 + drafts.num_accepted_tokens / drafts.num_drafts),
        }

    def _cache_fields(self) -> dict[str, Any]:
        """Nothing where all bits were kept."""
        if self.cache is None:
            return {}
        return {
            "cache_tokens": self.cache.tokens,
            "demoted_tokens": self.cache.num_demoted_tokens,
            "protected_share": _round(self.cache.protected_share),
            "reproducible": self.cache.reproducible,
        }

    def log_fields(self) -> dict[str, Any]:
        """The keys of `request.finished`; for several prompts the longest wait, first token and mean pace.

        Only the backend knows waits and paces, and it tells them when a prompt has finished.
        """
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "error": self.error,
            "client_gone": self.client_gone or None,
            "tenant": self.tenant_id,
            "total_s": round(self.elapsed_s, 6),
        }
        if self.completion_id is not None:
            fields |= {
                "model": self.model,
                "class": self.promise and self.promise.name,
                "tier": self.promise and self.promise.tier,
                "completion_id": self.completion_id,
                "stream": self.stream,
                "plan": self.plan,
                "plan_reason": self.plan_reason,
                "prompt_tokens": self.num_prompt_tokens,
                "output_tokens": self.num_output_tokens,
                "cached_tokens": self.num_cached_tokens,
                "preemptions": self.num_preemptions,
                **self._draft_fields(),
                **self._cache_fields(),
                "within_target": self.within_target,
                "finish_reason": ",".join(sorted(set(self.end_reasons))) or None,
                "queue_s": _round(max((each.queue_s for each in self.timings), default=None)),
                "ttft_s": _round(self.first_token_s),
                "tpot_s": _round(_mean([each.tpot_s for each in self.timings if each.tpot_s is not None])),
            }
        return {name: value for name, value in fields.items() if value is not None}


def _added(a: SpeculationUsage, b: SpeculationUsage) -> SpeculationUsage:
    """Of all drafts of both."""
    return SpeculationUsage(
        num_drafts=a.num_drafts + b.num_drafts,
        num_draft_tokens=a.num_draft_tokens + b.num_draft_tokens,
        num_accepted_tokens=a.num_accepted_tokens + b.num_accepted_tokens,
        num_predicted_tokens=a.num_predicted_tokens + b.num_predicted_tokens,
        num_accepted_predicted_tokens=a.num_accepted_predicted_tokens + b.num_accepted_predicted_tokens,
        accepted_at=tuple(x + y for x, y in zip_longest(a.accepted_at, b.accepted_at, fillvalue=0)),
    )


def _together(a: CacheUsage, b: CacheUsage) -> CacheUsage:
    """Of the tokens of both."""
    return CacheUsage(
        tokens={name: a.tokens.get(name, 0) + b.tokens.get(name, 0) for name in {**a.tokens, **b.tokens}},
        num_demoted_tokens=a.num_demoted_tokens + b.num_demoted_tokens,
        reproducible=a.reproducible and b.reproducible,
    )


def _kept(timings: Timings, sla: SlaClass) -> bool:
    return _at_most(timings.ttft_s, sla.ttft_target_s) and _at_most(timings.tpot_s, sla.tpot_target_s)


def _at_most(value: float | None, target: float | None) -> bool:
    return value is None or target is None or value <= target


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
