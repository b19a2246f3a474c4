"""Sends an answer, whole or as a stream, for as long as somebody listens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import structlog
from litestar.types import Receive, Scope, Send
from msgspec import Struct

from surefoot.backends.types import Finished, Started

from . import sse
from .answers import Answer
from .connection import cancel_on_disconnect
from .errors import ClientGone, is_ours, to_http
from .event_sender import EventSender
from .generation import Arrival, Generation
from .metrics import GapMeter
from .record import RequestRecord


class Delivery(Struct, frozen=True, kw_only=True):
    """An ASGI application that answers one request; made anew for each.

    Nothing is sent before the backend has taken the request, so errors until then are raised, and become
    plain HTTP errors. Later ones end a stream with an error event: no `[DONE]` follows it.
    """

    generation: Generation
    answer: Answer[Any]
    record: RequestRecord
    gaps: GapMeter
    admission: AbstractContextManager[None]
    """Open while the request runs; to open it may be refused."""
    streams: bool
    keep_alive_s: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the generation and send what it gives; end it when the client goes away."""
        try:
            async with cancel_on_disconnect(receive):
                with self.admission:
                    async with self.generation:
                        last = await (self._stream(send) if self.streams else self._whole())
        except ClientGone:
            self.record.client_gone = True
            return
        if not self.streams:
            # Only now, so that its headers tell what is left of the tenant's limits after this request.
            await send_start(
                send, 200, {"content-type": "application/json", "content-length": str(len(last))}
            )
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _stream(self, send: Send) -> bytes:
        opening = await self._opening()
        chunks = sse.ChunkEvents(self.answer.empty())
        await send_start(send, 200, sse.HEADERS)
        async with EventSender(send, self.keep_alive_s) as sender:
            try:
                for piece in opening:
                    await sender.send(chunks.event(piece))
                async for arrival in self.generation.events():
                    for piece in self._pieces(arrival):
                        await sender.send(chunks.event(piece))
                for chunk in self.answer.closing(self.record.totals):
                    await sender.send(sse.data_event(chunk))
            except Exception as error:
                return sse.data_event(self._explain(error))
        return sse.DONE

    async def _whole(self) -> bytes:
        made = await self._opening()
        async for arrival in self.generation.events():
            made += self._pieces(arrival)
        return msgspec.json.encode(self.answer.fold(made, self.record.totals))

    async def _opening(self) -> list[Any]:
        started = await self.generation.started()
        for event in started:
            self.record.observe(event)
        return list(self.answer.opening(started[0].system_fingerprint))

    def _pieces(self, arrival: Arrival) -> Iterable[Any]:
        """What an event adds to the answer."""
        event = arrival.event
        self.record.observe(event)
        if isinstance(event, Finished):
            return ()
        assert not isinstance(event, Started), "a request starts once"
        self.gaps.observe(arrival.prompt, event)
        return self.answer.pieces(arrival.prompt, event)

    def _explain(self, error: Exception) -> msgspec.Struct:
        if not is_ours(error):
            structlog.get_logger().error("request.crashed", request_id=self.record.request_id, exc_info=error)
        body = to_http(error).body
        self.record.error = body.error.code
        return body


async def send_start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    """Send a response's first line and its headers."""
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
