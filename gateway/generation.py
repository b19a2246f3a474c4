"""One HTTP request's requests to a backend, running side by side, their events in one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from msgspec import Struct

from surefoot.backends.base import Backend
from surefoot.backends.types import Event, GenerateRequest, Started


class Arrival(Struct, frozen=True):
    """An event, and the place of its prompt in the HTTP request."""

    prompt: int
    event: Event


Arrivals = AsyncGenerator[Arrival, None]


class Generation:
    """Runs while its context is open; leaving the context aborts what has not finished.

    Call `started` once, then read `events` to their end. Both raise what the backend raised.
    """

    def __init__(self, backend: Backend, requests: Sequence[GenerateRequest]) -> None:
        self._backend = backend
        self._requests = requests
        self._early: list[Arrival] = []

    async def __aenter__(self) -> Generation:
        streams = [self._backend.generate(request) for request in self._requests]
        self._arrivals = _alone(streams[0]) if len(streams) == 1 else _side_by_side(streams)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._arrivals.aclose()

    async def started(self) -> list[Started]:
        """Wait until the backend took every request."""
        started: dict[int, Started] = {}
        while len(started) < len(self._requests):
            arrival = await anext(self._arrivals)
            if isinstance(arrival.event, Started):
                started[arrival.prompt] = arrival.event
            else:
                self._early.append(arrival)
        return [started[prompt] for prompt in range(len(self._requests))]

    def events(self) -> Arrivals:
        """What comes after `started`, until every request has finished."""
        return _after(self._early, self._arrivals) if self._early else self._arrivals


async def _alone(stream: AsyncGenerator[Event, None]) -> Arrivals:
    """One stream is read where it is used: a task and a queue between would double a token's cost."""
    async with aclosing(stream):
        async for event in stream:
            yield Arrival(0, event)


async def _side_by_side(streams: Sequence[AsyncGenerator[Event, None]]) -> Arrivals:
    # Not bounded: a request's output is, and a slow reader of one prompt must not hold up the others.
    queue: asyncio.Queue[Arrival | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(prompt, stream, queue)) for prompt, stream in enumerate(streams)]
    num_left = len(tasks)
    try:
        while num_left:
            arrival = await queue.get()
            if isinstance(arrival, Exception):
                raise arrival
            if arrival is None:
                num_left -= 1
            else:
                yield arrival
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    prompt: int, stream: AsyncGenerator[Event, None], queue: asyncio.Queue[Arrival | Exception | None]
) -> None:
    """Pass on a stream's events, then None, or the exception that ended it."""
    try:
        async with aclosing(stream):
            async for event in stream:
                queue.put_nowait(Arrival(prompt, event))
        queue.put_nowait(None)
    except Exception as error:
        queue.put_nowait(error)


async def _after(early: Sequence[Arrival], arrivals: Arrivals) -> Arrivals:
    for arrival in early:
        yield arrival
    async for arrival in arrivals:
        yield arrival
