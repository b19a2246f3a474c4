"""What deciding a step costs, beside the step: 64 sequences of the real model decode while 500 wait.

    make bench-scheduler
    python -m surefoot.backends.engine.bench_scheduler --help

Times `schedule()` and the whole step by the same clock in the same steps. The exit status is 0 if the bar is
kept, 1 if it is missed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Annotated

import msgspec
from cyclopts import App, Parameter
from msgspec import Struct

from surefoot.backends.types import GenerateRequest, SamplingParams, TokenPrompt
from surefoot.kernels.layout import BLOCK_TOKENS

from .backend import PUBLISH_EVERY_S, EngineParts
from .bench_engine import load_bench_parts, make_bench_engine, say
from .cache_use import formats_of, totals_of
from .cost_model import CostModel
from .device_runner import bytes_of_block
from .engine import Engine
from .first_come import FirstComeScheduler
from .prefix_cache import PrefixCache
from .promise_scheduler import PromiseScheduler
from .scheduler import MakeScheduler, ScheduledChunk, Scheduler
from .scheduler_load import UnitCost, load_of, view_of
from .settings import EngineSettings

SHARE_BAR = 0.03
NUM_PROMPT_TOKENS = 128
NUM_FLOWS = 8
TOKEN_IDS = range(1000, 10_000)
MORE_TOKENS = 300
"""What an answer may have beside the measured steps, so that none ends while others are still to start."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Job:
    """What to time."""

    model: Annotated[str, Parameter(help="What to serve")] = "smollm2"
    cache_dir: Annotated[Path, Parameter(help="Folder of prepared weights")] = Path("~/.cache/surefoot")
    threads: Annotated[int | None, Parameter(help="CPU threads [as many as there are]")] = None
    running: Annotated[int, Parameter(help="Sequences that decode")] = 64
    waiting: Annotated[int, Parameter(help="Sequences that wait")] = 500
    steps: Annotated[int, Parameter(help="Steps to time, of each scheduler")] = 100
    output: Annotated[Path | None, Parameter(help="Store everything in this file, as JSON")] = None


class Case(Struct, frozen=True):
    """A scheduler, and the TPOT target of all that run, in steps as they were without one; None for none."""

    name: str
    make: MakeScheduler
    target_steps: float | None = None


CASES = (
    Case("first come", FirstComeScheduler),
    Case("promises, no target", PromiseScheduler),
    Case("promises, a target of each", PromiseScheduler, 4.0),
)


class Measured(Struct, frozen=True, kw_only=True):
    """Of one scheduler, seconds of each step; `publish_s` is what it takes to tell who waits and who runs,
    which is done every `PUBLISH_EVERY_S`.
    """

    name: str
    num_running: int
    num_waiting: int
    schedule_s: list[float]
    step_s: list[float]
    publish_s: float

    @property
    def telling(self) -> float:
        """The share of time that telling takes."""
        return self.publish_s / PUBLISH_EVERY_S

    @property
    def share(self) -> float:
        """The share of a step that deciding it takes, and telling of it."""
        shares = (a / b for a, b in zip(self.schedule_s, self.step_s, strict=True))
        return median(shares) + self.telling


DEFAULT_JOB = Job()


def main(*, job: Job = DEFAULT_JOB) -> int:
    """Print what deciding a step takes, and its share of the step."""
    results = measure(job, load_bench_parts(job.model, job.cache_dir, job.threads))
    sys.stdout.write(text_of(results))
    if job.output is not None:
        job.output.write_bytes(msgspec.json.encode(results) + b"\n")
    return 0 if is_kept(results) else 1


def measure(job: Job, parts: EngineParts) -> list[Measured]:
    """Each scheduler on an engine of its own."""
    results: list[Measured] = []
    for case in CASES:
        say(f"{case.name} ...")
        step_s = median(results[-1].step_s) if results else 0.0
        results.append(_measure(job, parts, case, step_s))
    return results


def text_of(results: list[Measured]) -> str:
    """The result for people; times are medians."""
    heads = f"{'running':>8}{'waiting':>8}{'step, ms':>10}{'deciding, us':>13}{'telling':>9}{'share':>8}"
    lines = [
        f"{each.name:<28}{each.num_running:>8}{each.num_waiting:>8}{1000 * median(each.step_s):>10.1f}"
        f"{1e6 * median(each.schedule_s):>13.0f}{each.telling:>9.2%}{each.share:>8.2%}"
        for each in results
    ]
    kept = "kept" if is_kept(results) else "MISSED"
    return "\n".join([f"{'':<28}{heads}", *lines]) + f"\nbar: {SHARE_BAR:.0%} of a step at most: {kept}\n"


def is_kept(results: list[Measured]) -> bool:
    """Whether no scheduler takes more of a step than the bar allows."""
    return all(each.share <= SHARE_BAR for each in results)


def _measure(job: Job, parts: EngineParts, case: Case, step_s: float) -> Measured:
    taken_s: list[float] = []
    engine = _engine(job, parts, timed(case.make, taken_s))
    target_s = None if case.target_steps is None else case.target_steps * step_s
    for key in range(job.running):
        _add(job, engine, key, target_s)
    _start_all(engine, job.running)
    for key in range(job.running, job.running + job.waiting):
        _add(job, engine, key, None)
    taken_s.clear()
    steps_s = [_seconds(engine.step) for _ in range(job.steps)]
    return Measured(
        name=case.name,
        num_running=len(engine.scheduler.running),
        num_waiting=len(engine.scheduler.waiting),
        schedule_s=taken_s,
        step_s=steps_s,
        publish_s=median(_seconds(lambda: _publish(engine, job)) for _ in range(20)),
    )


def _start_all(engine: Engine, num_running: int) -> None:
    """Step until all decode together."""
    running = engine.scheduler.running
    while len(running) < num_running or not all(sequence.is_decoding for sequence in running):
        engine.step()
        if len(running) + len(engine.scheduler.waiting) < num_running:
            raise SystemExit(f"some of {num_running} sequences ended before the last one had started")


def timed(make: MakeScheduler, taken_s: list[float]) -> MakeScheduler:
    """The same scheduler, which adds the seconds of each `schedule()` to a list."""

    def build(
        settings: EngineSettings, blocks: PrefixCache, costs: CostModel, clock: Callable[[], float]
    ) -> Scheduler:
        scheduler = make(settings, blocks, costs, clock)
        schedule = scheduler.schedule

        def measured() -> list[ScheduledChunk]:
            begun_s = time.perf_counter()
            chunks = schedule()
            taken_s.append(time.perf_counter() - begun_s)
            return chunks

        scheduler.schedule = measured  # type: ignore[method-assign]  # times it on the way
        return scheduler

    return build


def _engine(job: Job, parts: EngineParts, make: MakeScheduler) -> Engine:
    num_blocks = job.running * -(-(NUM_PROMPT_TOKENS + job.steps + MORE_TOKENS) // BLOCK_TOKENS)
    settings = EngineSettings(
        cache_bytes=num_blocks * bytes_of_block(parts.loaded.model, parts.cache_dtype),
        max_sequences=job.running,
        max_batched_tokens=max(512, job.running),
        headroom=0.0,
    )
    return make_bench_engine(parts, settings, make)


def _add(job: Job, engine: Engine, key: int, target_s: float | None) -> None:
    prompt = tuple(Random(key).choices(TOKEN_IDS, k=NUM_PROMPT_TOKENS))
    message = GenerateRequest(
        request_id=str(key),
        model="bench",
        prompt=TokenPrompt(prompt),
        params=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=job.steps + MORE_TOKENS),
        tpot_target_s=target_s,
        flow=str(key % NUM_FLOWS),
    )
    engine.submit(message, prompt, key=key)


def _publish(engine: Engine, job: Job) -> None:
    """What the engine's thread does to tell the event loop's side."""
    unit = UnitCost.of(engine.costs.cost, job.running, max(512, job.running))
    load = load_of(engine.scheduler, unit, 0)
    view_of(engine.scheduler, load, time.monotonic())
    formats_of(engine.scheduler.running)
    totals_of(engine.scheduler.running)


def _seconds(work: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    work()
    return time.perf_counter() - begun_s


if __name__ == "__main__":
    app = App(name="bench-scheduler", help_format="plaintext", version_flags=[], default_command=main)
    sys.exit(app(sys.argv[1:], result_action="return_value"))
