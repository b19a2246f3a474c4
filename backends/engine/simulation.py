"""`surefoot simulate`: from what was asked to a report."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path

from msgspec import Struct

from surefoot.backends.types import CachePlan, ServingPlan

from .cache_rule import FULL_NAME, PLAN_FORMATS
from .engine import Engine, EngineCounters
from .gpu_times import GPUS, GpuTimes
from .machine_file import MachineCost, load_machine, save_machine
from .simulation_report import SimulationReport, report_of
from .simulator import Machine, gpu_machine, simulate
from .start import SCHEDULERS, EngineOptions, Progress, cost_file, engine_settings, load_parts
from .trace import (
    Lengths,
    Promise,
    TraceError,
    TraceRequest,
    parse_rates,
    read_trace,
    synthetic_trace,
)


class SimulationSettings(Struct, frozen=True, kw_only=True):
    """What is simulated. With a `trace` the numbers of a synthetic one are of no interest.

    `cost` is a file of step costs (None: what the model's server kept, else measured now), `gpu` a device of
    `GPUS` with Llama-3.1-8B instead; `cache_blocks` None is what the server had or the device has room for.
    All requests have `cache_format`. `TraceError` for what is of no use.
    """

    trace: Path | None = None
    rate: tuple[str, ...] = ()
    duration: float = 300.0
    prompt_tokens: int = 128
    output_tokens: int = 128
    seed: int = 0
    speed: float = 1.0
    cost: Path | None = None
    gpu: str | None = None
    cache_format: str = FULL_NAME
    cache_blocks: int | None = None

    def __post_init__(self) -> None:
        for name, value, known in (
            ("gpu", self.gpu, (None, *GPUS)),
            ("cache_format", self.cache_format, PLAN_FORMATS),
        ):
            if value not in known:
                raise TraceError(f"{name} must be one of {', '.join(filter(None, known))}, got {value}")
        if self.gpu is not None and (self.cost is not None or self.speed != 1):
            raise TraceError("gpu says what steps cost: leave cost and speed out")
        for name in ("duration", "prompt_tokens", "output_tokens", "speed", "cache_blocks"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise TraceError(f"{name} must be above 0, got {value:g}")


def simulate_machine(
    options: EngineOptions,
    what: SimulationSettings,
    promises: Mapping[str, Promise],
    progress: Progress,
) -> SimulationReport:
    """Simulate the server that `options` would start, with what its classes promise; raises `TraceError` and
    `ModelError`.
    """
    trace = trace_of(what, promises)
    settings = options.settings
    if what.gpu is not None:
        machine = gpu_machine(GpuTimes(GPUS[what.gpu]), settings, what.cache_blocks)
    else:
        known = machine_cost(options, what.cost, progress)
        num_blocks = what.cache_blocks or known.num_blocks
        machine = Machine(settings=settings, num_blocks=num_blocks, cost=known.cost.faster(what.speed))
    plan = ServingPlan(name=what.cache_format, cache=CachePlan(format=what.cache_format))
    scheduler = SCHEDULERS[options.scheduler]
    result = simulate(trace, machine, make_scheduler=scheduler, promises=promises, plan=plan)
    return report_of(result, options.scheduler, what.speed)


def trace_of(what: SimulationSettings, classes: Collection[str]) -> list[TraceRequest]:
    """The file's requests, or synthetic ones; raises `TraceError`, also for a class that there is not."""
    if what.trace is not None:
        return read_trace(what.trace)
    rates = parse_rates(what.rate, classes)
    lengths = Lengths(prompt_tokens=what.prompt_tokens, output_tokens=what.output_tokens)
    trace = synthetic_trace(rates, what.duration, lengths, what.seed)
    if not trace:
        raise TraceError(f"no request arrives in {what.duration:g} s at these rates: ask for longer")
    return trace


def machine_cost(options: EngineOptions, file: Path | None, progress: Progress) -> MachineCost:
    """From a file that was named, from what a served engine kept, or measured now; raises `TraceError`."""
    if file is not None:
        if (machine := load_machine(file)) is None:
            raise TraceError(f"{file} is no file of step costs")
        return machine
    kept = cost_file(options)
    if (machine := load_machine(kept)) is not None:
        progress(f"Step costs are those in {kept}.")
        return machine
    machine = measure_machine(options, progress)
    save_machine(kept, machine)
    progress(f"Step costs were measured now, and kept in {kept}.")
    return machine


def measure_machine(options: EngineOptions, progress: Progress) -> MachineCost:
    """Load the model and run an engine's warm-up; raises `ModelError`."""
    parts = load_parts(options, progress)
    engine = Engine(
        parts.loaded,
        parts.ops,
        engine_settings(options),
        cache_dtype=parts.cache_dtype,
        counters=EngineCounters(),
        clock=time.monotonic,
    )
    engine.warm_up()
    return MachineCost(num_blocks=engine.pool.num_blocks, cost=engine.costs.cost)
