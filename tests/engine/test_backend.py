"""The engine behind the `Backend` protocol: faults, restarts, limits, shutdown."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec.structs import replace

from surefoot.backends.engine import start
from surefoot.backends.engine.backend import EXIT_HUNG, EngineBackend, EngineParts
from surefoot.backends.engine.engine import Engine, Output
from surefoot.backends.engine.first_come import FirstComeScheduler
from surefoot.backends.engine.machine_file import load_machine
from surefoot.backends.engine.promise_scheduler import PromiseScheduler
from surefoot.backends.engine.sequence import Request
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.errors import (
    ContextTooLong,
    EngineFailed,
    InvalidPrompt,
    NotReady,
    Overloaded,
    RequestError,
)
from surefoot.backends.types import (
    BackendState,
    Chunk,
    Event,
    Finished,
    GenerateRequest,
    PromptEcho,
    SamplingParams,
    SchedulerView,
    Started,
    TextPrompt,
    TokenPrompt,
)

from .harness import MIB


class FragileEngine(Engine):
    """An engine whose next step raises when `broken` is set, and whose next `add` when `refusing` is."""

    broken = threading.Event()
    refusing = threading.Event()

    def step(self) -> list[Output]:
        """Fail if a test says so."""
        if self.broken.is_set():
            self.broken.clear()
            raise RuntimeError("the fault under test")
        return super().step()

    def add(self, request: Request) -> None:
        """Fail halfway if a test says so."""
        super().add(request)
        if self.refusing.is_set():
            self.refusing.clear()
            raise RuntimeError("the fault under test")


def request(prompt: str = "Once upon a time", **params: Any) -> GenerateRequest:
    """A greedy request."""
    return GenerateRequest(
        request_id="r",
        model="m",
        prompt=TextPrompt(prompt),
        params=SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **params}),
    )


def endless() -> GenerateRequest:
    """One that runs until it is ended: of as many tokens as the cache holds, which take minutes."""
    return request(ignore_eos=True, max_tokens=2000)


async def collect(backend: EngineBackend, message: GenerateRequest) -> list[Event]:
    """All events of one request."""
    return [event async for event in backend.generate(message)]


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something that the engine's thread does and announces to nobody."""
    while not holds():  # noqa: ASYNC110 - see above
        await asyncio.sleep(0.01)


def serve(parts: EngineParts, use: Callable[[EngineBackend], Any], **limits: Any) -> None:
    """Start a backend, let `use` have it, stop it."""

    async def main() -> None:
        settings = EngineSettings(cache_bytes=64 * MIB, **limits)
        backend = EngineBackend("m", lambda: parts, settings, make_engine=FragileEngine)
        await backend.start()
        try:
            await use(backend)
        finally:
            await backend.stop(0)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "kind"), [("promise", PromiseScheduler), ("first-come", FirstComeScheduler)]
)
def test_the_scheduler_is_the_one_that_was_named(
    parts: EngineParts, monkeypatch: pytest.MonkeyPatch, name: Literal["promise", "first-come"], kind: type
) -> None:
    """The setting decides who runs next, and both serve."""
    monkeypatch.setattr(start, "load_parts", lambda *_: parts)

    async def main() -> None:
        options = start.EngineOptions(
            model=Path("m"),
            model_id="m",
            cache_dir=Path(),
            scheduler=name,
            settings=EngineSettings(cache_bytes=64 * MIB),
        )
        backend = start.make_backend(options, print)
        await backend.start()
        try:
            assert type(backend._engine.scheduler) is kind
            assert isinstance((await collect(backend, request()))[-1], Finished)
        finally:
            await backend.stop(0)

    asyncio.run(main())


def test_events_come_in_order(parts: EngineParts) -> None:
    """`Started` first, `Finished` last with the counts of what was sent; the stats come to rest."""

    async def use(backend: EngineBackend) -> None:
        events = await collect(backend, request())
        assert isinstance(events[0], Started)
        assert isinstance(events[-1], Finished)
        sent = sum(len(event.token_ids) for event in events if isinstance(event, Chunk))
        assert events[-1].usage.num_output_tokens == sent == 4
        assert events[-1].usage.num_prompt_tokens == events[0].num_prompt_tokens
        timings = events[-1].timings
        assert timings.ttft_s is not None
        assert timings.queue_s <= timings.ttft_s <= timings.total_s
        assert backend.stats.output_tokens_total == 4

    serve(parts, use)


def test_a_failed_engine_is_replaced(parts: EngineParts) -> None:
    """Clients of a failed step get `EngineFailed`; the next request is served as if nothing had been."""

    async def use(backend: EngineBackend) -> None:
        healthy = await collect(backend, request())
        generation = backend.generate(endless())
        await anext(generation)
        await anext(generation)
        FragileEngine.broken.set()
        with pytest.raises(EngineFailed):
            async for _ in generation:
                pass
        await until(lambda: backend.status.state is BackendState.READY)
        again = await collect(backend, request())
        assert again[1:-1] == healthy[1:-1]
        assert backend.stats.engine_restarts_total == 1
        assert backend.stats.num_blocks_used == 0

    serve(parts, use)


def test_a_failed_engine_leaves_no_memory_behind(parts: EngineParts) -> None:
    """It is gone before the next one is built, even where the collector was told to pass it over."""

    async def use(backend: EngineBackend) -> None:
        failed = weakref.ref(backend._engine)
        gc.freeze()
        try:
            FragileEngine.refusing.set()
            with pytest.raises(EngineFailed):
                await collect(backend, request())
            await until(lambda: backend.status.state is BackendState.READY)
            assert failed() is None
        finally:
            gc.unfreeze()

    serve(parts, use)


def test_a_fault_outside_a_step_is_no_different(parts: EngineParts) -> None:
    """An engine that fails while it takes a request is replaced too, and that request's client is told."""

    async def use(backend: EngineBackend) -> None:
        FragileEngine.refusing.set()
        with pytest.raises(EngineFailed):
            await collect(backend, request())
        await until(lambda: backend.status.state is BackendState.READY)
        assert isinstance((await collect(backend, request()))[-1], Finished)

    serve(parts, use)


def test_an_engine_that_cannot_be_replaced_stays_unready(parts: EngineParts) -> None:
    """When the new engine fails too, every client gets an error and the status says why."""

    async def use(backend: EngineBackend) -> None:
        backend._make_engine = broken_engine
        generation = backend.generate(endless())
        await anext(generation)
        FragileEngine.broken.set()
        with pytest.raises(EngineFailed):
            async for _ in generation:
                pass
        with pytest.raises(EngineFailed):
            await collect(backend, request())
        assert backend.status.state is BackendState.FAILED
        assert "restarted" in backend.status.detail

    serve(parts, use)


def broken_engine(*_: Any, **__: Any) -> Engine:
    """No engine."""
    raise MemoryError("the fault under test")


def test_bad_requests_are_refused_before_they_start(parts: EngineParts) -> None:
    """What cannot be served is refused at once, with the numbers."""

    async def use(backend: EngineBackend) -> None:
        with pytest.raises(ContextTooLong, match=r"is 100 tokens. The prompt has \d+") as long:
            await collect(backend, request("word " * 200))
        assert long.value.param == "prompt"
        with pytest.raises(ContextTooLong, match="99 more were asked for"):
            await collect(backend, request(max_tokens=99))
        with pytest.raises(InvalidPrompt, match="empty"):
            await collect(backend, request(""))
        tokens = GenerateRequest(request_id="r", model="m", prompt=TokenPrompt((5, 49152)))
        with pytest.raises(RequestError, match="token id 49152; this model's are 0 to 49151"):
            await collect(backend, tokens)
        with pytest.raises(ContextTooLong, match="200000 characters"):
            await collect(backend, request("x" * 200_000))
        assert backend.stats.num_waiting == backend.stats.num_running == 0

    serve(parts, use, max_model_len=100)


def test_a_prompt_counts_once(parts: EngineParts) -> None:
    """Prompt tokens are counted once per request, however many choices it has, as usage does."""

    async def use(backend: EngineBackend) -> None:
        events = await collect(backend, request(n=3))
        assert isinstance(events[-1], Finished)
        assert backend.stats.prompt_tokens_total == events[-1].usage.num_prompt_tokens

    serve(parts, use)


def test_a_full_window_can_be_scored(parts: EngineParts) -> None:
    """A prompt as long as the context is accepted when nothing is to be generated."""

    async def use(backend: EngineBackend) -> None:
        message = GenerateRequest(
            request_id="r",
            model="m",
            prompt=TokenPrompt((1,) * 100),
            params=SamplingParams(max_tokens=0, logprobs=0),
            echo=True,
        )
        echo = (await collect(backend, message))[1]
        assert isinstance(echo, PromptEcho)
        assert len(echo.logprobs or ()) == 100
        assert echo.text == "<|im_start|>" * 100

    serve(parts, use, max_model_len=100)


def test_a_full_queue_is_refused(parts: EngineParts) -> None:
    """Beyond running and waiting requests the next one is told to come back."""

    async def use(backend: EngineBackend) -> None:
        generations = [backend.generate(endless()) for _ in range(3)]
        for generation in generations:
            await anext(generation)
        with pytest.raises(Overloaded, match="3 answers"):
            await collect(backend, request())
        for generation in generations:
            await generation.aclose()  # type: ignore[attr-defined]  # an async generator, as the protocol says
        assert len(await collect(backend, request())) > 2

    serve(parts, use, max_sequences=2, max_waiting=1)


def test_a_flood_does_not_shut_others_out(parts: EngineParts) -> None:
    """Where one priority's queue is full a higher one is let in, and the refusals are counted by reason."""

    async def use(backend: EngineBackend) -> None:
        flood = [backend.generate(endless()) for _ in range(3)]
        for generation in flood:
            await anext(generation)
        with pytest.raises(Overloaded) as refused:
            await collect(backend, request())
        assert 0 < refused.value.retry_after_s <= 60
        assert (refused.value.reason, backend.stats.refusals_total) == ("requests", {"requests": 1})
        urgent = replace(request(), priority=200, ttft_target_s=60.0)
        events = await collect(backend, urgent)
        assert isinstance(events[-1], Finished)
        for generation in flood:
            await generation.aclose()  # type: ignore[attr-defined]  # as above

    serve(parts, use, max_sequences=2, max_waiting=1)


def test_the_view_shows_who_waits_and_runs(parts: EngineParts) -> None:
    """`scheduler` names the running and the waiting, and is empty again at rest."""

    async def use(backend: EngineBackend) -> None:
        generations = [
            backend.generate(replace(endless(), request_id=name, flow="acme")) for name in ("first", "second")
        ]
        for generation in generations:
            await anext(generation)
        await until(lambda: len(backend.scheduler.running) == len(backend.scheduler.waiting) == 1)
        view = backend.scheduler
        assert [each.request_id for each in (*view.running, *view.waiting)] == ["first", "second"]
        assert {each.flow for each in (*view.running, *view.waiting)} == {"acme"}
        assert view.backlog_s > 0
        for generation in generations:
            await generation.aclose()  # type: ignore[attr-defined]  # as above
        await until(lambda: backend.scheduler == SchedulerView())

    serve(parts, use, max_sequences=1)


def test_stats_tell_of_steps(parts: EngineParts) -> None:
    """Batch sizes, tokens of steps, their budget and their time by model and clock are there for metrics."""

    async def use(backend: EngineBackend) -> None:
        await collect(backend, request(max_tokens=4))
        await until(lambda: backend.stats.num_running == 0)
        stats = backend.stats
        assert stats.step_sequences_total == stats.steps_total == 4
        assert stats.step_tokens_total == stats.prompt_tokens_total + 3
        assert stats.step_budget_total == 4 * 512
        assert (stats.last_step_sequences, stats.last_step_tokens) == (1, 1)
        assert min(stats.step_predicted_s_total, stats.step_measured_s_total) > 0

    serve(parts, use)


def test_step_costs_are_kept_for_the_simulator(parts: EngineParts, tmp_path: Path) -> None:
    """They are there when the server is ready, and those that serving taught it when it has stopped."""

    async def main() -> None:
        kept = replace(parts, cost_file=tmp_path / "cost.json")
        backend = EngineBackend("m", lambda: kept, EngineSettings(cache_bytes=64 * MIB))
        await backend.start()
        at_start = load_machine(tmp_path / "cost.json")
        assert at_start is not None
        await collect(backend, request())
        assert at_start.num_blocks == backend.stats.num_blocks
        await backend.stop(0)
        assert load_machine(tmp_path / "cost.json") not in (None, at_start)

    asyncio.run(main())


def test_closing_a_generation_frees_its_blocks(parts: EngineParts) -> None:
    """An aborted request holds nothing after the engine's next step."""

    async def use(backend: EngineBackend) -> None:
        async with aclosing(backend.generate(endless())) as events:  # type: ignore[type-var]  # as above
            await anext(events)
            await anext(events)
            assert backend.stats.num_blocks_used > 0
        await until(lambda: backend.stats.num_blocks_used == backend.stats.num_running == 0)

    serve(parts, use)


def test_stopping_ends_what_runs(parts: EngineParts) -> None:
    """After the drain limit a running request gets `NotReady`, and new ones are refused."""

    async def main() -> None:
        backend = EngineBackend("m", lambda: parts, EngineSettings(cache_bytes=64 * MIB))
        with pytest.raises(NotReady):
            await collect(backend, request())
        await backend.start()
        generation = backend.generate(endless())
        await anext(generation)
        stopping = asyncio.create_task(backend.stop(0.05))
        with pytest.raises(NotReady, match="shutting down"):
            async for _ in generation:
                pass
        await stopping
        with pytest.raises(NotReady):
            await collect(backend, request())
        assert not any(thread.name.startswith("surefoot") for thread in threading.enumerate())

    asyncio.run(main())


HANG = """
import threading
import weakref
from surefoot.backends.engine.backend import _exit_hung
from surefoot.backends.engine.watchdog import Watchdog
watchdog = Watchdog(0.2, _exit_hung)
with watchdog.guard():
    pass
with watchdog.guard():
    threading.Event().wait(60)
"""


def test_a_hung_step_ends_the_process() -> None:
    """A step that never returns ends the process with the status that supervisors see."""
    done = subprocess.run([sys.executable, "-c", HANG], timeout=60, check=False)
    assert done.returncode == EXIT_HUNG
