"""One HTTP/1.1 response from bytes, without I/O.

A general client spends 60 to 200 us a token on layers that a load generator beside the server cannot afford
(docs/benchmarking.md, "The client's own cost"); this is all of HTTP that a stream of tokens needs.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from .errors import Disconnected, ProtocolFailed

MAX_HEAD_BYTES = 64 * 1024


class ResponseHead(Struct, frozen=True):
    """Status and headers; header names in lower case."""

    status: int
    headers: dict[str, str]

    @property
    def keeps_alive(self) -> bool:
        """Whether the server will take another request on this connection."""
        return "close" not in self.headers.get("connection", "").lower()


class Framing(Enum):
    """How the end of the body is known."""

    CHUNKED = "chunked"
    LENGTH = "length"
    CLOSE = "close"


class Line(Enum):
    """The line that a chunked body expects next."""

    SIZE = "size"
    CHUNK_END = "chunk end"
    TRAILER = "trailer"


class ResponseParser:
    """Takes a response in pieces of any size. `head` is None until it has come; `complete` says all has."""

    def __init__(self) -> None:
        self.head: ResponseHead | None = None
        self.complete = False
        self._held = b""
        self._framing = Framing.CLOSE
        self._line = Line.SIZE
        self._left = 0  # Bytes still to come: of the chunk, or of a body of known length.

    def feed(self, data: bytes) -> bytes:
        """Take what the socket gave; returns the body's bytes in it. `ProtocolFailed` if it is not HTTP."""
        if self._held:
            data, self._held = self._held + data, b""
        if self.head is None:
            data = self._feed_head(data)
        if self.head is None or self.complete:
            return b""
        if self._framing is Framing.CHUNKED:
            return self._feed_chunks(data)
        return self._feed_plain(data)

    def end(self) -> None:
        """The connection has ended. `Disconnected` unless that is how this body ends."""
        if self.head is None or self._framing is not Framing.CLOSE:
            raise Disconnected("the server closed the connection before the answer ended")
        self.complete = True

    def _feed_head(self, data: bytes) -> bytes:
        """Read the head if it is all there; returns what follows it."""
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > MAX_HEAD_BYTES:
                raise ProtocolFailed(f"no end of the response's head within {MAX_HEAD_BYTES} bytes")
            self._held = data
            return b""
        head, rest = _parse_head(data[:end]), data[end + 4 :]
        if 100 <= head.status < 200:  # Interim: the real one follows.
            return self._feed_head(rest)
        self.head = head
        self._frame(head)
        return rest

    def _frame(self, head: ResponseHead) -> None:
        if "chunked" in head.headers.get("transfer-encoding", "").lower():
            self._framing = Framing.CHUNKED
        elif head.status in (204, 304):
            self.complete = True
        elif (length := head.headers.get("content-length")) is not None:
            self._framing = Framing.LENGTH
            self._left = _number(length.encode(), 10)
            self.complete = self._left == 0

    def _feed_plain(self, data: bytes) -> bytes:
        if self._framing is Framing.LENGTH:
            data = data[: self._left]
            self._left -= len(data)
            self.complete = self._left == 0
        return data

    def _feed_chunks(self, data: bytes) -> bytes:
        pieces = []
        at = 0
        while not self.complete:
            if self._left:
                piece = data[at : at + self._left]
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if self._left:
                    break
            end = data.find(b"\r\n", at)
            if end < 0:
                self._held = data[at:]
                break
            self._read_line(data[at:end])
            at = end + 2
        return b"".join(pieces)

    def _read_line(self, line: bytes) -> None:
        if self._line is Line.SIZE:
            self._left = _number(line.partition(b";")[0], 16)
            self._line = Line.CHUNK_END if self._left else Line.TRAILER
        elif self._line is Line.CHUNK_END:
            if line:
                raise ProtocolFailed(f"expected the end of a chunk, got {line[:40]!r}")
            self._line = Line.SIZE
        else:
            self.complete = not line


def _parse_head(head: bytes) -> ResponseHead:
    status_line, *lines = head.decode("latin-1").split("\r\n")
    words = status_line.split(" ", 2)
    if not words[0].startswith("HTTP/1.") or len(words) < 2:
        raise ProtocolFailed(f"expected an HTTP/1.1 status line, got {status_line[:40]!r}")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return ResponseHead(_number(words[1].encode(), 10), headers)


def _number(text: bytes, base: int) -> int:
    try:
        value = int(text, base)
    except ValueError:
        value = -1
    if value < 0:
        raise ProtocolFailed(f"expected a number in base {base}, got {text[:40]!r}")
    return value
