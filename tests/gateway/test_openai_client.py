"""The real openai client, sync and async, against a socket."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from surefoot.backends.errors import ContextTooLong, EngineFailed, Overloaded
from surefoot.backends.fake import FakeBackend, Script
from surefoot.gateway.tenants import Tenant, Tenants, new_key

from .harness import Gateway, Serve

pytestmark = pytest.mark.anyio
MESSAGES: Any = [{"role": "user", "content": "Hi"}]


def client(gateway: Gateway, **options: Any) -> openai.AsyncOpenAI:
    """The async client of a gateway, without retries."""
    options = {"api_key": "unused", "max_retries": 0} | options
    return openai.AsyncOpenAI(base_url=gateway.url + "/v1", **options)


async def test_whole_answers(serve: Serve) -> None:
    """Chats, completions and models parse into the client's types."""
    async with serve() as gateway, client(gateway) as api:
        chat = await api.chat.completions.create(
            model="fake", messages=MESSAGES, logprobs=True, top_logprobs=2
        )
        assert chat.choices[0].message.content == "Hello, world!"
        assert chat.usage is not None
        assert chat.usage.total_tokens == 5
        assert chat.choices[0].logprobs is not None
        assert chat.choices[0].logprobs.content is not None
        assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2
        text = await api.completions.create(model="fake", prompt=["a", "b"], n=2, echo=True, logprobs=1)
        assert [choice.text for choice in text.choices] == ["aHello, world!"] * 2 + ["bHello, world!"] * 2
        assert [model.id async for model in api.models.list()] == ["fake"]
        assert (await api.models.retrieve("fake")).id == "fake"


async def test_an_answer_goes_on_with_the_conversation(serve: Serve) -> None:
    """An answer's message is accepted in the next request: as the client's object, and as its dictionary."""
    async with serve() as gateway, client(gateway) as api:
        message: Any = (await api.chat.completions.create(model="fake", messages=MESSAGES)).choices[0].message
        for turn in (message, message.model_dump(), message.model_dump(exclude_none=True)):
            await api.chat.completions.create(model="fake", messages=[*MESSAGES, turn, *MESSAGES])
    sent = [request.prompt for request in gateway.backend.requests[1:]]
    assert len(sent) == 3
    assert all(each == sent[0] for each in sent)


async def test_streams(serve: Serve) -> None:
    """A stream gives the text, the reason and, if asked, the usage."""
    async with serve() as gateway, client(gateway) as api:
        stream = await api.chat.completions.create(
            model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello, world!"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 4
        texts = await api.completions.create(model="fake", prompt="a", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in texts]) == "Hello, world!"


async def test_the_sync_client(serve: Serve) -> None:
    """The blocking client works the same, whole and streamed."""
    async with serve() as gateway:

        def talk() -> list[str | None]:
            with openai.OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=0) as api:
                whole = api.chat.completions.create(model="fake", messages=MESSAGES)
                stream = api.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
                pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
                return [whole.choices[0].message.content, "".join(pieces)]

        assert await asyncio.to_thread(talk) == ["Hello, world!"] * 2


async def test_keep_alives_do_not_disturb(serve: Serve) -> None:
    """The client reads over comment lines."""
    gate = asyncio.Event()
    backend = FakeBackend(Script(gates={0: gate, 2: gate}))
    async with serve(backend, keep_alive_s=0.02) as gateway, client(gateway) as api:
        stream = await api.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        asyncio.get_running_loop().call_later(0.15, gate.set)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Hello, world!"


ERRORS: list[tuple[Exception, type[openai.APIStatusError], str]] = [
    (ContextTooLong("Too long.", "messages"), openai.BadRequestError, "context_length_exceeded"),
    (EngineFailed("Down."), openai.InternalServerError, "engine_failed"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("raised", "expected", "code"), ERRORS)
async def test_errors(
    serve: Serve, stream: bool, raised: Exception, expected: type[openai.APIStatusError], code: str
) -> None:
    """The client raises its own class, with our code, param and request id."""
    async with serve(FakeBackend(Script(error_at_start=raised))) as gateway, client(gateway) as api:
        with pytest.raises(expected) as caught:
            await api.chat.completions.create(
                model="fake", messages=MESSAGES, stream=stream, extra_headers={"x-request-id": "mine"}
            )
    assert (caught.value.code, caught.value.request_id) == (code, "mine")
    assert caught.value.param == getattr(raised, "param", None)


async def test_wrong_requests(serve: Serve) -> None:
    """Unknown models and fields are the client's NotFoundError and BadRequestError."""
    async with serve() as gateway, client(gateway) as api:
        with pytest.raises(openai.NotFoundError):
            await api.chat.completions.create(model="gpt-9", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError, match="temprature"):
            await api.chat.completions.create(model="fake", messages=MESSAGES, extra_body={"temprature": 1})


async def test_an_error_within_a_stream(serve: Serve) -> None:
    """After what was sent, the client raises an APIError with our message."""
    backend = FakeBackend(Script(error=EngineFailed("The engine failed."), error_at=2))
    text = ""
    async with serve(backend) as gateway, client(gateway) as api:
        stream = await api.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match=r"The engine failed\.") as caught:  # noqa: PT012 (text before)
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
    assert text == "Hello,"
    assert caught.value.code == "engine_failed"


async def test_retries(serve: Serve) -> None:
    """The client comes back after an overload, as told, and gets its answer."""

    class FullAtFirst(FakeBackend):
        """Refuses one request."""

        async def generate(self, request: Any) -> Any:
            """As its script says, which is another one from then on."""
            events = super().generate(request)
            try:
                async for event in events:
                    yield event
            finally:
                self.script = Script()

    backend = FullAtFirst(Script(error_at_start=Overloaded("Full.")))
    async with serve(backend) as gateway, client(gateway, max_retries=2) as api:
        answer = await api.chat.completions.create(model="fake", messages=MESSAGES)
        assert answer.choices[0].message.content == "Hello, world!"
        assert gateway.server.server_state.total_requests == 2


async def test_no_retries_of_what_cannot_succeed(serve: Serve) -> None:
    """A passed deadline is not tried again, though the status alone would say so."""
    backend = FakeBackend(Script(gates={0: asyncio.Event()}))
    async with serve(backend) as gateway, client(gateway, max_retries=2) as api:
        with pytest.raises(openai.InternalServerError):
            await api.chat.completions.create(
                model="fake", messages=MESSAGES, extra_headers={"x-surefoot-deadline-ms": "30"}
            )
        assert gateway.server.server_state.total_requests == 1


async def test_closing_a_stream_aborts(serve: Serve) -> None:
    """Leaving a stream early ends the request in the backend."""
    backend = FakeBackend(Script(gates={1: asyncio.Event()}))
    async with serve(backend) as gateway, client(gateway) as api:
        stream = await api.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        async for _ in stream:
            break
        await stream.close()
        async with asyncio.timeout(60):
            await backend.idle()
    assert backend.num_aborted == 1


async def test_keys(serve: Serve) -> None:
    """With tenants, a right key is served and a wrong one is the client's AuthenticationError."""
    key, key_hash = new_key()
    tenants = Tenants([Tenant(id="acme", key_hashes=(key_hash,))])
    async with serve(tenants=tenants) as gateway:
        async with client(gateway, api_key=key) as api:
            assert [model.id async for model in api.models.list()] == ["fake"]
        async with client(gateway, api_key="wrong") as api:
            with pytest.raises(openai.AuthenticationError) as caught:
                await api.models.list()
    assert caught.value.code == "invalid_api_key"
