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
from .errors import ClientGone, is_ours, to_http
from .http_settings import HttpSettings
from .lifecycle import Lifecycle, measured_lag
from .metrics import Metrics
from .middleware import RequestBoundary, record_of
from .observer import Observer
from .overrides import Overrides
from .router import Router
from .routes import open_routes, v1_routes
from .service import Service
from .tenant_watch import ReloadCollector, TenantWatch
from .tenants import Tenants


def create_app(
    backends: Sequence[Backend],
    tenants: Tenants,
    policy: Policy,
    settings: HttpSettings | None = None,
    *,
    admin_key: AdminKey | None = None,
    watch: TenantWatch | None = None,
) -> Litestar:
    """The gateway as an ASGI application. Its lifespan starts and stops the backends, and the watch if any.

    `app.state.lifecycle` is the `Lifecycle`, for whoever runs the application.
    """
    metrics = Metrics(backends)
    lifecycle = Lifecycle(backends)
    router = Router(backends)
    overrides = Overrides()
    service = Service(router, tenants, policy, Observer(overrides), metrics, settings or HttpSettings())
    metrics.register(ReloadCollector(watch))
    guard = (admin_key or AdminKey(None)).guard

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        async with (
            measured_lag(metrics.observe_lag),
            lifecycle.running(),
            watch.running() if watch else nullcontext(),
        ):
            yield

    app = Litestar(
        route_handlers=[
            v1_routes(service, router, tenants),
            tenant_routes(TenantAdmin(watch, policy, overrides), guard),
            open_routes(lifecycle, metrics),
        ],
        exception_handlers={Exception: answer_error},
        lifespan=[lifespan],
        openapi_config=None,
        logging_config=None,
        state=State({"lifecycle": lifecycle}),
    )
    # Litestar's own middleware sees neither unknown paths nor wrong methods; this wraps those too.
    app.asgi_handler = RequestBoundary(app.asgi_handler, metrics)
    return app


def answer_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Every error in OpenAI's shape."""
    record = record_of(request.scope)
    if not is_ours(error):
        structlog.get_logger().error("request.crashed", request_id=record.request_id, exc_info=error)
    answer = to_http(error, method=request.method, path=request.scope["path"])
    record.error = answer.body.error.code
    record.client_gone = isinstance(error, ClientGone)
    return Response(
        json.encode(answer.body),
        status_code=answer.status,
        headers=dict(answer.headers),
        media_type="application/json",
    )
