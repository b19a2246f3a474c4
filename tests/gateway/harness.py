"""A gateway over a `FakeBackend` on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

import httpx
from litestar.testing import TestClient
from msgspec import Struct

from surefoot.backends.fake import FakeBackend
from surefoot.gateway.admin import AdminKey
from surefoot.gateway.app import create_app
from surefoot.gateway.clock import Clock
from surefoot.gateway.http_settings import HttpSettings
from surefoot.gateway.server import GatewayServer
from surefoot.gateway.tenants import Tenant, Tenants, hash_key
from surefoot.gateway.usage_store import UsageStore
from surefoot.policies.baseline import BaselinePolicy

MAX_BODY_BYTES = 100_000


class Gateway(Struct):
    """A server that listens on a free port of this machine, in the test's own event loop."""

    url: str
    backend: FakeBackend
    server: GatewayServer
    client: httpx.AsyncClient


@asynccontextmanager
async def serve_fake(
    backend: FakeBackend | None = None,
    tenants: Tenants | None = None,
    *,
    keep_alive_s: float = 10.0,
    drain_s: float = 5.0,
    clock: Clock | None = None,
    usage_store: UsageStore | None = None,
) -> AsyncIterator[Gateway]:
    """Serve within the block; the server is ready when it begins and has ended when it is left."""
    backend = backend or FakeBackend()
    settings = HttpSettings(keep_alive_s=keep_alive_s, max_body_bytes=MAX_BODY_BYTES)
    app = create_app(
        [backend], tenants or Tenants(), BaselinePolicy(), settings, clock=clock, usage_store=usage_store
    )
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = GatewayServer(app, "127.0.0.1", 0, drain_s, ready.set_result)
    serving = asyncio.create_task(server.serve())
    await asyncio.wait([serving, ready], return_when=asyncio.FIRST_COMPLETED)
    url = ready.result()
    try:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            yield Gateway(url, backend, server, client)
    finally:
        server.should_exit = True
        await serving


@contextmanager
def client_of(
    *tenants: Tenant,
    backend: FakeBackend | None = None,
    settings: HttpSettings | None = None,
    admin_key: AdminKey | None = None,
    clock: Clock | None = None,
    usage_store: UsageStore | None = None,
) -> Iterator[TestClient]:
    """A client of a gateway in process, without a socket."""
    app = create_app(
        [backend or FakeBackend()],
        Tenants(tenants),
        BaselinePolicy(),
        settings,
        admin_key=admin_key,
        clock=clock,
        usage_store=usage_store,
    )
    with TestClient(app) as client:
        assert client.get("/health/ready").status_code == 200
        yield client


def bearer(key: str) -> dict[str, str]:
    """The header that carries a key."""
    return {"authorization": f"Bearer {key}"}


def hashes(*keys: str) -> tuple[str, ...]:
    """What a tenant's file has of its keys."""
    return tuple(hash_key(key) for key in keys)


Serve = Callable[..., AbstractAsyncContextManager[Gateway]]
