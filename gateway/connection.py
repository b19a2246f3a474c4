"""What the gateway knows of a client's connection: the body that it sends, and that it goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from .errors import BodyTooLarge, ClientGone, InvalidRequest, shortened

Receive = Callable[[], Awaitable[Any]]

MAX_LENGTH_DIGITS = 20
"""As many as the largest number of 64 bits has."""


async def read_body(receive: Receive, headers: Mapping[str, str], limit: int) -> bytes:
    """Read the body, but no more than `limit` bytes of it, whether or not its length was announced."""
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise InvalidRequest(
            f"The body's content-encoding is {shortened(encoding)!r}, which is not supported: send the body"
            " uncompressed.",
            "content-encoding",
        )
    announced = headers.get("content-length", "0")
    if not (announced.isascii() and announced.isdecimal() and len(announced) <= MAX_LENGTH_DIGITS):
        raise InvalidRequest(f"Invalid content-length: {shortened(announced)!r}.")
    if int(announced) > limit:
        raise BodyTooLarge(f"The body has {announced} bytes, more than the limit of {limit}.")
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("The client went away while it sent the body.")
        body += message.get("body", b"")
        if len(body) > limit:
            raise BodyTooLarge(f"The body exceeds the limit of {limit} bytes.")
        more = message.get("more_body", False)
    return bytes(body)


@asynccontextmanager
async def cancel_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block, and raise `ClientGone` from it, when the client goes away.

    For use after the body was read. A server also reports a disconnect when a response is complete, so the
    message that completes it must be sent after the block.
    """
    work = asyncio.current_task()
    assert work is not None, "runs in a task"
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        work.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if gone and work.uncancel() == 0:
            raise ClientGone("The client went away.") from None
        raise
    finally:
        watcher.cancel()
        await asyncio.wait([watcher])
