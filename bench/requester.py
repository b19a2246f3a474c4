"""Makes the requests of a run, sends them and records what came of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
from msgspec import Struct

from .client import HttpClient
from .errors import RequestFailed, StreamFailed
from .latencies import measure
from .progress import Progress
from .prompts import Prompt, Prompts
from .records import RequestRecord
from .settings import BenchSettings
from .stream import CompletionStream, Usage


class Target(Struct, frozen=True, kw_only=True):
    """What the server serves and which optional fields it knows.

    `knows_usage`: `stream_options.include_usage`; `knows_ignore_eos`: False also where it is not wanted.
    """

    model: str
    knows_usage: bool = True
    knows_ignore_eos: bool = True

    def fields(self) -> dict[str, Any]:
        """Its part of a request's body."""
        fields: dict[str, Any] = {"model": self.model, "stream": True}
        if self.knows_usage:
            fields["stream_options"] = {"include_usage": True}
        if self.knows_ignore_eos:
            fields["ignore_eos"] = True
        return fields


async def ask(
    client: HttpClient, settings: BenchSettings, target: Target, prompt: Prompt, max_tokens: int
) -> Usage | None:
    """One request outside the run; returns the server's count of tokens. Raises `RequestFailed`."""
    stream = CompletionStream()
    body = _body(settings, target, prompt, max_tokens)
    head = await client.send("POST", settings.path, body, stream, settings.timeout_s)
    stream.check(head)
    return stream.usage


class Requester:
    """Sends the run's requests. Request `index` is the same whenever and beside whatever it is sent."""

    def __init__(
        self,
        client: HttpClient,
        settings: BenchSettings,
        target: Target,
        prompts: Prompts,
        progress: Progress,
    ) -> None:
        self._client = client
        self._settings = settings
        self._target = target
        self._prompts = prompts
        self._progress = progress

    async def send(self, index: int, scheduled_s: float | None = None) -> RequestRecord:
        """Send request `index`; never raises for what a server can do."""
        settings = self._settings
        prompt = self._prompts.prompt(index)
        body = _body(settings, self._target, prompt, self._max_tokens(index, prompt))
        start = time.perf_counter()
        stream = CompletionStream(self._counter(start))
        failure: RequestFailed | None = None
        self._progress.num_running += 1
        try:
            head = await self._client.send("POST", settings.path, body, stream, settings.timeout_s)
            stream.check(head)
            if not stream.chunk_times:
                raise StreamFailed("empty", "the stream ended well, but no chunk had any text")
        except RequestFailed as error:
            failure = error
        finally:
            self._progress.num_running -= 1
        return self._record(index, scheduled_s, start, stream, failure)

    def _counter(self, start: float) -> Callable[[float], None]:
        """What tells the progress of each chunk; called once per token, so it does little."""
        progress = self._progress
        first = True

        def count(at: float) -> None:
            nonlocal first
            progress.num_chunks += 1
            if first:
                first = False
                progress.recent_ttft_s.append(at - start)

        return count

    def _max_tokens(self, index: int, prompt: Prompt) -> int:
        if prompt.max_tokens is not None:
            return prompt.max_tokens
        return self._settings.output_tokens.draw(Random(f"output-{self._settings.seed}-{index}"))

    def _record(
        self,
        index: int,
        scheduled_s: float | None,
        start: float,
        stream: CompletionStream,
        failure: RequestFailed | None,
    ) -> RequestRecord:
        latencies = None
        if failure is None:
            self._progress.num_ok += 1
            assert stream.last_token_at is not None
            latencies = measure(start, stream.chunk_times, stream.last_token_at, stream.num_output_tokens)
        else:
            self._progress.num_failed += 1
        return RequestRecord(
            index=index,
            start_s=start - self._progress.started_at,
            scheduled_s=scheduled_s,
            end_s=time.perf_counter() - start,
            num_prompt_tokens=stream.usage.prompt_tokens if stream.usage else None,
            num_output_tokens=stream.num_output_tokens,
            counted_by_server=stream.usage is not None,
            num_chunks=len(stream.chunk_times),
            finish_reason=stream.finish_reason,
            error=failure.kind if failure else None,
            error_message=str(failure) if failure else None,
            latencies=latencies,
        )


def _body(settings: BenchSettings, target: Target, prompt: Prompt, max_tokens: int) -> bytes:
    fields = {
        **target.fields(),
        "max_tokens": max_tokens,
        **settings.extra,
        **prompt.body(settings.endpoint == "chat"),
    }
    return msgspec.json.encode(fields)
