"""One streamed completion: from the body's bytes to arrival times, counts, or the way it failed."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Raw, Struct

from .errors import StatusFailed, StreamFailed
from .http1 import ResponseHead
from .sse import SseSplitter

MAX_ERROR_CHARS = 300
NOTHING = Raw(b"null")


class PromptDetails(Struct, frozen=True):
    """Of the prompt's tokens, those that the server had in its cache."""

    cached_tokens: int = 0


class Usage(Struct, frozen=True):
    """The server's own count of tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class Delta(Struct):
    """What a chat chunk adds. Servers name a reasoning model's thoughts in either of two ways."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: Raw = NOTHING

    @property
    def has_tokens(self) -> bool:
        """Whether it carries output of any kind."""
        text = self.content or self.reasoning_content or self.reasoning or self.refusal
        return bool(text) or bytes(self.tool_calls) not in (b"null", b"[]")


class Choice(Struct):
    """A choice in a chunk: `delta` for chats, `text` for completions."""

    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether it carries output of any kind."""
        return bool(self.text) or (self.delta is not None and self.delta.has_tokens)


class Event(Struct):
    """The part of a stream's event that is looked at."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Raw = NOTHING


EVENT_DECODER = msgspec.json.Decoder(Event)


class CompletionStream:
    """Receives one answer. `on_chunk` is called with the arrival time of each chunk that carries text."""

    def __init__(self, on_chunk: Callable[[float], None] | None = None) -> None:
        self.chunk_times: list[float] = []
        self.last_token_at: float | None = None
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self._done = False
        self._sse = SseSplitter()
        self._decode = EVENT_DECODER.decode
        self._on_chunk = on_chunk
        self._refusal = b""

    @property
    def num_output_tokens(self) -> int:
        """Output tokens: the server's count, or one per chunk where it gives none."""
        return self.usage.completion_tokens if self.usage else len(self.chunk_times)

    def receive(self, head: ResponseHead, data: bytes, at: float) -> None:
        """Take the next bytes of the body. `StreamFailed` if they cannot be part of a good stream."""
        if head.status != 200:
            self._refusal += data
            return
        for event in self._sse.feed(data):
            if event == b"[DONE]":
                self._done = True
            else:
                self._take(event, at)

    def check(self, head: ResponseHead) -> None:
        """The answer is complete. Raises `RequestFailed` unless it is a whole stream with a status of 200."""
        if head.status != 200:
            raise StatusFailed(head.status, self._refusal.decode(errors="replace")[:MAX_ERROR_CHARS])
        if not self._done and self.finish_reason is None:
            raise StreamFailed("truncated", "the stream ended without [DONE] or a finish reason")

    def _take(self, event: bytes, at: float) -> None:
        try:
            fields = self._decode(event)
        except msgspec.DecodeError as error:
            raise StreamFailed("bad_event", f"{error}: {_excerpt(event)}") from error
        if bytes(fields.error) != b"null":
            raise StreamFailed("stream_error", _excerpt(bytes(fields.error)))
        for choice in fields.choices or ():
            if choice.has_tokens:
                self.chunk_times.append(at)
                self.last_token_at = at
                if self._on_chunk is not None:
                    self._on_chunk(at)
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
                self.last_token_at = at
        if fields.usage is not None:
            self.usage = fields.usage


def _excerpt(data: bytes) -> str:
    return data.decode(errors="replace")[:MAX_ERROR_CHARS]
