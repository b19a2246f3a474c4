"""A tiny HTTP server whose every answer a test writes, byte for byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

MODELS = b'{"object": "list", "data": [{"id": "scripted", "object": "model"}]}'


@dataclass
class Call:
    """One request to a completions endpoint, and the means to answer it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    writer: asyncio.StreamWriter

    @property
    def num_words(self) -> int:
        """Words of the prompt."""
        prompt = self.body.get("prompt") or self.body["messages"][-1]["content"]
        return len(prompt.split())

    async def raw(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.writer.write(data)
        await self.writer.drain()

    async def start(self) -> None:
        """Send the head of a stream."""
        await self.raw(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )

    async def chunk(self, data: bytes) -> None:
        """Send bytes of a stream."""
        await self.raw(b"%x\r\n%s\r\n" % (len(data), data))

    async def event(self, data: dict[str, Any]) -> None:
        """Send one event."""
        await self.chunk(b"data: " + json.dumps(data).encode() + b"\n\n")

    async def text(self, text: str) -> None:
        """Send a piece of output, in the endpoint's form."""
        piece = {"delta": {"content": text}} if "chat" in self.path else {"text": text}
        await self.event({"choices": [{"index": 0, "finish_reason": None, **piece}]})

    async def finish(self, num_output_tokens: int, num_prompt_tokens: int | None = None) -> None:
        """Send the finish reason, the usage and the end."""
        await self.event({"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "length"}]})
        usage = {
            "prompt_tokens": self.num_words if num_prompt_tokens is None else num_prompt_tokens,
            "completion_tokens": num_output_tokens,
        }
        if self.body.get("stream_options", {}).get("include_usage"):
            await self.event({"choices": [], "usage": usage})
        await self.chunk(b"data: [DONE]\n\n")
        await self.raw(b"0\r\n\r\n")

    async def refuse(self, status: int, message: str) -> None:
        """Answer with an error in OpenAI's shape."""
        body = json.dumps({"error": {"message": message}}).encode()
        await self.raw(b"HTTP/1.1 %d No\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))

    def hang_up(self) -> None:
        """End the connection at once."""
        self.writer.transport.abort()


Script = Callable[[Call], Awaitable[None]]


def let_pass(seconds: float) -> None:
    """Put the running loop's clock forward: what waits for so long waits no longer, after it has read what is
    there. The loop is the test's own.
    """
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]  # a clock that can be told


@dataclass
class ScriptedServer:
    """Where it listens, and what it was asked."""

    url: str = ""
    models: bytes = MODELS
    calls: list[Call] = field(default_factory=list)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    gets: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    listener: asyncio.Server | None = None

    def die(self) -> None:
        """Stop listening and cut every connection."""
        assert self.listener is not None
        self.listener.close()
        for writer in self.writers:
            writer.transport.abort()


async def whole(call: Call) -> None:
    """A good answer of `max_tokens` tokens, one per chunk, as fast as can be."""
    await call.start()
    for _ in range(call.body["max_tokens"]):
        await call.text(" word")
    await call.finish(call.body["max_tokens"])


@asynccontextmanager
async def scripted(script: Script = whole) -> AsyncIterator[ScriptedServer]:
    """Run a server on a free port that answers each completion by `script`."""
    server = ScriptedServer()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.writers.append(writer)
        try:
            while head := await _read_head(reader):
                await _answer(server, script, head, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # The client has gone, which some tests are about.
        finally:
            writer.transport.abort()

    server.listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.listener.sockets[0].getsockname()
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        server.die()


async def _read_head(reader: asyncio.StreamReader) -> list[str]:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return []
    return head.decode().rstrip("\r\n").split("\r\n")


async def _answer(
    server: ScriptedServer,
    script: Script,
    head: list[str],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    method, path, _ = head[0].split(" ")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head[1:])}
    if method == "GET":
        server.gets.put_nowait(path)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(server.models), server.models))
        return
    body = json.loads(await reader.readexactly(int(headers["content-length"])))
    server.calls.append(call := Call(path, headers, body, writer))
    await script(call)
