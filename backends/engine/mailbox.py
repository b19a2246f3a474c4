"""From callbacks on the event loop to one task that waits there."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Not bounded. Everything is called on `loop`, and one task takes.

    This is all that a stream of tokens needs of a queue: `asyncio.Queue`, with its bounds, joins and many
    waiters, costs several times as much for every token.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: list[T] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        """Add an item and wake the task that waits."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[T]:
        """All that was put since the last call, in order; waits while that is nothing."""
        if not self._items:
            self._waiter = self._loop.create_future()
            await self._waiter
        items, self._items = self._items, []
        return items
