"""Sends one stream's events, and a comment whenever it has been silent for too long."""

from __future__ import annotations

import asyncio

from litestar.types import Send

from . import sse


class EventSender:
    """Keeps its stream alive while its context is open; only what is sent after that may end the response.

    A task of its own watches the silence: it wakes once a period, where a timeout around the wait for every
    event would be set and cancelled with each token.
    """

    def __init__(self, send: Send, keep_alive_s: float) -> None:
        self._send = send
        self._keep_alive_s = keep_alive_s
        self._now_s = asyncio.get_running_loop().time
        self._sent_s = self._now_s()

    async def __aenter__(self) -> EventSender:
        self._watch = asyncio.create_task(self._break_silence())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)

    async def send(self, event: bytes) -> None:
        """Send an event; waits while the client does not read."""
        self._sent_s = self._now_s()
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def _break_silence(self) -> None:
        while True:
            left_s = self._sent_s + self._keep_alive_s - self._now_s()
            if left_s > 0:
                await asyncio.sleep(left_s)
            else:
                await self.send(sse.KEEP_ALIVE)
