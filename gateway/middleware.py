"""The outermost layer: every request gets an id, a record, and one log event at its end."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import msgspec
import structlog
from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ClientGone
from .record import RequestRecord

SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
QUIET_PATHS = ("/health", "/metrics")
"""Asked every few seconds by machines: logged at debug level, "not ready" too, but no errors."""


def record_of(scope: Scope) -> RequestRecord:
    """The record of the request that is being served."""
    record = scope["state"]["record"]
    assert isinstance(record, RequestRecord)
    return record


class RequestBoundary:
    """Wraps the whole application, unknown paths and errors included."""

    def __init__(self, app: ASGIApp, observe: Callable[[RequestRecord], None]) -> None:
        """`observe` gets every request once, before the client can know that it is over."""
        self._app = app
        self._observe = observe
        self._log = structlog.get_logger()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == ScopeType.WEBSOCKET:
            await self._app(scope, receive, send)
            return
        # Quoted, so that a line break in a path cannot forge a line of the log.
        path = quote(scope["path"], safe="/:@")
        record = RequestRecord(request_id=_request_id(scope), method=scope["method"], path=path)
        scope["state"]["record"] = record

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], *_own_headers(record)]
            elif not message.get("more_body"):
                self._count(record, scope)
            await send(message)

        try:
            await self._app(scope, receive, send_marked)
        except asyncio.CancelledError:
            record.error = "cancelled"
            raise
        except ClientGone:
            record.client_gone = True
        except Exception as error:
            # Only what went wrong after the response had begun comes here; the server closes the connection.
            record.error = "internal_error"
            self._log.error(
                "request.crashed", request_id=record.request_id, exc_info=error.__cause__ or error
            )
        finally:
            self._finish(record, scope)

    def _finish(self, record: RequestRecord, scope: Scope) -> None:
        if record.status is None:
            record.status = 499 if record.client_gone else 500
        self._count(record, scope)
        if record.started and record.observation is not None and self._log.is_enabled_for(logging.DEBUG):
            # For `surefoot policy replay`.
            observation = msgspec.to_builtins(record.observation)
            self._log.debug(
                "request.planned", request_id=record.request_id, plan=record.plan, observation=observation
            )
        level = "debug" if record.path.startswith(QUIET_PATHS) and record.error is None else "info"
        getattr(self._log, level)("request.finished", **record.log_fields())

    def _count(self, record: RequestRecord, scope: Scope) -> None:
        if not record.counted:
            record.counted = True
            record.route = scope.get("path_template")
            self._observe(record)


def _own_headers(record: RequestRecord) -> list[tuple[bytes, bytes]]:
    headers = {"x-request-id": record.request_id}
    if record.promise is not None:
        headers["x-surefoot-class"] = record.promise.name
    if record.plan is not None:
        headers["x-surefoot-plan"] = record.plan
    if record.quota is not None:
        headers |= record.quota.headers()
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def _request_id(scope: Any) -> str:
    sent = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return sent.decode() if SANE_ID.fullmatch(sent) else uuid.uuid4().hex
