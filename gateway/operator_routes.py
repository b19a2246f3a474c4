"""What operators (and tenants, for their own part) can see of a running server: `/v1/surefoot/*`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Any

from litestar import HttpMethod, Request, Router, route
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from msgspec import Struct

from surefoot.backends.base import Backend
from surefoot.backends.types import BackendState, BackendStats, SequenceView

from .admin import AdminKey
from .decode import did_you_mean
from .errors import InvalidKey, InvalidValue, NotAdmin, NotEnabled, UnknownField, shortened
from .in_flight import InFlight
from .middleware import record_of
from .tenants import Tenant, Tenants
from .usage import UsageBook
from .usage_store import UsageFilter, UsageRow

AnyConnection = ASGIConnection[Any, Any, Any, Any]
AnyRequest = Request[Any, Any, Any]
READ = (HttpMethod.GET, HttpMethod.HEAD)
PERIOD = ("since", "until")


class UsageList(Struct, frozen=True):
    """Rows by day, tenant, model and class."""

    data: list[UsageRow]
    object: str = "list"


class SequenceBody(Struct, frozen=True, kw_only=True, rename={"sla_class": "class"}):
    """One choice of a request. `completion_id` and `request_id` are null for requests of other servers."""

    completion_id: str | None
    request_id: str | None
    tenant: str
    sla_class: str | None
    choice: int
    priority: int
    age_s: float
    slack_s: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_blocks: int
    num_preemptions: int


class BackendBody(Struct, frozen=True, kw_only=True):
    """One backend's queue and running set, as of its last step."""

    models: list[str]
    state: BackendState
    detail: str
    backlog_s: float
    waiting: list[SequenceBody]
    running: list[SequenceBody]
    stats: BackendStats


class SchedulerBody(Struct, frozen=True):
    """All backends of a server."""

    backends: list[BackendBody]
    object: str = "surefoot.scheduler"


class Access:
    """Who may see what: the operator, by its own key, everything; a tenant itself."""

    def __init__(self, tenants: Tenants, admin_key: AdminKey) -> None:
        self._tenants = tenants
        self._admin_key = admin_key

    def tenant(self, connection: AnyConnection) -> Tenant | None:
        """The tenant that asks, None for the operator. Raises `InvalidKey`."""
        authorization = connection.headers.get("authorization")
        if self._admin_key.opens(authorization):
            return None
        tenant = self._tenants.authenticate(authorization)
        record_of(connection.scope).tenant_id = tenant.id
        return tenant

    def check_viewer(self, request: AnyRequest) -> None:
        """Pass the operator, and everybody where nobody has a key. Raises as `guard`."""
        if self._tenants.keys_required or self._admin_key.exists:
            self._check_operator(request)

    def guard(self, connection: AnyConnection, _: BaseRouteHandler) -> None:
        """For Litestar: let only the operator pass, and note their label as `state["admin"]`.

        Raises `InvalidKey`, `NotAdmin` for a tenant's key, or `NotEnabled` where the operator has none.
        """
        self._check_operator(connection)
        connection.scope["state"]["admin"] = self._admin_key.label

    def _check_operator(self, connection: AnyConnection) -> None:
        if self.tenant(connection) is None:
            return
        if not self._admin_key.exists:
            raise NotEnabled(
                "This needs an admin key, and the server has none: make one with `surefoot key new` and"
                " name its hash in the setting 'admin_key_hash'."
            )
        if self._tenants.keys_required:
            raise NotAdmin("This needs the admin key; yours is a tenant's.")
        raise InvalidKey("This needs the admin key: send it in the header 'Authorization: Bearer <key>'.")


def operator_routes(
    access: Access, backends: Sequence[Backend], in_flight: InFlight, usage: UsageBook | None
) -> Router:
    """The two views."""

    @route("/scheduler", http_method=READ, sync_to_thread=False)
    def read_scheduler(request: AnyRequest) -> SchedulerBody:
        access.check_viewer(request)
        return SchedulerBody([_backend(each, in_flight) for each in backends])

    @route("/usage", http_method=READ)
    async def read_usage(request: AnyRequest) -> UsageList:
        tenant = access.tenant(request)
        since, until = _period(request)
        if usage is None:
            raise NotEnabled("Usage is not kept: the server was started without a file for it ('usage_db').")
        wanted = UsageFilter(tenant=None if tenant is None else tenant.id, since=since, until=until)
        return UsageList(await usage.read(wanted))

    return Router("/v1/surefoot", route_handlers=[read_scheduler, read_usage])


def _backend(backend: Backend, in_flight: InFlight) -> BackendBody:
    view, status = backend.scheduler, backend.status
    return BackendBody(
        models=[card.id for card in backend.models],
        state=status.state,
        detail=status.detail,
        backlog_s=view.backlog_s,
        waiting=[_sequence(each, in_flight) for each in view.waiting],
        running=[_sequence(each, in_flight) for each in view.running],
        stats=backend.stats,
    )


def _sequence(view: SequenceView, in_flight: InFlight) -> SequenceBody:
    record = in_flight.find(view.request_id)
    promise = None if record is None else record.promise
    return SequenceBody(
        completion_id=None if record is None else record.completion_id,
        request_id=None if record is None else record.request_id,
        # The flow that a backend is told is the tenant.
        tenant=view.flow,
        sla_class=None if promise is None else promise.name,
        choice=view.choice,
        priority=view.priority,
        age_s=view.age_s,
        slack_s=view.slack_s,
        num_prompt_tokens=view.num_prompt_tokens,
        num_output_tokens=view.num_output_tokens,
        num_blocks=view.num_blocks,
        num_preemptions=view.num_preemptions,
    )


def _period(request: AnyRequest) -> tuple[str | None, str | None]:
    for name in request.query_params:
        if name not in PERIOD:
            name = shortened(name)
            raise UnknownField(f"Unknown parameter: '{name}'.{did_you_mean(name, PERIOD)}", name)
    since, until = (_day(name, request.query_params.get(name)) for name in PERIOD)
    if since is not None and until is not None and since > until:
        raise InvalidValue(f"'since' is {since}, which is after 'until', {until}.", "since")
    return since, until


def _day(name: str, text: str | None) -> str | None:
    if text is None:
        return None
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise InvalidValue(
            f"'{name}' must be a day such as 2026-01-31, but it is '{shortened(text)}'.", name
        ) from None
