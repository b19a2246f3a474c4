"""A gateway over a `FakeBackend`: in process for tables of requests, on a socket for what needs one."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog
from litestar.testing import TestClient

from surefoot.backends.fake import FakeBackend
from surefoot.gateway.app import create_app
from surefoot.gateway.http_settings import HttpSettings
from surefoot.gateway.tenants import Tenants
from surefoot.policies.baseline import BaselinePolicy

from .harness import MAX_BODY_BYTES, Serve, serve_fake


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio, as the product does."""
    return "asyncio"


@pytest.fixture
def serve() -> Serve:
    """Starts a gateway on a socket: `async with serve(backend, tenants) as gateway`."""
    return serve_fake


@pytest.fixture
def backend() -> FakeBackend:
    """The backend behind `http`."""
    return FakeBackend()


@pytest.fixture
def http(backend: FakeBackend) -> Iterator[TestClient]:
    """A client of a gateway in process, without a socket."""
    settings = HttpSettings(max_body_bytes=MAX_BODY_BYTES)
    app = create_app([backend], Tenants(), BaselinePolicy(), settings)
    with TestClient(app, raise_server_exceptions=False) as client:
        assert client.get("/health/ready").status_code == 200
        yield client


@pytest.fixture
def restored_logs() -> Iterator[None]:
    """Puts logging back as it was."""
    config, root = structlog.get_config(), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.configure(**config)
    root.handlers[:] = handlers
    root.setLevel(level)
