"""One HTTP request's requests to a backend, running side by side, their events merged into one stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from msgspec import Struct

from surefoot.backends.base import Backend
from surefoot.backends.types import Chunk, Event, Finished, GenerateRequest, PromptEcho, Started


class Arrival(Struct, frozen=True):
    """An event, and the place of its prompt in the HTTP request."""

    prompt: int
    event: PromptEcho | Chunk | Finished


class Generation:
    """Runs while its context is open; leaving the context aborts what has not finished.

    Call `started` once, then read `events`. Both raise what the backend raised.
    """

    def __init__(self, backend: Backend, requests: Sequence[GenerateRequest]) -> None:
        self._backend = backend
        self._requests = requests
        self._tasks: list[asyncio.Task[None]] = []
        # Not bounded: a request's output is, and a slow reader of one prompt must not hold up the others.
        self._queue: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue()
        self._early: deque[Arrival] = deque()
        self._num_left = len(requests)

    async def __aenter__(self) -> Generation:
        self._tasks = [
            asyncio.create_task(self._pump(i, request)) for i, request in enumerate(self._requests)
        ]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def started(self) -> list[Started]:
        """Wait until the backend took every request."""
        started: dict[int, Started] = {}
        while len(started) < len(self._requests):
            prompt, event = await self._next(None)
            if isinstance(event, Started):
                started[prompt] = event
            else:
                self._early.append(Arrival(prompt, event))
        return [started[prompt] for prompt in range(len(self._requests))]

    async def events(self, quiet_s: float | None = None) -> AsyncGenerator[Arrival | None, None]:
        """All events until every request has finished; None whenever `quiet_s` seconds pass without one."""
        while self._num_left:
            if self._early:
                arrival = self._early.popleft()
            else:
                try:
                    prompt, event = await self._next(quiet_s)
                except TimeoutError:
                    yield None
                    continue
                assert not isinstance(event, Started), "a request starts once"
                arrival = Arrival(prompt, event)
            if isinstance(arrival.event, Finished):
                self._num_left -= 1
            yield arrival

    async def _next(self, quiet_s: float | None) -> tuple[int, Event]:
        if self._queue.empty():
            async with asyncio.timeout(quiet_s):
                prompt, event = await self._queue.get()
        else:
            prompt, event = self._queue.get_nowait()
        if isinstance(event, Exception):
            raise event
        return prompt, event

    async def _pump(self, prompt: int, request: GenerateRequest) -> None:
        try:
            async with aclosing(self._backend.generate(request)) as events:
                async for event in events:
                    self._queue.put_nowait((prompt, event))
        except Exception as error:
            self._queue.put_nowait((prompt, error))
