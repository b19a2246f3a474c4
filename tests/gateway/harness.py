"""A gateway over a `FakeBackend` on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import httpx
from msgspec import Struct

from surefoot.backends.fake import FakeBackend
from surefoot.gateway.app import create_app
from surefoot.gateway.http_settings import HttpSettings
from surefoot.gateway.server import GatewayServer
from surefoot.gateway.tenants import Tenants
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
) -> AsyncIterator[Gateway]:
    """Serve within the block; the server is ready when it begins and has ended when it is left."""
    backend = backend or FakeBackend()
    settings = HttpSettings(keep_alive_s=keep_alive_s, max_body_bytes=MAX_BODY_BYTES)
    app = create_app([backend], tenants or Tenants(), BaselinePolicy(), settings)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = GatewayServer(app, "127.0.0.1", 0, drain_s, ready.set_result)
    serving = asyncio.create_task(server.serve())
    await asyncio.wait([serving, ready], return_when=asyncio.FIRST_COMPLETED)
    url = ready.result()
    try:
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            yield Gateway(url, backend, server, client)
    finally:
        server.should_exit = True
        await serving


Serve = Callable[..., AbstractAsyncContextManager[Gateway]]
