"""The engine as a `Backend`: a thread that steps it, and the event loop's side of that thread."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import TypeVar, cast

import structlog
import torch
from msgspec import Struct
from msgspec.structs import replace

from surefoot.backends.errors import BackendError, EngineFailed, NotReady
from surefoot.backends.types import (
    BackendState,
    BackendStats,
    BackendStatus,
    Event,
    Finished,
    FormatStats,
    FormatTotal,
    GenerateRequest,
    ModelCard,
    SchedulerView,
    SpeculationStats,
    Started,
)
from surefoot.kernels.base import Ops

from .admission import admit, context_limit, encode
from .cache_rule import FULL_NAME, CacheSpace
from .cache_use import formats_of, totals_of
from .door import Door
from .engine import Engine, EngineCounters, Output
from .machine_file import MachineCost, save_machine
from .mailbox import Mailbox
from .prepare import LoadedModel
from .process_memory import spare_collector
from .scheduler_load import UnitCost, load_of, view_of
from .sequence import Request
from .settings import EngineSettings
from .speculation.speculator import Speculator
from .watchdog import Watchdog

log = structlog.get_logger()
T = TypeVar("T")

PUBLISH_EVERY_S = 0.25
"""How often a busy engine says who waits and who runs."""

EXIT_HUNG = 70
"""The exit status of a process whose engine hung, for its supervisor (sysexits' EX_SOFTWARE)."""

QUIET_S = 0.2
"""An engine that was idle for so long has time for itself."""


class EngineParts(Struct, frozen=True):
    """What an engine is made of, loaded once and kept when the engine is replaced."""

    loaded: LoadedModel
    ops: Ops
    cache_dtype: torch.dtype
    cost_file: Path | None = None
    """Where the measured cost of steps is kept for `surefoot simulate`; None for nowhere."""
    draft: LoadedModel | None = None
    """A model of the same vocabulary that drafts for `loaded`."""


class _Add(Struct, frozen=True):
    request: Request


class _Abort(Struct, frozen=True):
    key: int


class _Forget(Struct, frozen=True):
    flow: str


class _Stop(Struct, frozen=True):
    pass


_Message = _Add | _Abort | _Forget | _Stop


class EngineBackend:
    """Serves one model with an engine in this process.

    The event loop's side validates requests and hands them to the engine's thread through a queue; the
    thread hands events back in one call per step. An engine whose step raises is replaced: its requests get
    `EngineFailed`, and nothing is accepted until the new one has passed a warm-up. A step that never returns
    ends the process with `EXIT_HUNG`.
    """

    def __init__(
        self,
        model_id: str,
        load: Callable[[], EngineParts],
        settings: EngineSettings,
        *,
        make_engine: Callable[..., Engine] = Engine,
        on_hang: Callable[[], None] | None = None,
    ) -> None:
        """`load` is slow and runs in a thread; it prints its own progress."""
        self._model_id = model_id
        self._load = load
        self._settings = settings
        self._make_engine = make_engine
        self._on_hang = on_hang or _exit_hung
        self._clock = time.monotonic
        self._status = BackendStatus(BackendState.STARTING, "the model is being loaded")
        self._created = int(time.time())
        self._counters = EngineCounters()
        self._speculator = Speculator(settings.speculation)
        self._speculation = SpeculationStats()
        self._num_restarts = 0
        self._stats = BackendStats()
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._keys = itertools.count()
        self._streams: dict[int, Mailbox[Event | BackendError]] = {}
        self._door = Door(settings)
        self._view = SchedulerView()
        self._machine: MachineCost | None = None
        self._published_s = -math.inf
        self._last_key = -1
        """Of the requests that the engine took."""
        self._space: CacheSpace | None = None
        """Of the loaded model's cache."""
        self._formats: tuple[FormatStats, ...] = ()
        self._format_totals: tuple[FormatTotal, ...] = ()
        self._thread: threading.Thread | None = None
        self._rested = asyncio.Event()

    @property
    def models(self) -> Sequence[ModelCard]:
        """The one model; empty until it is loaded."""
        if self._space is None:
            return ()
        return (ModelCard(id=self._model_id, created=self._created, max_model_len=self._space.max_full),)

    @property
    def status(self) -> BackendStatus:
        """Whether requests can be taken now."""
        return self._status

    @property
    def stats(self) -> BackendStats:
        """As of the engine's last step; what is more to count is as old as `scheduler`."""
        return replace(
            self._stats,
            refusals_total=dict(self._door.num_refused),
            speculation=self._speculation,
            formats=self._formats,
            format_totals=self._format_totals,
        )

    @property
    def scheduler(self) -> SchedulerView:
        """As of a step of the last quarter of a second, or the last one before the engine came to rest."""
        return self._view

    def forget_outputs(self, flow: str) -> None:
        """See `Backend.forget_outputs`; answers that run now are still learnt when they end."""
        self._inbox.put(_Forget(flow))

    async def start(self) -> None:
        """Load, warm up, start the thread."""
        self._loop = asyncio.get_running_loop()
        try:
            self._parts = await _in_daemon_thread(self._load)
            self._engine = await _in_daemon_thread(self._new_engine)
        except Exception as error:
            self._status = BackendStatus(BackendState.FAILED, f"the model could not be loaded: {error}")
            raise
        self._space = self._engine.cache_space
        if (rates := self._settings.speculation.synthetic_acceptance) is not None:
            log.warning("speculation.synthetic", model=self._model_id, rates=rates)
        self._publish()
        await asyncio.to_thread(self._save_costs)
        self._watchdog = Watchdog(self._settings.watchdog_s, self._on_hang)
        self._thread = threading.Thread(target=self._run, name="surefoot-engine", daemon=True)
        self._thread.start()
        self._status = BackendStatus(BackendState.READY)

    async def stop(self, drain_s: float) -> None:
        """Refuse new requests, wait for the open ones up to `drain_s`, end the rest, end the thread."""
        self._status = BackendStatus(BackendState.STOPPED, "the server is shutting down")
        if self._thread is None:
            return
        self._rested.clear()
        if self._streams:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._rested.wait(), drain_s)
        for events in self._streams.values():
            events.put(NotReady("the server is shutting down"))
        self._inbox.put(_Stop())
        await asyncio.to_thread(self._thread.join)
        self._watchdog.close()
        await asyncio.to_thread(self._save_costs)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Serve one request; see `Backend.generate`."""
        space = self._check_open()
        self._door.check_room(request.priority)
        longest = context_limit(request.plan.cache, space)
        tokens = await asyncio.to_thread(encode, request, self._parts.loaded.tokenizer, longest)
        self._check_open()
        admitted = admit(
            request,
            tokens.prompt,
            key=next(self._keys),
            space=space,
            vocab_size=self._parts.loaded.model.config.vocab_size,
            now_s=self._clock(),
            prediction_token_ids=tokens.prediction,
        )
        self._door.check(request)
        events: Mailbox[Event | BackendError] = Mailbox(self._loop)
        self._streams[admitted.key] = events
        self._door.enter(admitted.key, request, len(tokens.prompt), admitted.max_tokens)
        self._inbox.put(_Add(admitted))
        try:
            yield Started(num_prompt_tokens=len(tokens.prompt), system_fingerprint=self._fingerprint(request))
            while True:
                for event in await events.take():
                    if isinstance(event, BackendError):
                        raise event
                    yield event
                    if isinstance(event, Finished):
                        return
        finally:
            del self._streams[admitted.key]
            self._door.leave(admitted.key)
            self._inbox.put(_Abort(admitted.key))
            if not self._streams:
                self._rested.set()

    def _check_open(self) -> CacheSpace:
        """Raise `Unavailable`, or return what bounds contexts."""
        if self._status.state is BackendState.FAILED:
            raise EngineFailed(self._status.detail)
        if self._status.state is not BackendState.READY or self._space is None:
            raise NotReady(self._status.detail)
        return self._space

    def _fingerprint(self, request: GenerateRequest) -> str:
        mark = "" if self._settings.speculation.synthetic_acceptance is None else ":synthetic"
        cache = request.plan.cache
        if cache.format != FULL_NAME and cache.demote == "pressure" and request.params.seed is None:
            mark += ":pressure"
        return f"{self._model_id}:{self._parts.loaded.fingerprint}:{request.plan.name}{mark}"

    def _new_engine(self) -> Engine:
        engine = self._make_engine(
            self._parts.loaded,
            self._parts.ops,
            self._settings,
            cache_dtype=self._parts.cache_dtype,
            counters=self._counters,
            clock=self._clock,
            speculator=self._speculator,
            draft=self._parts.draft,
        )
        engine.warm_up()
        return engine

    def _run(self) -> None:
        """The engine thread's life."""
        goes_on = True
        while goes_on:
            try:
                goes_on = self._turn()
            except Exception as error:
                goes_on = self._replace_engine(error)

    def _turn(self) -> bool:
        """Messages, then a step; False to stop."""
        if not self._take_messages():
            return False
        with self._watchdog.guard():
            outputs = self._engine.step()
        self._snapshot()
        if not self._engine.has_work or self._clock() - self._published_s > PUBLISH_EVERY_S:
            self._publish()
        if outputs:
            self._loop.call_soon_threadsafe(self._dispatch, outputs)
        return True

    def _take_messages(self) -> bool:
        """Handle what the event loop sent, and wait for it if the engine is idle; False to stop."""
        while (message := self._next_message()) is not None:
            match message:
                case _Add(request):
                    self._last_key = request.key
                    self._engine.add(request)
                case _Abort(key):
                    self._engine.abort(key)
                case _Forget(flow):
                    self._speculator.suffix.purge(flow)
                case _Stop():
                    return False
            if not self._engine.has_work:
                self._snapshot()
                self._publish()
        return True

    def _next_message(self) -> _Message | None:
        """What to handle before the next step; None to step now.

        Waits where the scheduler would rather wait for company, and where the engine is idle. An idle engine
        checks its blocks, which takes milliseconds, when nobody has come for a moment.
        """
        wait_s = self._engine.scheduler.wait_s() if self._engine.has_work else QUIET_S
        try:
            return self._inbox.get(block=wait_s > 0, timeout=wait_s)
        except queue.Empty:
            if self._engine.has_work:
                return None
        self._engine.pool.check_integrity()
        return self._inbox.get()

    def _replace_engine(self, error: Exception) -> bool:
        """Tell the failed engine's clients, build and warm up another; False if that fails too."""
        log.error("engine.failed", model=self._model_id, exc_info=error)
        self._status = BackendStatus(BackendState.FAILED, "the engine failed and is being restarted")
        self._loop.call_soon_threadsafe(self._fail, self._engine.keys)
        # Two caches at once could be more than there is room for: nothing may hold on to the old engine, nor
        # the error's frames to variables that were logged with it.
        error.__traceback__ = error.__context__ = None
        del self._engine
        self._speculator.restart()
        spare_collector()
        try:
            with self._watchdog.guard():
                self._engine = self._new_engine()
        except Exception as again:
            log.critical("engine.lost", model=self._model_id, exc_info=again)
            self._status = BackendStatus(BackendState.FAILED, "the engine failed and could not be restarted")
            self._loop.call_soon_threadsafe(self._fail, None)
            return False
        self._num_restarts += 1
        self._snapshot()
        self._publish()
        if self._status.state is BackendState.FAILED:
            self._status = BackendStatus(BackendState.READY)
        log.info("engine.restarted", model=self._model_id)
        return True

    def _snapshot(self) -> None:
        engine, counters = self._engine, self._counters
        self._stats = BackendStats(
            num_waiting=len(engine.scheduler.waiting),
            num_running=len(engine.scheduler.running),
            num_blocks=engine.pool.num_blocks,
            num_blocks_used=engine.pool.num_used,
            num_blocks_cached=engine.pool.num_cached,
            prompt_tokens_total=counters.num_prompt_tokens,
            output_tokens_total=counters.num_output_tokens,
            preemptions_total=counters.num_preemptions,
            prefix_cache_queries_total=counters.num_queried_tokens,
            prefix_cache_hits_total=counters.num_cached_tokens,
            prefix_cache_evictions_total=counters.num_evictions,
            block_bytes=engine.cache_space.block_bytes,
            demoted_tokens_total=dict(counters.num_demoted_tokens),
            steps_total=counters.num_steps,
            step_tokens_total=counters.num_rows,
            step_sequences_total=counters.num_sequence_steps,
            step_budget_total=counters.num_steps * self._settings.max_batched_tokens,
            step_predicted_s_total=counters.predicted_s,
            step_measured_s_total=counters.measured_s,
            last_step_sequences=0 if engine.last_step is None else engine.last_step.shape.num_sequences,
            last_step_tokens=0 if engine.last_step is None else engine.last_step.shape.num_rows,
            engine_restarts_total=self._num_restarts,
        )

    def _publish(self) -> None:
        """Tell the event loop's side who waits, who runs, what that will take, and how drafts fare."""
        engine, settings, now_s = self._engine, self._settings, self._clock()
        unit = UnitCost.of(engine.costs.cost, settings.max_sequences, settings.max_batched_tokens)
        self._door.load = load_of(engine.scheduler, unit, self._last_key)
        self._view = view_of(engine.scheduler, self._door.load, now_s)
        self._speculation = self._speculator.stats
        self._formats = formats_of(engine.scheduler.running)
        self._format_totals = totals_of(engine.scheduler.running)
        self._machine = MachineCost(num_blocks=engine.pool.num_blocks, cost=engine.costs.cost)
        self._published_s = now_s

    def _save_costs(self) -> None:
        """Keep what steps cost here. A folder that cannot be written is a pity and nothing more."""
        file = self._parts.cost_file
        if file is None or self._machine is None:
            return
        try:
            save_machine(file, self._machine)
        except OSError as error:
            log.warning("costs.not_saved", reason=error.strerror)

    def _dispatch(self, outputs: list[Output]) -> None:
        for output in outputs:
            if (events := self._streams.get(output.key)) is not None:
                events.put(output.event)

    def _fail(self, keys: list[int] | None) -> None:
        """Tell the clients of some requests, or of all."""
        for key in list(self._streams) if keys is None else keys:
            if (events := self._streams.get(key)) is not None:
                events.put(EngineFailed("the engine failed while it served this request"))


async def _in_daemon_thread(work: Callable[[], T]) -> T:
    """Like `asyncio.to_thread`, but the process can end before the work does."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast("T", result))

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # handed on, whatever it is
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="surefoot-loading", daemon=True).start()
    return await future


def _exit_hung() -> None:
    log.critical("engine.hung", exit_status=EXIT_HUNG)
    os._exit(EXIT_HUNG)
