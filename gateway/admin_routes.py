"""What operators may ask and do: tenants, what holds for them, and plans forced on them for a while."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import structlog
from litestar import HttpMethod, Request, Router, delete, put, route
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.params import FromPath
from msgspec import Struct
from msgspec.structs import asdict

from surefoot.backends.base import Backend
from surefoot.policies.base import Decision, Observation, Policy
from surefoot.policies.wrappers import FORCIBLE

from .connection import read_body
from .decode import decode, did_you_mean
from .errors import InvalidValue, UnknownTenant, shortened
from .limits import Range, check_range
from .overrides import Override, Overrides
from .tenant_folder import FolderState, Loaded
from .tenant_values import EffectiveValue, effective_values
from .tenant_watch import ReloadStatus, TenantWatch
from .tenants import Tenant

AnyRequest = Request[Any, Any, Any]
Guard = Callable[[ASGIConnection[Any, Any, Any, Any], BaseRouteHandler], None]
READ = (HttpMethod.GET, HttpMethod.HEAD)
MAX_BODY_BYTES = 10_000
OVERRIDE_S = Range(low=0, high=7 * 24 * 3600, above_low=True)


class TenantLine(Struct, frozen=True):
    """One tenant of the list."""

    id: str
    file: str | None
    policy: str
    num_keys: int
    override: Override | None


class TenantList(Struct, frozen=True):
    """How the last reload went, and the tenants that hold."""

    reload: ReloadStatus
    tenants: list[TenantLine]


class KeyLine(Struct, frozen=True):
    """A key, without its hash. `expires` in ISO 8601."""

    label: str
    expires: str | None


class TenantDetail(Struct, frozen=True):
    """What holds for a tenant. `decision` is that of a request of which nothing else is known."""

    id: str
    file: str | None
    keys: list[KeyLine]
    values: list[EffectiveValue]
    override: Override | None
    decision: Decision


class OverrideBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `PUT .../override`."""

    plan: str
    expires_in_s: float


class TenantAdmin:
    """What the handlers say and do, apart from HTTP."""

    def __init__(
        self,
        watch: TenantWatch | None,
        policy: Policy,
        overrides: Overrides,
        *,
        local: Tenant,
        backends: Sequence[Backend],
    ) -> None:
        """`local` is the one tenant where there is no `watch`."""
        self._watch = watch
        self._local = local
        self._backends = backends
        self._policy = policy
        self._overrides = overrides
        self._log = structlog.get_logger()

    def list(self) -> TenantList:
        """Every tenant; the local one where there is no folder."""
        status = self._watch.status if self._watch else ReloadStatus(0, 0.0)
        tenants = [each.tenant for each in self._state.loaded.values()] if self._watch else [self._local]
        return TenantList(status, [self._line(each) for each in tenants])

    def show(self, tenant_id: str) -> TenantDetail:
        """One tenant. Raises `UnknownTenant`."""
        tenant, loaded = self._find(tenant_id)
        file = loaded.file if loaded else None
        seen = Observation(
            tenant_id=tenant.id, model="", policy=tenant.policy, bounds=tenant.bounds,
            service_class=tenant.classes.default, override=self._forced(tenant),
        )  # fmt: skip
        return TenantDetail(
            id=tenant.id,
            file=file.path.name if file else None,
            keys=[
                KeyLine(key.label, key.expires.isoformat() if key.expires else None)
                for key in tenant.all_keys
            ],
            values=effective_values(tenant, file, self._state.defaults),
            override=self._overrides.get(tenant.id),
            decision=self._policy.decide(seen),
        )

    def force(self, tenant_id: str, body: OverrideBody, by: str) -> Override:
        """Force a plan for a while. Raises `UnknownTenant` or `InvalidValue`."""
        tenant, _ = self._find(tenant_id)
        if body.plan not in FORCIBLE:
            known = " or ".join(FORCIBLE)
            raise InvalidValue(f"'plan' must be {known}, but it is '{shortened(body.plan)}'.", "plan")
        check_range("expires_in_s", body.expires_in_s, OVERRIDE_S)
        override = Override(plan=body.plan, by=by, expires_in_s=body.expires_in_s)
        self._overrides.set(tenant.id, override)
        self._log.info("admin.override_set", tenant=tenant.id, **asdict(override))
        return override

    def release(self, tenant_id: str, by: str) -> None:
        """Force nothing any more. Raises `UnknownTenant`."""
        tenant, _ = self._find(tenant_id)
        if self._overrides.clear(tenant.id):
            self._log.info("admin.override_cleared", tenant=tenant.id, by=by)

    def forget_outputs(self, tenant_id: str, by: str) -> None:
        """Purge what drafts are made from of a tenant's earlier answers. Raises `UnknownTenant`."""
        tenant, _ = self._find(tenant_id)
        for backend in self._backends:
            backend.forget_outputs(tenant.id)
        self._log.info("admin.suffix_purged", tenant=tenant.id, by=by)

    @property
    def _state(self) -> FolderState:
        return self._watch.state if self._watch else FolderState()

    def _find(self, tenant_id: str) -> tuple[Tenant, Loaded | None]:
        if self._watch is None and tenant_id == self._local.id:
            return self._local, None
        loaded = self._state.loaded.get(tenant_id)
        if loaded is None:
            hint = did_you_mean(tenant_id, self._state.loaded)
            raise UnknownTenant(f"There is no tenant '{shortened(tenant_id)}'.{hint}")
        return loaded.tenant, loaded

    def _forced(self, tenant: Tenant) -> str | None:
        override = self._overrides.get(tenant.id)
        return override.plan if override else None

    def _line(self, tenant: Tenant) -> TenantLine:
        loaded = self._state.loaded.get(tenant.id)
        file = loaded.file.path.name if loaded else None
        override = self._overrides.get(tenant.id)
        return TenantLine(tenant.id, file, tenant.policy, len(tenant.all_keys), override)


def tenant_routes(admin: TenantAdmin, guard: Guard) -> Router:
    """Paths below `/v1/surefoot/tenants`, for those whom `guard` lets pass."""

    @route("/", http_method=READ, sync_to_thread=False)
    def list_tenants() -> TenantList:
        return admin.list()

    @route("/{tenant_id:str}", http_method=READ, sync_to_thread=False)
    def show_tenant(tenant_id: FromPath[str]) -> TenantDetail:
        return admin.show(tenant_id)

    @put("/{tenant_id:str}/override")
    async def set_override(request: AnyRequest, tenant_id: FromPath[str]) -> Override:
        body = await read_body(request.receive, request.headers, MAX_BODY_BYTES)
        return admin.force(tenant_id, decode(body, OverrideBody), _admin(request))

    @delete("/{tenant_id:str}/override", sync_to_thread=False)
    def clear_override(request: AnyRequest, tenant_id: FromPath[str]) -> None:
        admin.release(tenant_id, _admin(request))

    @delete("/{tenant_id:str}/suffix", sync_to_thread=False)
    def purge_suffix(request: AnyRequest, tenant_id: FromPath[str]) -> None:
        admin.forget_outputs(tenant_id, _admin(request))

    handlers = [list_tenants, show_tenant, set_override, clear_override, purge_suffix]
    return Router("/v1/surefoot/tenants", route_handlers=handlers, guards=[guard])


def _admin(request: AnyRequest) -> str:
    return str(request.scope["state"]["admin"])
