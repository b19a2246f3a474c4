"""Comments break a stream's silence, and only while it is open."""

from __future__ import annotations

import asyncio

import pytest
from litestar.types import Message

from surefoot.gateway import sse
from surefoot.gateway.event_sender import EventSender

pytestmark = pytest.mark.anyio


class Wire:
    """Keeps what was sent; `comments` gets an item for each comment."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.comments: asyncio.Queue[None] = asyncio.Queue()

    async def __call__(self, message: Message) -> None:
        """An ASGI server's `send`."""
        assert message["type"] == "http.response.body"
        self.sent.append(message["body"])
        if message["body"] == sse.KEEP_ALIVE:
            self.comments.put_nowait(None)


async def test_nothing_is_sent_once_it_is_closed() -> None:
    """Comments come while nothing else does; leaving the context ends the task that sends them."""
    wire, tasks = Wire(), asyncio.all_tasks()
    async with EventSender(wire, 0.005) as sender:
        await sender.send(b"data: 1\n\n")
        for _ in range(3):
            await wire.comments.get()
    assert asyncio.all_tasks() == tasks
    assert wire.sent[:4] == [b"data: 1\n\n", *[sse.KEEP_ALIVE] * 3]


async def test_an_event_starts_the_silence_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next comment is due a whole period after the last event, not after the last comment."""
    now_s = 0.0

    async def wait(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        for _ in range(10):  # turns of the loop: the sender wakes, looks at the time, and sends or sleeps on
            await asyncio.sleep(0)

    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
    wire = Wire()
    async with EventSender(wire, 10.0) as sender:
        await wait(9.0)
        await sender.send(b"data: 1\n\n")
        await wait(9.0)
        assert wire.comments.empty()
        await wait(1.0)
        assert wire.comments.qsize() == 1


async def test_a_client_that_is_gone_does_not_hurt_the_watch() -> None:
    """An error of the server's `send` in a comment ends the comments, and nothing else."""

    async def broken(_: Message) -> None:
        failed.set()
        raise OSError("gone")

    failed, tasks = asyncio.Event(), asyncio.all_tasks()
    async with EventSender(broken, 0.005):
        await failed.wait()
    assert asyncio.all_tasks() == tasks
