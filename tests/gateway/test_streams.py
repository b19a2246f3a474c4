"""Streams and disconnects on real sockets."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from surefoot.backends.errors import DeadlineExceeded, EngineFailed, NotReady
from surefoot.backends.fake import FakeBackend, Script

from .harness import Serve

pytestmark = pytest.mark.anyio

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
STREAM = BODY | {"stream": True}


async def gone(backend: FakeBackend, num_aborted: int = 1) -> None:
    """Wait until the backend has no request left, and check that so many were aborted."""
    async with asyncio.timeout(60):
        await backend.idle()
    assert (backend.num_running, backend.num_aborted) == (0, num_aborted)


async def started(backend: FakeBackend, count: int = 1) -> None:
    """Wait until the backend has got so many requests."""
    async with asyncio.timeout(60):
        await backend.asked(count)


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what the server does and announces to nobody."""
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0)


async def test_tokens_are_sent_as_they_come(serve: Serve) -> None:
    """A chunk reaches the client before the next token exists."""
    gate = asyncio.Event()
    backend = FakeBackend(Script(gates={2: gate}))
    async with serve(backend) as gateway, gateway.client.stream("POST", CHAT, json=STREAM) as response:
        lines = response.aiter_lines()
        text = ""
        while text != "Hello,":
            line = await anext(lines)
            if line.startswith("data: "):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "")
        assert backend.num_output_tokens == 2
        gate.set()
        assert [line async for line in lines][-2:] == ["data: [DONE]", ""]


async def test_keep_alive_while_queued(serve: Serve) -> None:
    """While a request waits for its first token, comment lines come, one per silent interval."""
    gate = asyncio.Event()
    backend = FakeBackend(Script(gates={0: gate}))
    async with (
        serve(backend, keep_alive_s=0.05) as gateway,
        gateway.client.stream("POST", CHAT, json=STREAM) as response,
    ):
        comments = 0
        lines = response.aiter_lines()
        while comments < 3:
            comments += await anext(lines) == ": keep-alive"
        gate.set()
        rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"


async def test_a_hundred_queued_streams_are_kept_alive(serve: Serve) -> None:
    """Each of a hundred waiting streams gets its comment lines (`make bench-main` measures how late)."""
    gate = asyncio.Event()
    backend = FakeBackend(Script(gates={0: gate}))
    num_waiting = 100

    async def listen(client: httpx.AsyncClient) -> None:
        nonlocal num_waiting
        async with client.stream("POST", CHAT, json=STREAM) as response:
            comments = 0
            async for line in response.aiter_lines():
                comments += line == ": keep-alive"
                if comments == 2 and line == ": keep-alive":
                    num_waiting -= 1
                if num_waiting == 0:
                    gate.set()
            assert comments >= 2

    async with serve(backend, keep_alive_s=0.2) as gateway:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=gateway.url, limits=limits, timeout=60) as client:
            await asyncio.gather(*(listen(client) for _ in range(100)))


@pytest.mark.parametrize(
    "error", [EngineFailed("The engine failed."), DeadlineExceeded("Too late."), ValueError("x")]
)
async def test_an_error_within_a_stream_is_its_last_event(serve: Serve, error: Exception) -> None:
    """After the first token an error is one event in OpenAI's shape; the stream ends without `[DONE]`."""
    backend = FakeBackend(Script(error=error, error_at=2))
    with capture_logs() as logs:
        async with serve(backend) as gateway:
            response = await gateway.client.post(CHAT, json=STREAM)
    assert response.status_code == 200
    last = [line for line in response.text.splitlines() if line][-1]
    body = json.loads(last.removeprefix("data: "))["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["type"] == "server_error"
    assert body["message"] == str(error) or isinstance(error, ValueError)
    assert "[DONE]" not in response.text
    (finished,) = [each for each in logs if each["event"] == "request.finished"]
    assert (finished["error"], finished["output_tokens"]) == (body["code"], 2)
    assert finished["finish_reason"] == ("deadline" if isinstance(error, DeadlineExceeded) else "error")
    assert 0 < finished["ttft_s"] <= finished["total_s"]
    assert "queue_s" not in finished


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("position", [0, 2])
async def test_going_away_aborts(serve: Serve, path: str, stream: bool, position: int) -> None:
    """A client that hangs up, queued or served, whole or streamed, aborts its request at once."""
    backend = FakeBackend(Script(gates={position: asyncio.Event()}))
    body = (
        BODY | {"stream": stream}
        if path == CHAT
        else {"model": "fake", "prompt": ["a", "b"], "stream": stream}
    )
    count = 1 if path == CHAT else 2
    with capture_logs() as logs:
        async with serve(backend) as gateway:
            asking = asyncio.create_task(gateway.client.post(path, json=body))
            await started(backend, count)
            asking.cancel()
            await asyncio.wait([asking])
            await gone(backend, count)
    (finished,) = [each for each in logs if each["event"] == "request.finished"]
    assert finished["client_gone"] is True
    assert finished["status"] == (200 if stream else 499)
    assert finished["finish_reason"] == "abort"
    assert ("ttft_s" in finished) == (position > 0)


async def test_going_away_while_sending_the_body(serve: Serve) -> None:
    """A client that hangs up in the middle of its body never reaches the backend."""
    with capture_logs() as logs:
        async with serve() as gateway:
            host, _, port = gateway.url.removeprefix("http://").partition(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
            await until(lambda: bool(gateway.server.server_state.tasks))
            writer.close()
            await until(lambda: bool(logs))
            assert not gateway.backend.requests
    (finished,) = [each for each in logs if each["event"] == "request.finished"]
    assert (finished["status"], finished["error"]) == (499, "client_gone")


async def test_a_client_that_does_not_read_can_still_go_away(serve: Serve) -> None:
    """A stream whose reader has stalled, so that sending waits, is aborted when the connection closes."""
    gate = asyncio.Event()
    backend = FakeBackend(Script(pieces=("x" * 100_000,) * 400, gates={399: gate}))
    async with serve(backend) as gateway:
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1000)
        body = json.dumps(STREAM).encode()
        writer.write(
            b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body
        )
        await started(backend)
        (connection,) = gateway.server.server_state.connections
        await until(lambda: connection.flow.write_paused)
        writer.transport.abort()
        await gone(backend)


async def test_a_storm_of_disconnects_leaves_nothing(serve: Serve) -> None:
    """After many disconnects at random moments every request has ended and the gateway serves on."""
    chance = random.Random(8)
    backend = FakeBackend(Script(pieces=("x",) * 200))

    async def hang_up(client: httpx.AsyncClient, after_s: float) -> None:
        asking = asyncio.create_task(client.post(CHAT, json=BODY | {"stream": chance.random() < 0.5, "n": 3}))
        await asyncio.wait([asking], timeout=after_s)
        asking.cancel()
        await asyncio.wait([asking])

    async with serve(backend) as gateway:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=gateway.url, limits=limits, timeout=60) as client:
            await asyncio.gather(*(hang_up(client, chance.random() * 0.6) for _ in range(60)))
        async with asyncio.timeout(60):
            await backend.idle()
        assert backend.num_finished + backend.num_aborted == len(backend.requests)
        assert (await gateway.client.post(CHAT, json=BODY)).status_code == 200


async def test_a_connection_serves_many_requests(serve: Serve) -> None:
    """Watching for a disconnect does not disturb the next request on the same connection."""
    async with serve() as gateway:
        for i in range(10):
            response = await gateway.client.post(CHAT, json=BODY | {"stream": i % 2 == 0})
            assert response.status_code == 200
        assert gateway.server.server_state.total_requests == 10
        assert len(gateway.server.server_state.connections) == 1
        assert gateway.backend.num_aborted == 0


async def test_a_deadline_ends_a_queued_request(serve: Serve) -> None:
    """A request whose deadline passes while it waits is a 504 that tells clients not to retry."""
    backend = FakeBackend(Script(gates={0: asyncio.Event()}))
    async with serve(backend) as gateway:
        response = await gateway.client.post(CHAT, json=BODY, headers={"x-surefoot-deadline-ms": "50"})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert response.headers["x-should-retry"] == "false"


async def test_one_failed_prompt_ends_the_others(serve: Serve) -> None:
    """When one of several prompts fails, the answer is its error and the others are aborted."""

    class FailsFirst(FakeBackend):
        """Fails the first request that it gets."""

        async def generate(self, request: Any) -> Any:
            """Hold all others at their first token."""
            self.script = Script(gates={0: asyncio.Event()})
            if request.request_id.endswith("-0"):
                await self.asked(2)
                raise NotReady("not now")
            async for event in super().generate(request):
                yield event

    backend = FailsFirst()
    async with serve(backend) as gateway:
        response = await gateway.client.post(TEXT, json={"model": "fake", "prompt": ["a", "b", "c"]})
        assert response.status_code == 503
        await gone(backend, 2)
