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


def data_event(data: msgspec.Struct) -> bytes:
    """One event. JSON has no line breaks, so neither has the event's data."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
