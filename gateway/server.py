"""Runs the application: sockets, signals, draining, and the exit status."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType

import structlog
import uvicorn
from litestar import Litestar

from .http_protocol import BoundedHttpProtocol
from .lifecycle import RELEASE_S, Lifecycle


def serve(app: Litestar, host: str, port: int, drain_s: float, on_ready: Callable[[str], None]) -> int:
    """Serve until told to stop; returns the process's exit status.

    SIGTERM and the first SIGINT stop taking requests, and let running ones end for up to `drain_s`; a second
    SIGINT leaves at once. `on_ready` gets the URL as soon as requests are served. A backend that cannot be
    started, or an address that cannot be had, ends the server with status 1. Port 0 takes a free one.
    """
    server = GatewayServer(app, host, port, drain_s, on_ready)
    try:
        server.run()
    except SystemExit:
        # uvicorn's way to say that it cannot listen there; it has logged why, but not always where.
        structlog.get_logger().error("server.listen_failed", host=host, port=port)
        return 1
    return 1 if server.failed else 0


class GatewayServer(uvicorn.Server):
    """uvicorn, with a drain that ends requests by an error instead of a cut line."""

    def __init__(
        self, app: Litestar, host: str, port: int, drain_s: float, on_ready: Callable[[str], None]
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                http=BoundedHttpProtocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                # Longer than the minute for which proxies keep idle connections; else they meet closed ones.
                timeout_keep_alive=75,
                # Whole seconds, says uvicorn's type; ours is a bound on the backends' own drain anyway.
                timeout_graceful_shutdown=int(drain_s + RELEASE_S),
            )
        )
        self._lifecycle: Lifecycle = app.state.lifecycle
        self._drain_s = drain_s
        self._on_ready = on_ready
        self._log = structlog.get_logger()
        self._announcing: asyncio.Task[None] | None = None

    @property
    def failed(self) -> bool:
        """Whether a backend could not be started, or the server itself could not."""
        return self._lifecycle.failure is not None or not self.started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; the backends are still starting."""
        await super().startup(sockets)
        if self.started:
            self._announcing = asyncio.create_task(self._announce())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new connections, then let the backends drain while clients still get their answers."""
        self._log.info("server.stopping", drain_s=self._drain_s)
        if self._announcing is not None:
            self._announcing.cancel()
        stopping = asyncio.create_task(self._lifecycle.stop(self._drain_s))
        await super().shutdown(sockets)
        await stopping
        self._log.info("server.stopped")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ask the loop to end; do not raise the signal again afterwards, as the process ends in order."""
        if self.should_exit and sig == signal.SIGINT:
            # Not sys.exit: that would wait for the threads that are to be left.
            os._exit(130)
        self.should_exit = True

    async def _announce(self) -> None:
        await self._lifecycle.started.wait()
        if self._lifecycle.failure is not None:
            self.should_exit = True
            return
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        self._on_ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
