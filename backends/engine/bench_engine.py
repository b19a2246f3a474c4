"""A bare engine for benchmarks, and requests for it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from surefoot.backends.catalog import default_model_id, locate_model
from surefoot.backends.errors import BackendError

from .backend import EngineParts
from .engine import Engine, EngineCounters, Output
from .process_memory import spare_collector
from .promise_scheduler import PromiseScheduler
from .scheduler import MakeScheduler
from .settings import EngineSettings
from .start import EngineOptions, load_parts

MIB = 1024**2


def load_bench_parts(model: str, cache_dir: Path, threads: int | None) -> EngineParts:
    """The model as `serve` has it."""
    options = EngineOptions(
        model=locate_model(model),
        model_id=default_model_id(model),
        cache_dir=cache_dir.expanduser(),
        threads=threads,
    )
    return load_parts(options, say)


def make_bench_engine(
    parts: EngineParts, settings: EngineSettings, make_scheduler: MakeScheduler = PromiseScheduler
) -> Engine:
    """An engine that has met every shape once and knows what steps cost, in a process as while serving."""
    engine = Engine(
        parts.loaded,
        parts.ops,
        settings,
        cache_dtype=parts.cache_dtype,
        counters=EngineCounters(),
        clock=time.perf_counter,
        make_scheduler=make_scheduler,
    )
    # The first time may be slow for reasons of its own, and then it measures less.
    for _ in range(2):
        engine.warm_up()
    spare_collector()
    return engine


def step(engine: Engine) -> list[Output]:
    """One step of an engine whose requests all succeed; `SystemExit` if one does not."""
    outputs = engine.step()
    for output in outputs:
        if isinstance(output.event, BackendError):
            raise SystemExit(f"a request failed: {output.event}")
    return outputs


def say(text: str) -> None:
    """Progress, beside the result."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
