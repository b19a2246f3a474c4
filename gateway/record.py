"""What is remembered of one request until its end, when it becomes one log event and some metrics."""

from __future__ import annotations

import time
from typing import Any

from msgspec import Struct, field

from surefoot.backends.types import Chunk, Event, Finished, Started, Timings, Usage
from surefoot.policies.base import Decision, Observation


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
    tenant_id: str | None = None
    model: str | None = None
    completion_id: str | None = None
    stream: bool | None = None
    plan: str | None = None
    plan_reason: str | None = None
    observation: Observation | None = None
    """What the plan was chosen by."""
    started: bool = False
    """Whether the backend took the request; one that it refused has no latency to speak of."""
    first_token_s: float | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    timings: list[Timings] = field(default_factory=list)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request's first line came in."""
        return time.perf_counter() - self.begun_s

    @property
    def end_reasons(self) -> list[str]:
        """Why each choice ended, and what ended the request if that was not its choices."""
        if not self.started:
            return []
        if self.client_gone or self.error == "cancelled":
            return [*self.finish_reasons, "abort"]
        if self.error is None:
            return self.finish_reasons
        return [*self.finish_reasons, "deadline" if self.error == "deadline_exceeded" else "error"]

    def note_plan(self, observation: Observation, decision: Decision) -> None:
        """Remember what was decided, why, and from what."""
        self.observation = observation
        self.plan, self.plan_reason = decision.plan.name, decision.reason

    @property
    def usage(self) -> Usage:
        """Token counts over all prompts and choices."""
        return Usage(
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=self.num_cached_tokens,
        )

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
            self.timings.append(event.timings)

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
                "completion_id": self.completion_id,
                "stream": self.stream,
                "plan": self.plan,
                "plan_reason": self.plan_reason,
                "prompt_tokens": self.num_prompt_tokens,
                "output_tokens": self.num_output_tokens,
                "cached_tokens": self.num_cached_tokens,
                "finish_reason": ",".join(sorted(set(self.end_reasons))) or None,
                "queue_s": _round(max((each.queue_s for each in self.timings), default=None)),
                "ttft_s": _round(self.first_token_s),
                "tpot_s": _round(_mean([each.tpot_s for each in self.timings if each.tpot_s is not None])),
            }
        return {name: value for name, value in fields.items() if value is not None}


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
