"""A small HTTP/1.1 client: one protocol object per connection, and every received piece is handled where it
arrives, without waking a task."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, cast
from urllib.parse import urlsplit

from .errors import BadArgument, ConnectFailed, Disconnected, ProtocolFailed, RequestFailed, TimedOut
from .http1 import ResponseHead, ResponseParser

MAX_IDLE_S = 2.0
"""An idle connection is used again for this long. Servers drop them after 5 s or more, and a request that
meets the drop would count as the server's error."""


class Receiver(Protocol):
    """What takes a body."""

    def receive(self, head: ResponseHead, data: bytes, at: float) -> None:
        """Take bytes of the body, which came at `at` (`time.perf_counter`). May raise `RequestFailed`."""


class Collector:
    """A receiver that keeps the whole body."""

    def __init__(self) -> None:
        self.body = b""

    def receive(self, head: ResponseHead, data: bytes, at: float) -> None:
        """Append `data`."""
        self.body += data


class Connection(asyncio.Protocol):
    """One connection. At most one exchange at a time.

    `heard`: whether anything came since the last exchange began.
    """

    def __init__(self) -> None:
        self.idle_since = 0.0
        self.heard = False
        self._transport: asyncio.Transport | None = None
        self._parser = ResponseParser()
        self._receiver: Receiver | None = None
        self._answered: asyncio.Future[ResponseHead] | None = None

    @property
    def usable(self) -> bool:
        """Whether another exchange may start on it now."""
        open_ = self._transport is not None and not self._transport.is_closing()
        return open_ and time.perf_counter() - self.idle_since < MAX_IDLE_S

    def close(self) -> None:
        """Drop the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    async def exchange(self, request: bytes, receiver: Receiver) -> ResponseHead:
        """Send a request and pass its body to `receiver` until it is complete. Raises `RequestFailed`.

        The connection is closed unless the exchange ended well and the server keeps it.
        """
        assert self._transport is not None
        self._parser, self._receiver, self.heard = ResponseParser(), receiver, False
        self._answered = asyncio.get_running_loop().create_future()
        reusable = False
        try:
            self._transport.write(request)
            head = await self._answered
            reusable = head.keeps_alive
            return head
        finally:
            self._receiver = self._answered = None
            self.idle_since = time.perf_counter()
            if not reusable:
                self.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio calls this once, when the connection stands."""
        self._transport = cast("asyncio.Transport", transport)
        self.idle_since = time.perf_counter()

    def data_received(self, data: bytes) -> None:
        """asyncio calls this with each piece that the socket gives."""
        at = time.perf_counter()
        self.heard = True
        if self._receiver is None:  # Nothing was asked.
            self.close()
            return
        parser = self._parser
        try:
            body = parser.feed(data)
            if body and parser.head is not None:
                self._receiver.receive(parser.head, body, at)
        except RequestFailed as error:
            self._fail(error)
        else:
            self._finish_if_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio calls this once, when the connection has ended."""
        if self._answered is None:
            return
        try:
            self._parser.end()
        except Disconnected as error:
            self._fail(error)
        else:
            self._finish_if_complete()

    def _finish_if_complete(self) -> None:
        if self._parser.complete and self._answered is not None and not self._answered.done():
            assert self._parser.head is not None
            self._answered.set_result(self._parser.head)

    def _fail(self, error: RequestFailed) -> None:
        self._receiver = None
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(error)


class HttpClient:
    """A pool of connections to one server. `url` may end in `/v1`, as OpenAI clients write it."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadArgument(f"url = {url!r}: expected http://host:port or https://host:port")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        lines = {"host": parts.netloc.rpartition("@")[2], "user-agent": "surefoot-bench", **(headers or {})}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # Transports close in the loop's next turn.

    async def send(
        self, method: str, path: str, body: bytes, receiver: Receiver, timeout_s: float | None = None
    ) -> ResponseHead:
        """One request. Raises `RequestFailed`; a status other than 200 is the caller's to judge."""
        request = self._request(method, path, body)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(request, receiver)
        except TimeoutError as error:
            raise TimedOut(f"no complete answer within {timeout_s:g} s") from error

    async def get(self, path: str, timeout_s: float = 30.0) -> tuple[ResponseHead, bytes]:
        """A whole answer: its head and its body."""
        collector = Collector()
        head = await self.send("GET", path, b"", collector, timeout_s)
        return head, collector.body

    def _request(self, method: str, path: str, body: bytes) -> bytes:
        length = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n" if body else ""
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{length}\r\n"
        try:
            return head.encode("latin-1") + body
        except UnicodeEncodeError as error:
            raise ProtocolFailed(f"a header cannot be sent: {error}") from error

    async def _exchange(self, request: bytes, receiver: Receiver) -> ResponseHead:
        """On an idle connection if there is one, else on a fresh one.

        Some servers (llama.cpp's) close a kept connection at any time, also just as a request goes out. One
        that ends so, without a byte, did not take the request, which then gets a fresh connection.
        """
        if (idle := self._idle_connection()) is not None:
            try:
                return await self._exchange_on(idle, request, receiver)
            except Disconnected:
                if idle.heard:
                    raise
        return await self._exchange_on(await self._connect(), request, receiver)

    async def _exchange_on(self, connection: Connection, request: bytes, receiver: Receiver) -> ResponseHead:
        self._busy.add(connection)
        try:
            head = await connection.exchange(request, receiver)
        finally:
            self._busy.discard(connection)
        self._idle.append(connection)
        return head

    def _idle_connection(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            _, fresh = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
        except OSError as error:
            raise ConnectFailed(f"{self._host}:{self._port} cannot be reached: {error}") from error
        return fresh
