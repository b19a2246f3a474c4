"""Whether streams that wait get their keep-alive comments on time."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from msgspec import Struct

from .client import HttpClient
from .errors import BenchError, StreamFailed
from .http1 import ResponseHead
from .sse import SseSplitter
from .stream import EVENT_DECODER

PATH = "/v1/completions"


class KeepAliveReport(Struct, frozen=True, kw_only=True):
    """Of streams that waited. `late_s` has, for each comment, by how much the silence before it was too long.

    A stream that is silent for longer than the period at the end adds what it was late by then.
    """

    num_waiting: int
    num_comments: int
    late_s: list[float]


class Waiter:
    """Receives one stream and notes the silences that its comments end."""

    def __init__(self, period_s: float) -> None:
        self.late_s: list[float] = []
        self.num_comments = 0
        self.waits = True
        self._sse = SseSplitter()
        self._period_s = period_s
        self._heard_at = time.perf_counter()

    def receive(self, head: ResponseHead, data: bytes, at: float) -> None:
        """Take the next bytes of the body."""
        events = self._sse.feed(data)
        if self._sse.num_comments > self.num_comments:
            self.num_comments = self._sse.num_comments
            self.late_s.append(at - self._heard_at - self._period_s)
        self.waits = self.waits and not any(_has_text(event) for event in events)
        self._heard_at = at

    def end(self) -> None:
        """The observation ends now."""
        silent_s = time.perf_counter() - self._heard_at
        if self.waits and silent_s > self._period_s:
            self.late_s.append(silent_s - self._period_s)


async def watch_waiting(
    url: str, body: dict[str, Any], num_running: int, num_waiting: int, period_s: float, for_s: float
) -> KeepAliveReport:
    """Open so many streams at once, watch them for a while, and drop them all.

    The server must run `num_running` at once, each for longer than `for_s`. `BenchError` if fewer than
    `num_waiting` then waited, as nothing would have been measured.
    """
    payload = msgspec.json.encode({**body, "stream": True})
    waiters = [Waiter(period_s) for _ in range(num_running + num_waiting)]
    async with HttpClient(url) as client:
        tasks = [asyncio.create_task(client.send("POST", PATH, payload, waiter)) for waiter in waiters]
        done, pending = await asyncio.wait(tasks, timeout=for_s)
        for waiter in waiters:
            waiter.end()
        for task in pending:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    waited = [waiter for waiter, task in zip(waiters, tasks, strict=True) if waiter.waits and task in pending]
    if len(waited) < num_waiting:
        raise BenchError(
            f"{len(waited)} streams waited, and {len(done)} ended: expected {num_waiting} waiting"
        )
    return KeepAliveReport(
        num_waiting=len(waited),
        num_comments=sum(waiter.num_comments for waiter in waited),
        late_s=[late for waiter in waited for late in waiter.late_s],
    )


def _has_text(event: bytes) -> bool:
    if event == b"[DONE]":
        return False
    try:
        return any(choice.has_tokens for choice in EVENT_DECODER.decode(event).choices or ())
    except msgspec.DecodeError as error:
        raise StreamFailed("bad_event", str(error)) from error
