"""Server-sent events, as OpenAI sends them."""

from __future__ import annotations

import msgspec

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # nginx collects a response unless it is told not to.
    "x-accel-buffering": "no",
}
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: readers skip it, and no proxy takes the connection for dead."""
DONE = b"data: [DONE]\n\n"


class ChunkEvents:
    """Events of chunks that differ in their one choice only: the rest is encoded once.

    `empty` is such a chunk without its choice; `choices` is its last field.
    """

    def __init__(self, empty: msgspec.Struct) -> None:
        self._before = b"data: " + msgspec.json.encode(empty).removesuffix(b"]}")
        assert self._before.endswith(b'"choices":['), "the choices come last"

    def event(self, choice: msgspec.Struct) -> bytes:
        """The event of the chunk with this choice."""
        return b"%b%b]}\n\n" % (self._before, msgspec.json.encode(choice))


def data_event(data: msgspec.Struct) -> bytes:
    """One event. JSON has no line breaks, so neither has the event's data."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
