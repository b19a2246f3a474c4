"""One completion request, from its body to the delivery of its answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from litestar import Request
from msgspec import UNSET, Struct

from surefoot.backends.errors import DeadlineExceeded
from surefoot.backends.types import GenerateRequest, ServingPlan
from surefoot.policies.base import Policy

from .answers import Answer, ChatAnswer, Label, TextAnswer
from .connection import read_body
from .decode import decode
from .delivery import Delivery
from .errors import InvalidValue
from .generation import Generation
from .http_settings import HttpSettings
from .metrics import Metrics
from .middleware import record_of
from .observer import Observer
from .record import RequestRecord
from .router import Router
from .schemas import ChatRequest, CompletionRequest
from .tenants import Tenant, Tenants

DEADLINE_HEADER = "x-surefoot-deadline-ms"
MAX_DEADLINE_MS = 7 * 24 * 3600 * 1000


class Endpoint(Struct, frozen=True):
    """What sets the two completion endpoints apart."""

    shape: type[ChatRequest] | type[CompletionRequest]
    id_prefix: str
    answer: Callable[[Label, int], Answer[Any]]


CHAT = Endpoint(ChatRequest, "chatcmpl-", lambda label, num_prompts: ChatAnswer(label))
TEXT = Endpoint(CompletionRequest, "cmpl-", TextAnswer)


class Service:
    """Holds what every request needs; has no state of its own."""

    def __init__(
        self,
        router: Router,
        tenants: Tenants,
        policy: Policy,
        observer: Observer,
        metrics: Metrics,
        settings: HttpSettings,
    ) -> None:
        self._router = router
        self._tenants = tenants
        self._policy = policy
        self._observer = observer
        self._metrics = metrics
        self._settings = settings

    async def complete(self, request: Request[Any, Any, Any], tenant: Tenant, endpoint: Endpoint) -> Delivery:
        """Everything up to the backend: read, check, choose. Raises a `GatewayError` or a `BackendError`."""
        record = record_of(request.scope)
        body = await read_body(request.receive, request.headers, self._settings.max_body_bytes)
        asked = decode(body, endpoint.shape)
        asked.check()
        backend = self._router.backend(asked.model, tenant)
        seen = self._observer.observe(tenant, asked.model, asked.prompts(), backend)
        decision = self._policy.decide(seen)
        record.note_plan(seen, decision)
        label = _label(asked, endpoint)
        requests = _requests(asked, tenant, decision.plan, label.id, _deadline_s(request, record))
        record.model, record.completion_id, record.stream = asked.model, label.id, asked.streams
        return Delivery(
            generation=Generation(backend, requests),
            answer=endpoint.answer(label, len(requests)),
            record=record,
            gaps=self._metrics.gap_meter(asked.model),
            tenants=self._tenants,
            tenant=tenant,
            streams=asked.streams,
            keep_alive_s=self._settings.keep_alive_s,
        )


def _label(asked: ChatRequest | CompletionRequest, endpoint: Endpoint) -> Label:
    tier_asked = isinstance(asked, ChatRequest) and asked.service_tier is not None
    return Label(
        id=endpoint.id_prefix + uuid.uuid4().hex,
        created=int(time.time()),
        model=asked.model,
        num_choices=asked.num_choices,
        # A whole answer is folded from the chunks of a stream, and always says what it used.
        includes_usage=asked.includes_usage or not asked.streams,
        service_tier="default" if tier_asked else UNSET,
    )


def _requests(
    asked: ChatRequest | CompletionRequest,
    tenant: Tenant,
    plan: ServingPlan,
    completion_id: str,
    deadline_s: float | None,
) -> list[GenerateRequest]:
    tenant.check_n(asked.num_choices)
    params = asked.params(tenant.limits.max_tokens)
    return [
        GenerateRequest(
            # Not the client's request id, which it may use twice.
            request_id=f"{completion_id}-{i}",
            model=asked.model,
            prompt=prompt,
            params=params,
            plan=plan,
            deadline_s=deadline_s,
            echo=isinstance(asked, CompletionRequest) and bool(asked.echo),
        )
        for i, prompt in enumerate(asked.prompts())
    ]


def _deadline_s(request: Request[Any, Any, Any], record: RequestRecord) -> float | None:
    """Seconds that are left of the client's deadline, which counts from the request's arrival."""
    sent = request.headers.get(DEADLINE_HEADER)
    if sent is None:
        return None
    if not (sent.isascii() and sent.isdecimal() and len(sent) <= 12 and 1 <= int(sent) <= MAX_DEADLINE_MS):
        raise InvalidValue(
            f"The header '{DEADLINE_HEADER}' must be a whole number of milliseconds between 1 and"
            f" {MAX_DEADLINE_MS}, but it is '{sent[:20]}'.",
            DEADLINE_HEADER,
        )
    left_s = int(sent) / 1000 - record.elapsed_s
    if left_s <= 0:
        raise DeadlineExceeded(f"The request's deadline of {sent} ms passed.")
    return left_s
