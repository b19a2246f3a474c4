"""The HTTP interface: which path does what."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from litestar import HttpMethod, MediaType, Request, Response, Router, post, route
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.params import FromPath
from litestar.types import ASGIApp

from surefoot.backends.types import ModelCard

from .lifecycle import Lifecycle
from .metrics import CONTENT_TYPE, Metrics
from .middleware import record_of
from .rate_limits import Quotas
from .responses import Health, ModelBody, ModelList, Version
from .router import Router as ModelRouter
from .service import CHAT, TEXT, Service
from .tenants import Tenant, Tenants

AnyRequest = Request[Any, Any, Any]
READ = (HttpMethod.GET, HttpMethod.HEAD)


def v1_routes(service: Service, router: ModelRouter, tenants: Tenants, quotas: Quotas) -> Router:
    """OpenAI's paths. Each of them needs a key where there are tenants."""

    def authenticate(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        tenant = tenants.authenticate(connection.headers.get("authorization"))
        connection.scope["state"]["tenant"] = tenant
        record = record_of(connection.scope)
        record.tenant_id, record.quota = tenant.id, quotas.of(tenant)

    @post("/chat/completions")
    async def chat_completions(request: AnyRequest) -> ASGIApp:
        return await service.complete(request, _tenant(request), CHAT)

    @post("/completions")
    async def completions(request: AnyRequest) -> ASGIApp:
        return await service.complete(request, _tenant(request), TEXT)

    @route("/models", http_method=READ, sync_to_thread=False)
    def list_models(request: AnyRequest) -> ModelList:
        return ModelList(data=[_model(card) for card in router.models(_tenant(request))])

    @route("/models/{model_id:path}", http_method=READ, sync_to_thread=False)
    def read_model(request: AnyRequest, model_id: FromPath[str]) -> ModelBody:
        return _model(router.model(model_id.lstrip("/"), _tenant(request)))

    return Router(
        "/v1", route_handlers=[chat_completions, completions, list_models, read_model], guards=[authenticate]
    )


def open_routes(lifecycle: Lifecycle, metrics: Metrics) -> Router:
    """Paths for the machines that watch over the server. They need no key."""

    @route("/health/live", http_method=READ, sync_to_thread=False)
    def live() -> Health:
        return Health("live")

    # The short path is where other model servers have it.
    @route(["/health", "/health/ready"], http_method=READ, sync_to_thread=False)
    def ready() -> Response[Health]:
        reason = lifecycle.not_ready
        if reason is None:
            return Response(Health("ready"))
        return Response(Health("not ready", reason), status_code=503, headers={"retry-after": "1"})

    @route("/metrics", http_method=READ, sync_to_thread=False, media_type=MediaType.TEXT)
    def read_metrics() -> Response[bytes]:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    @route("/version", http_method=READ, sync_to_thread=False)
    def read_version() -> Version:
        return Version(version("surefoot"))

    return Router("/", route_handlers=[live, ready, read_metrics, read_version])


def _tenant(request: AnyRequest) -> Tenant:
    tenant = request.scope["state"]["tenant"]
    assert isinstance(tenant, Tenant)
    return tenant


def _model(card: ModelCard) -> ModelBody:
    return ModelBody(id=card.id, created=card.created, max_model_len=card.max_model_len)
