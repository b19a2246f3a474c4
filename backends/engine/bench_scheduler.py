"""What deciding a step costs, beside the step.

    python -m surefoot.backends.engine.bench_scheduler --help

Times `schedule()` alone with a full running set and a long queue, where targets bind and where they do not.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

from cyclopts import App, Parameter

from surefoot.backends.types import GenerateRequest, TokenPrompt

from .block_pool import BlockPool
from .choice_stream import ChoiceStream
from .cost_model import CostModel, StepCost
from .first_come import FirstComeScheduler
from .machine_file import load_machine
from .prefix_cache import PrefixCache
from .promise_scheduler import PromiseScheduler
from .scheduler import MakeScheduler, Scheduler
from .sequence import Request, Sequence
from .settings import EngineSettings
from .simulator import NoText, VirtualClock

NUM_PROMPT_TOKENS = 128
NUM_FLOWS = 8


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Job:
    """What to time."""

    running: Annotated[int, Parameter(help="Sequences that decode")] = 64
    waiting: Annotated[int, Parameter(help="Sequences that wait")] = 500
    steps: Annotated[int, Parameter(help="Steps to time")] = 300
    cost: Annotated[Path | None, Parameter(help="File of step costs [a small model on two cores]")] = None


DEFAULT_JOB = Job()


def main(*, job: Job = DEFAULT_JOB) -> int:
    """Print what `schedule()` takes, and its share of a step in which all decode."""
    machine = load_machine(job.cost) if job.cost is not None else None
    cost = machine.cost if machine is not None else StepCost()
    step_s = cost.predict(job.running, job.running, job.running * 2 * NUM_PROMPT_TOKENS)
    cases: list[tuple[str, MakeScheduler, float | None]] = [
        ("first-come", FirstComeScheduler, None),
        ("promise, no target", PromiseScheduler, None),
        ("promise, targets bind", PromiseScheduler, step_s / 2),
    ]
    sys.stdout.write(f"a step of {job.running} decodes: {1000 * step_s:.1f} ms\n")
    for name, make, target_s in cases:
        taken_s = time_schedule(make, job, cost, target_s)
        sys.stdout.write(f"{name:<24}{1e6 * taken_s:8.0f} us  {100 * taken_s / step_s:6.2f} % of the step\n")
    return 0


def time_schedule(make: MakeScheduler, job: Job, cost: StepCost, target_s: float | None) -> float:
    """Median CPU seconds of a `schedule()` in a full engine; an eighth of it has the TPOT target."""
    settings = EngineSettings(
        cache_bytes=1, max_sequences=job.running, max_batched_tokens=max(512, job.running), headroom=0.0
    )
    clock = VirtualClock()
    pool = BlockPool(64 * (job.running + 1))
    scheduler = make(settings, PrefixCache(pool), CostModel(cost, frozen=True), clock)
    # Those with a target come last: beside them no others would start.
    for key in range(job.running):
        _add(scheduler, key, clock.now_s, target_s if key >= 7 * job.running // 8 else None)
        while scheduler.waiting or not scheduler.running[-1].is_decoding:
            _step(scheduler, clock)
    for key in range(job.waiting):
        _add(scheduler, job.running + key, clock.now_s, None)
    return median(_step(scheduler, clock) for _ in range(job.steps))


def _add(scheduler: Scheduler, key: int, now_s: float, target_s: float | None) -> None:
    message = GenerateRequest(
        request_id=str(key),
        model="",
        prompt=TokenPrompt(()),
        priority=0 if target_s is None else 200,
        tpot_target_s=target_s,
        flow=str(key % NUM_FLOWS),
    )
    prompt = (0,) * NUM_PROMPT_TOKENS
    request = Request(message, prompt, key=key, max_tokens=800, seed=0, arrived_s=now_s)
    request.sequences.append(Sequence(request, 0, ChoiceStream(0, NoText(), (), has_logprobs=False)))
    scheduler.add(request.sequences[0])


def _step(scheduler: Scheduler, clock: VirtualClock) -> float:
    """A step that takes 50 ms; returns the CPU seconds that deciding it took."""
    clock.now_s += scheduler.wait_s()
    begun_s = time.process_time()
    chunks = scheduler.schedule()
    taken_s = time.process_time() - begun_s
    clock.now_s += 0.05
    for chunk in chunks:
        samples = chunk.samples
        chunk.sequence.num_committed += chunk.num_tokens
        if samples:
            chunk.sequence.append(0)
    return taken_s


if __name__ == "__main__":
    app = App(name="bench-scheduler", help_format="plaintext", version_flags=[], default_command=main)
    sys.exit(app(sys.argv[1:], result_action="return_value"))
