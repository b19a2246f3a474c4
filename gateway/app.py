"""The wiring: everything is made here, once, and handed to what needs it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import structlog
from litestar import Litestar, Request, Response
from litestar.datastructures import State
from msgspec import json

from surefoot.backends.base import Backend
from surefoot.policies.base import Policy

from .admin import AdminKey
from .admin_routes import TenantAdmin, tenant_routes
from .admission import Admission
from .clock import Clock, SystemClock
from .errors import ClientGone, is_ours, refusal_reason, to_http
from .http_settings import HttpSettings
from .in_flight import InFlight
from .lifecycle import Lifecycle, measured_lag
from .metrics import Metrics
from .middleware import RequestBoundary, record_of
from .observer import Observer
from .operator_routes import Access, operator_routes
from .overrides import Overrides
from .rate_limits import Quotas
from .record import RequestRecord
from .router import Router
from .routes import open_routes, v1_routes
from .service import Service
from .tenant_watch import ReloadCollector, TenantWatch
from .tenants import Tenants
from .usage import UsageBook
from .usage_store import UsageStore


def create_app(
    backends: Sequence[Backend],
    tenants: Tenants,
    policy: Policy,
    settings: HttpSettings | None = None,
    *,
    admin_key: AdminKey | None = None,
    watch: TenantWatch | None = None,
    usage_store: UsageStore | None = None,
    clock: Clock | None = None,
) -> Litestar:
    """The gateway as an ASGI application. Its lifespan starts and stops the backends, and the watch if any.

    `app.state.lifecycle` is the `Lifecycle`, for whoever runs the application. The application closes
    `usage_store`; without one usage is not kept. `clock` is the machine's unless told otherwise.
    """
    settings, access = settings or HttpSettings(), Access(tenants, admin_key or AdminKey(None))
    clock = clock or SystemClock()
    metrics, lifecycle, router = Metrics(backends), Lifecycle(backends), Router(backends)
    overrides, quotas, in_flight = Overrides(clock), Quotas(clock), InFlight()
    usage = None if usage_store is None else UsageBook(usage_store, clock)
    observer, admission = Observer(overrides, clock), Admission(quotas, in_flight)
    service = Service(router, policy, observer, metrics, settings, admission)
    metrics.register(ReloadCollector(watch))

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        async with (
            # Usage ends last: the requests that the backends end at shutdown count too.
            usage.running() if usage else nullcontext(),
            measured_lag(metrics.observe_lag),
            lifecycle.running(),
            watch.running() if watch else nullcontext(),
        ):
            yield

    def observe(record: RequestRecord) -> None:
        metrics.observe_request(record)
        if usage is not None:
            usage.observe(record)

    app = Litestar(
        route_handlers=[
            v1_routes(service, router, tenants, quotas),
            tenant_routes(
                TenantAdmin(watch, policy, overrides, local=tenants.local, backends=backends),
                access.guard,
            ),
            operator_routes(access, backends, in_flight, usage),
            open_routes(lifecycle, metrics),
        ],
        exception_handlers={Exception: answer_error},
        lifespan=[lifespan],
        openapi_config=None,
        logging_config=None,
        state=State({"lifecycle": lifecycle}),
    )
    # Litestar's own middleware sees neither unknown paths nor wrong methods; this wraps those too.
    app.asgi_handler = RequestBoundary(app.asgi_handler, observe)
    return app


def answer_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Every error in OpenAI's shape."""
    record = record_of(request.scope)
    if not is_ours(error):
        structlog.get_logger().error("request.crashed", request_id=record.request_id, exc_info=error)
    answer = to_http(error, method=request.method, path=request.scope["path"])
    record.error = answer.body.error.code
    record.refusal = None if record.started else refusal_reason(error)
    record.client_gone = isinstance(error, ClientGone)
    return Response(
        json.encode(answer.body),
        status_code=answer.status,
        headers=dict(answer.headers),
        media_type="application/json",
    )
