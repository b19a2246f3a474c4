"""A backend without a model: it says what its script tells it to, when its gates let it.

For tests of whatever stands above a backend, ours and other people's. It keeps the contract of
`Backend`, so what works against it may rely on nothing that the engine does not promise.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

from msgspec import Struct, field

from .errors import ContextTooLong, DeadlineExceeded, NotReady, UnknownModel
from .types import (
    BackendState,
    BackendStats,
    BackendStatus,
    CacheUsage,
    ChatPrompt,
    Chunk,
    Event,
    Finished,
    FinishReason,
    FormatStats,
    FormatTotal,
    GenerateRequest,
    ModelCard,
    Prompt,
    PromptEcho,
    SchedulerView,
    SpeculationStats,
    SpeculationUsage,
    Started,
    TextPrompt,
    Timings,
    TokenLogprob,
    TopLogprob,
    Usage,
)

BLOCK_BYTES = 1024


class Script(Struct, frozen=True, kw_only=True):
    """What every request is answered with.

    Each of `pieces` is one token. `gates[k]` is waited for before token k of each choice, so a gate at 0
    keeps a request queued. `error_at_start` is raised before `Started`, `error` before token `error_at`.
    """

    pieces: tuple[str, ...] = ("Hello", ",", " world", "!")
    finish_reason: FinishReason = FinishReason.STOP
    gates: Mapping[int, asyncio.Event] = field(default_factory=dict)
    error_at_start: Exception | None = None
    error: Exception | None = None
    error_at: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    speculation: SpeculationUsage | None = None
    cache: CacheUsage | None = None


class FakeBackend:
    """Answers from a `Script`, which may be replaced between requests; counts what it was asked."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        model: str = "fake",
        max_model_len: int = 2048,
        start_gate: asyncio.Event | None = None,
        start_error: Exception | None = None,
    ) -> None:
        self.script = script or Script()
        self.requests: list[GenerateRequest] = []
        self.scheduler_view = SchedulerView()
        self.speculation = SpeculationStats()
        self.formats: tuple[FormatStats, ...] = ()
        self.format_totals: tuple[FormatTotal, ...] = ()
        self.demoted_tokens_total: dict[str, int] = {}
        self.forgotten: list[str] = []
        """Flows whose outputs were to be forgotten."""
        self.num_running = 0
        self.num_finished = 0
        self.num_aborted = 0
        self.num_output_tokens = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.status = BackendStatus(BackendState.STARTING, "the fake backend was not started")
        self._models = (ModelCard(id=model, created=1_700_000_000, max_model_len=max_model_len),)
        self._start_gate = start_gate
        self._start_error = start_error
        self._idle = asyncio.Event()
        self._idle.set()
        self._arrived = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def models(self) -> Sequence[ModelCard]:
        """One model, known from the beginning."""
        return self._models

    @property
    def stats(self) -> BackendStats:
        """Requests held by a gate count as running; drafts, formats and demotions are what tests set."""
        return BackendStats(
            num_running=self.num_running,
            num_blocks=100,
            num_blocks_used=self.num_running,
            block_bytes=BLOCK_BYTES,
            formats=self.formats,
            format_totals=self.format_totals,
            demoted_tokens_total=self.demoted_tokens_total,
            prompt_tokens_total=self.num_prompt_tokens,
            output_tokens_total=self.num_output_tokens,
            prefix_cache_queries_total=self.num_prompt_tokens,
            prefix_cache_hits_total=self.num_cached_tokens,
            speculation=self.speculation,
        )

    @property
    def scheduler(self) -> SchedulerView:
        """What tests set as `scheduler_view`."""
        return self.scheduler_view

    def forget_outputs(self, flow: str) -> None:
        """Note the flow."""
        self.forgotten.append(flow)

    async def start(self) -> None:
        """Ready once the start gate, if there is one, is open."""
        if self._start_gate is not None:
            await self._start_gate.wait()
        if self._start_error is not None:
            self.status = BackendStatus(BackendState.FAILED, str(self._start_error))
            raise self._start_error
        self.status = BackendStatus(BackendState.READY)

    async def stop(self, drain_s: float) -> None:
        """Let running requests end for up to `drain_s`; after that each raises `NotReady`."""
        self.status = BackendStatus(BackendState.STOPPED, "the fake backend is stopping")
        try:
            async with asyncio.timeout(drain_s):
                await self.idle()
        except TimeoutError:
            self._ended.set()

    async def idle(self) -> None:
        """Wait until no request runs."""
        await self._idle.wait()

    async def asked(self, count: int) -> None:
        """Wait until so many requests have been admitted since the beginning."""
        while len(self.requests) < count:
            self._arrived.clear()
            await self._arrived.wait()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Play the script, a token of each choice in turn."""
        script = self.script
        num_prompt_tokens = self._admit(request, script)
        self._enter(request, num_prompt_tokens)
        try:
            yield Started(num_prompt_tokens, f"fp_fake_{request.plan.name}")
            for echo in _echoes(request):
                yield echo
            async for event in self._play(request, script, num_prompt_tokens):
                yield event
        except (GeneratorExit, asyncio.CancelledError):
            self.num_aborted += 1
            raise
        else:
            self.num_finished += 1
        finally:
            self._leave()

    def _admit(self, request: GenerateRequest, script: Script) -> int:
        if self.status.state is not BackendState.READY:
            raise NotReady(self.status.detail)
        if request.model not in [card.id for card in self.models]:
            raise UnknownModel(f"The model '{request.model}' does not exist.")
        if script.error_at_start is not None:
            raise script.error_at_start
        num_prompt_tokens = len(_prompt_tokens(request.prompt))
        limit, wanted = self._models[0].max_model_len, request.params.max_tokens or 0
        limit = min(limit, request.plan.cache.max_context or limit)
        if num_prompt_tokens + wanted > limit:
            raise ContextTooLong(
                f"This model's context is {limit} tokens, but {num_prompt_tokens} of prompt and {wanted} of"
                " output were asked for.",
                param="messages" if isinstance(request.prompt, ChatPrompt) else "prompt",
            )
        return num_prompt_tokens

    def _enter(self, request: GenerateRequest, num_prompt_tokens: int) -> None:
        self.requests.append(request)
        self._arrived.set()
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += self.script.num_cached_tokens
        self.num_running += 1
        self._idle.clear()

    def _leave(self) -> None:
        self.num_running -= 1
        if not self.num_running:
            self._idle.set()

    async def _play(
        self, request: GenerateRequest, script: Script, num_prompt_tokens: int
    ) -> AsyncIterator[Chunk | Finished]:
        begun = time.perf_counter()
        first: float | None = None
        pieces = script.pieces[: request.params.max_tokens]
        cut = len(pieces) < len(script.pieces)
        for position, piece in enumerate(pieces):
            await self._wait(script.gates.get(position), request.deadline_s, begun)
            if script.error is not None and position == script.error_at:
                raise script.error
            first = first or time.perf_counter()
            last = position == len(pieces) - 1
            for index in range(request.params.n):
                self.num_output_tokens += 1
                yield Chunk(
                    index,
                    piece,
                    (position,),
                    _logprobs((piece,), request.params.logprobs),
                    (FinishReason.LENGTH if cut else script.finish_reason) if last else None,
                )
        now = time.perf_counter()
        usage = Usage(
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=len(pieces) * request.params.n,
            num_cached_tokens=script.num_cached_tokens,
        )
        ttft = (first or now) - begun
        tpot = (now - begun - ttft) / (len(pieces) - 1) if len(pieces) > 1 else None
        timings = Timings(queue_s=ttft, ttft_s=ttft, tpot_s=tpot, total_s=now - begun)
        yield Finished(usage, timings, script.num_preemptions, script.speculation, script.cache)

    async def _wait(self, gate: asyncio.Event | None, deadline_s: float | None, begun: float) -> None:
        if gate is None:
            await asyncio.sleep(0)
        else:
            left = None if deadline_s is None else max(0.0, begun + deadline_s - time.perf_counter())
            waits = [asyncio.create_task(event.wait()) for event in (gate, self._ended)]
            try:
                done, _ = await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            if not done:
                raise DeadlineExceeded(f"The request's deadline of {deadline_s:g} s passed.")
        if self._ended.is_set():
            raise NotReady(self.status.detail)


def _prompt_tokens(prompt: Prompt) -> tuple[str, ...]:
    if isinstance(prompt, TextPrompt):
        words = prompt.text.split(" ")
        return tuple(word if i == 0 else " " + word for i, word in enumerate(words))
    if isinstance(prompt, ChatPrompt):
        return tuple(word for message in prompt.messages for word in str(message["content"]).split())
    return tuple(f"<{token_id}>" for token_id in prompt.token_ids)


def _echoes(request: GenerateRequest) -> list[PromptEcho]:
    if not request.echo:
        return []
    tokens = _prompt_tokens(request.prompt)
    logprobs = _logprobs(tokens, request.params.logprobs, first_is_known=False)
    return [
        PromptEcho(index, "".join(tokens), tuple(range(len(tokens))), logprobs)
        for index in range(request.params.n)
    ]


def _logprobs(
    tokens: Sequence[str], num_top: int | None, *, first_is_known: bool = True
) -> tuple[TokenLogprob, ...] | None:
    """Token k has log-probability -(k + 1) / 8; the alternatives are `<alt i>` at -i."""
    if num_top is None:
        return None
    top = tuple(
        TopLogprob(1000 + i, f"<alt {i}>", f"<alt {i}>".encode(), -float(i)) for i in range(1, num_top + 1)
    )
    return tuple(
        TokenLogprob(k, token, token.encode(), -(k + 1) / 8, top)
        if k or first_is_known
        else TokenLogprob(k, token, token.encode(), None)
        for k, token in enumerate(tokens)
    )
