"""HTTP as uvicorn speaks it, with what a server needs that stands alone."""

from __future__ import annotations

from http import HTTPStatus

from msgspec import json
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .errors import GatewayError, HeadTooLarge, InvalidRequest, to_http

MAX_HEAD_BYTES = 64 * 1024
"""Of a request's first line and headers. Until it is complete, a head may take two reads more."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Refuses heads without end, which httptools would collect, and does not advertise WebSockets."""

    _in_head = False
    _num_head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Parse what was read; refuse a head that is too large and still not complete."""
        was_in_head = self._in_head
        super().data_received(data)
        if was_in_head and self._in_head and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("")

    def on_message_begin(self) -> None:
        """Called by the parser at a request's first byte."""
        self._in_head, self._num_head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Called by the parser; what it raises ends in `send_400_response`."""
        self._in_head = False
        self._num_head_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise ValueError
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request to the application, in OpenAI's shape, and hang up."""
        error: GatewayError = InvalidRequest(msg)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            error = HeadTooLarge(
                f"The first line and the headers exceed the limit of {MAX_HEAD_BYTES} bytes."
            )
        answer = to_http(error)
        body = json.encode(answer.body)
        head = (
            f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        # uvicorn's own tells the operator to install a library. The request is served as plain HTTP.
        self.logger.info("A client asked for an upgrade of its connection.")
