"""One completion request, from its body to the delivery of its answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

from litestar import Request
from msgspec import Struct

from surefoot.backends.errors import DeadlineExceeded
from surefoot.backends.types import GenerateRequest, ServingPlan
from surefoot.policies.base import Policy

from .admission import Admission
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
from .salts import Salts
from .schemas import ChatRequest, CompletionRequest
from .sla import Promise
from .tenants import Tenant

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
        policy: Policy,
        observer: Observer,
        metrics: Metrics,
        settings: HttpSettings,
        admission: Admission,
    ) -> None:
        self._router = router
        self._policy = policy
        self._observer = observer
        self._metrics = metrics
        self._settings = settings
        self._admission = admission
        self._salts = Salts()

    async def complete(self, request: Request[Any, Any, Any], tenant: Tenant, endpoint: Endpoint) -> Delivery:
        """Everything up to the backend: read, check, choose. Raises a `GatewayError` or a `BackendError`."""
        record = record_of(request.scope)
        body = await read_body(request.receive, request.headers, self._settings.max_body_bytes)
        asked = decode(body, endpoint.shape)
        asked.check()
        record.promise = promise = self._settings.classes.promise(asked.service_tier, tenant.classes)
        backend = self._router.backend(asked.model, tenant)
        record.model, record.stream = asked.model, asked.streams
        tenant.check_speculation(asked.speculation is not None)
        tenant.check_cache(asked.cache)
        seen = self._observer.observe(tenant, promise.name, asked, backend)
        decision = self._policy.decide(seen)
        record.note_plan(seen, decision)
        label = _label(asked, endpoint, promise, decision.plan)
        deadline_s = _deadline_s(request, record)
        requests = self._requests(asked, tenant, promise, decision.plan, seen.kind, label.id, deadline_s)
        record.completion_id = label.id
        # Not before: what is wrong with the request is known now.
        self._observer.note(seen, decision.plan)
        return Delivery(
            generation=Generation(backend, requests),
            answer=endpoint.answer(label, len(requests)),
            record=record,
            gaps=self._metrics.gap_meter(asked.model),
            admission=self._admission.of(tenant, requests, record),
            streams=asked.streams,
            keep_alive_s=self._settings.keep_alive_s,
        )

    def _requests(
        self,
        asked: ChatRequest | CompletionRequest,
        tenant: Tenant,
        promise: Promise,
        plan: ServingPlan,
        kind: str,
        completion_id: str,
        deadline_s: float | None,
    ) -> list[GenerateRequest]:
        tenant.check_n(asked.num_choices)
        params = asked.params(tenant.limits.max_tokens)
        predicted = asked.predicted
        salt = self._salts.salt(tenant.id, asked.prompt_cache_key)
        return [
            GenerateRequest(
                # Not the client's request id, which it may use twice.
                request_id=f"{completion_id}-{i}",
                model=asked.model,
                prompt=prompt,
                params=params,
                plan=plan,
                priority=promise.sla.priority,
                ttft_target_s=promise.sla.ttft_target_s,
                tpot_target_s=promise.sla.tpot_target_s,
                deadline_s=deadline_s,
                flow=tenant.id,
                weight=tenant.weight,
                kind=kind,
                salt=salt,
                prediction=predicted,
                echo=isinstance(asked, CompletionRequest) and bool(asked.echo),
            )
            for i, prompt in enumerate(asked.prompts())
        ]


def _label(
    asked: ChatRequest | CompletionRequest, endpoint: Endpoint, promise: Promise, plan: ServingPlan
) -> Label:
    return Label(
        id=endpoint.id_prefix + uuid.uuid4().hex,
        created=int(time.time()),
        model=asked.model,
        num_choices=asked.num_choices,
        # A whole answer is folded from the chunks of a stream, and always says what it used.
        includes_usage=asked.includes_usage or not asked.streams,
        service_tier=promise.tier,
        includes_metrics=bool(asked.return_metrics),
        max_draft=plan.speculation.max_draft,
        cache_format=plan.cache.format,
    )


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
