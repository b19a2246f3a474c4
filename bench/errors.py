"""What can go wrong.

BenchError                the run cannot start or go on: no server, one that takes nothing, a bad argument
└─ BadArgument            an argument is of no use: its text, or the file that it names
RequestFailed             one request failed; the run goes on and counts it by `kind`
├─ ConnectFailed          no connection
├─ Disconnected           the connection ended before the answer did
├─ ProtocolFailed         what came is not HTTP/1.1
├─ StreamFailed           an error event, an event that is not JSON, an end before its time, or no text at all
├─ StatusFailed           any status but 200
└─ TimedOut               `--timeout` passed
"""

from __future__ import annotations


class BenchError(Exception):
    """The run cannot start or go on. The message is for the person who started it."""


class BadArgument(BenchError, ValueError):
    """An argument is of no use: its text, or the file that it names."""


class RequestFailed(Exception):
    """One request failed. `kind` is what errors are counted by."""

    kind = "failed"


class ConnectFailed(RequestFailed):
    """No connection could be made."""

    kind = "connect"


class Disconnected(RequestFailed):
    """The connection ended before the answer did."""

    kind = "disconnect"


class ProtocolFailed(RequestFailed):
    """What came is not HTTP/1.1."""

    kind = "protocol"


class TimedOut(RequestFailed):
    """The answer took longer than allowed."""

    kind = "timeout"


class StreamFailed(RequestFailed):
    """The stream itself failed; `kind` says how: stream_error, bad_event, truncated or empty."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class StatusFailed(RequestFailed):
    """The server answered with a status other than 200."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"status {status}: {body}")
        self.status = status
        self.body = body
        self.kind = f"http_{status}"
