#!/usr/bin/env python3
"""Stands in for `surefoot serve`: the same flags and paths, a fixed number of places, tokens at a fixed pace.

Run as a process of its own by `test_main_job.py`; it uses Python's own library alone.
"""

from __future__ import annotations

import asyncio
import json
import sys

FLAGS = dict(argument[2:].split("=", 1) for argument in sys.argv[2:-2])
PORT = int(sys.argv[-1])
TOKEN_S = 0.005
METRICS = (
    'surefoot_event_loop_lag_seconds_bucket{{le="0.01"}} {0}\n'
    'surefoot_event_loop_lag_seconds_bucket{{le="+Inf"}} {0}\n'
    "surefoot_event_loop_cpu_seconds_total {1}\n"
)


class Server:
    """One stream per place; who finds none waits and gets comments."""

    def __init__(self) -> None:
        self.places = asyncio.Semaphore(int(FLAGS.get("max-sequences", 64)))
        self.num_scrapes = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                length = next(
                    (line[15:] for line in head.lower().split("\r\n") if "content-length" in line), "0"
                )
                body = await reader.readexactly(int(length))
                if head.startswith("GET"):
                    self.get(head.split(" ")[1], writer)
                else:
                    await self.complete(json.loads(body), writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def get(self, path: str, writer: asyncio.StreamWriter) -> None:
        """Health, models and metrics; a scrape finds the histogram grown by 100, the CPU time by 0.5 s."""
        body = b'{"object": "list", "data": [{"id": "stub"}]}' if path == "/v1/models" else b"ok"
        if path == "/metrics":
            self.num_scrapes += 1
            body = METRICS.format(100 * self.num_scrapes, 0.5 * self.num_scrapes).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))

    async def complete(self, request: dict[str, int], writer: asyncio.StreamWriter) -> None:
        """A stream of `max_tokens` tokens, once there is a place."""

        async def send(data: bytes) -> None:
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            await writer.drain()

        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            try:
                await asyncio.wait_for(self.places.acquire(), float(FLAGS.get("keep-alive-s", 10)))
                break
            except TimeoutError:
                await send(b": keep-alive\n\n")
        try:
            for _ in range(request["max_tokens"]):
                await asyncio.sleep(TOKEN_S)
                await send(b'data: {"choices": [{"index": 0, "text": " x", "finish_reason": null}]}\n\n')
        finally:
            self.places.release()
        usage = {"prompt_tokens": 9, "completion_tokens": request["max_tokens"]}
        usage["prompt_tokens"] += len(str(request.get("prompt")).split())
        await send(b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}\n\n')
        await send(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


async def main() -> None:
    """Listen until killed."""
    async with await asyncio.start_server(Server().serve, "127.0.0.1", PORT) as server:
        await server.serve_forever()


asyncio.run(main())
