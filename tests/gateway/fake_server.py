"""A program: serves a `FakeBackend` until a signal. Its one argument is a JSON object of options."""

from __future__ import annotations

import asyncio
import json
import sys

from surefoot.backends.fake import FakeBackend, Script
from surefoot.gateway.app import create_app
from surefoot.gateway.logs import configure_logs
from surefoot.gateway.server import serve
from surefoot.gateway.tenants import Tenants
from surefoot.policies.baseline import BaselinePolicy


def main(options: dict[str, object]) -> int:
    """Options: `gated`, token 1 never comes; `fails`, the backend cannot start; `drain_s`."""
    configure_logs("json")
    backend = FakeBackend(
        Script(gates={1: asyncio.Event()} if options.get("gated") else {}),
        start_error=RuntimeError("no such weights") if options.get("fails") else None,
    )
    app = create_app([backend], Tenants(), BaselinePolicy())
    return serve(
        app, "127.0.0.1", int(str(options.get("port", 0))), float(str(options.get("drain_s", 5))), announce
    )


def announce(url: str) -> None:
    """Tell the test where to go."""
    sys.stdout.write(url + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
