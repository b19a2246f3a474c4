"""Sends an answer, whole or as a stream, for as long as somebody listens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractContextManager, aclosing
from typing import Any

import msgspec
import structlog
from litestar.types import Receive, Scope, Send
from msgspec import Struct

from surefoot.backends.types import Finished, Usage

from . import sse
from .answers import Answer
from .connection import cancel_on_disconnect
from .errors import ClientGone, is_ours, to_http
from .generation import Generation
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
        await send_start(send, 200, sse.HEADERS)
        try:
            for chunk in opening:
                await _send_piece(send, sse.data_event(chunk))
            async with aclosing(self._chunks(self.keep_alive_s)) as chunks:
                async for chunk in chunks:
                    await _send_piece(send, sse.KEEP_ALIVE if chunk is None else sse.data_event(chunk))
        except Exception as error:
            return sse.data_event(self._explain(error))
        return sse.DONE

    async def _whole(self) -> bytes:
        made = await self._opening()
        async with aclosing(self._chunks(None)) as chunks:
            made += [chunk async for chunk in chunks]
        return msgspec.json.encode(self.answer.fold(made))

    async def _opening(self) -> list[Any]:
        started = await self.generation.started()
        for event in started:
            self.record.observe(event)
        return list(self.answer.opening(started[0].system_fingerprint))

    async def _chunks(self, quiet_s: float | None) -> AsyncGenerator[Any, None]:
        """Chunks of the answer as they come, None for each silence of `quiet_s`."""
        usages = []
        async with aclosing(self.generation.events(quiet_s)) as arrivals:
            async for arrival in arrivals:
                if arrival is None:
                    yield None
                    continue
                self.record.observe(arrival.event)
                if isinstance(arrival.event, Finished):
                    usages.append(arrival.event.usage)
                    continue
                self.gaps.observe(arrival.prompt, arrival.event)
                for chunk in self.answer.chunks(arrival.prompt, arrival.event):
                    yield chunk
        for chunk in self.answer.closing(_total(usages)):
            yield chunk

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


async def _send_piece(send: Send, piece: bytes) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": True})


def _total(usages: list[Usage]) -> Usage:
    return Usage(
        num_prompt_tokens=sum(each.num_prompt_tokens for each in usages),
        num_output_tokens=sum(each.num_output_tokens for each in usages),
        num_cached_tokens=sum(each.num_cached_tokens for each in usages),
    )
