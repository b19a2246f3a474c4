"""What each tenant may do in a minute and at once, and the headers that say what is left of it.

A limit per minute is a bucket that holds a minute's worth and refills steadily: nothing is carried over
beyond that. A request takes its place and an estimate of its prompt's tokens when it is admitted; when it
ends, however it ends, the estimate is replaced by what the prompt had and what was sent. So a bucket can be
overdrawn, and then refills until requests are admitted again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from msgspec import Struct

from .clock import Clock
from .errors import TooManyRequests
from .tenants import Tenant, TenantLimits

WINDOW_S = 60.0
CONCURRENCY_RETRY_S = 1.0
"""Nobody knows when a running request will end."""
# Less than any real amount, more than what rounding leaves of a wait that was served to its end.
SLACK = 1e-6


class Allowance(Struct, frozen=True):
    """One limit at one moment: how much is left of it, and in how many seconds all of it will be."""

    limit: int
    remaining: int
    reset_s: float


class Bucket:
    """What was used of a limit per minute. The limit is told at each call, as files may change."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._used = 0.0
        self._at_s = clock.monotonic()

    def take(self, amount: float, limit: int) -> None:
        """Use so much, or give it back if it is below 0."""
        self._used = max(0.0, self._used_now(limit) + amount)

    def wait_s(self, amount: float, limit: int) -> float:
        """Seconds until there is room for an amount; for one above the limit, until all of that is free."""
        over = self._used_now(limit) + min(amount, limit) - limit
        return over / (limit / WINDOW_S) if over > SLACK else 0.0

    def allowance(self, limit: int) -> Allowance:
        """How the limit stands."""
        used = self._used_now(limit)
        return Allowance(limit, max(0, math.floor(limit - used + SLACK)), used / (limit / WINDOW_S))

    def _used_now(self, limit: int) -> float:
        now_s = self._clock.monotonic()
        self._used = max(0.0, self._used - (now_s - self._at_s) * limit / WINDOW_S)
        self._at_s = now_s
        return self._used


class Quota:
    """One tenant's limits, and what it has used of them."""

    def __init__(self, clock: Clock) -> None:
        self.limits = TenantLimits()
        self._requests = Bucket(clock)
        self._tokens = Bucket(clock)
        self._num_running = 0

    @contextmanager
    def admitted(self, num_estimated: int, num_used: Callable[[], int | None]) -> Iterator[None]:
        """Count a request as running within the block. Raises `TooManyRequests`, and then counts nothing.

        `num_used` is asked at the block's end how many tokens of prompt and output it really was; None says
        that no backend took the request, which then was none.
        """
        limits = self.limits
        self._check(limits, num_estimated)
        self._take(limits, 1, num_estimated)
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            used = num_used()
            self._take(limits, -1 if used is None else 0, (used or 0) - num_estimated)

    def headers(self) -> Mapping[str, str]:
        """OpenAI's headers for the limits that there are."""
        headers = {}
        for name, allowance in self._allowances():
            headers[f"x-ratelimit-limit-{name}"] = str(allowance.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(allowance.remaining)
            headers[f"x-ratelimit-reset-{name}"] = duration_text(allowance.reset_s)
        return headers

    def _allowances(self) -> Iterator[tuple[str, Allowance]]:
        if self.limits.requests_per_minute is not None:
            yield "requests", self._requests.allowance(self.limits.requests_per_minute)
        if self.limits.tokens_per_minute is not None:
            yield "tokens", self._tokens.allowance(self.limits.tokens_per_minute)

    def _check(self, limits: TenantLimits, num_tokens: int) -> None:
        running, requests, tokens = (
            limits.max_concurrent_requests,
            limits.requests_per_minute,
            limits.tokens_per_minute,
        )
        if running is not None and self._num_running >= running:
            raise TooManyRequests(
                f"You have {running} requests running, which is your limit: try again later.",
                retry_after_s=CONCURRENCY_RETRY_S,
                reason="concurrency",
            )
        if requests is not None and (wait_s := self._requests.wait_s(1, requests)):
            raise TooManyRequests(
                f"You reached your limit of {requests} requests per minute: try again in {wait_s:.3f} s.",
                retry_after_s=wait_s,
                reason="requests_per_minute",
            )
        if tokens is not None and (wait_s := self._tokens.wait_s(num_tokens, tokens)):
            left = self._tokens.allowance(tokens).remaining
            raise TooManyRequests(
                f"This request has about {num_tokens} tokens, but {left} are left of your limit of {tokens}"
                f" tokens per minute: try again in {wait_s:.3f} s.",
                retry_after_s=wait_s,
                reason="tokens_per_minute",
            )

    def _take(self, limits: TenantLimits, num_requests: int, num_tokens: int) -> None:
        if limits.requests_per_minute is not None:
            self._requests.take(num_requests, limits.requests_per_minute)
        if limits.tokens_per_minute is not None:
            self._tokens.take(num_tokens, limits.tokens_per_minute)


class Quotas:
    """The quota of every tenant that was seen."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._quotas: dict[str, Quota] = {}

    def of(self, tenant: Tenant) -> Quota:
        """A tenant's quota, under the limits that its file has now."""
        if tenant.id not in self._quotas:
            self._quotas[tenant.id] = Quota(self._clock)
        quota = self._quotas[tenant.id]
        quota.limits = tenant.limits
        return quota


def duration_text(seconds: float) -> str:
    """A duration as OpenAI writes it: `120ms`, `1.5s`, `6m0s`. Rounded up, to be safe to wait for."""
    ms = math.ceil(seconds * 1000 - SLACK)
    if 0 < ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{ms / 1000:g}s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text
