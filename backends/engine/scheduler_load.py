"""What a scheduler has to do, for people (`SchedulerView`) and for the door (`SchedulerLoad`)."""

from __future__ import annotations

from msgspec import Struct

from surefoot.backends.types import SchedulerView, SequenceView

from .cost_model import StepCost, context_tokens
from .promise import slack_s
from .scheduler import Scheduler
from .sequence import Sequence, SequenceStatus

TYPICAL_CONTEXT = 256
"""Tokens that a decoding row attends to, where one number must do for all."""


class UnitCost(Struct, frozen=True, kw_only=True):
    """What a token costs in a busy engine's steps, in seconds."""

    prefill_s: float
    output_s: float

    @classmethod
    def of(cls, cost: StepCost, max_sequences: int, max_batched_tokens: int) -> UnitCost:
        """Prefill in steps of the whole budget, output with every sequence decoding."""
        prefill_s = cost.predict(max_batched_tokens, 1, context_tokens(max_batched_tokens, 0))
        output_s = cost.predict(max_sequences, max_sequences, max_sequences * TYPICAL_CONTEXT)
        return cls(prefill_s=prefill_s / max_batched_tokens, output_s=output_s / max_sequences)


class LevelLoad(Struct, kw_only=True):
    """What the sequences of one priority still want. Output tokens are expected ones."""

    priority: int
    num_waiting: int = 0
    num_running: int = 0
    prefill_tokens: int = 0
    waiting_output_tokens: float = 0.0
    running_output_tokens: float = 0.0
    mean_output_tokens: float = 0.0
    """Of an answer of this priority."""


class SchedulerLoad(Struct, frozen=True, kw_only=True):
    """The load of each priority at one moment. `last_key` is the newest request that it knows of."""

    levels: tuple[LevelLoad, ...] = ()
    unit: UnitCost = UnitCost(prefill_s=0.0, output_s=0.0)
    last_key: int = -1


def load_of(scheduler: Scheduler, unit: UnitCost, last_key: int) -> SchedulerLoad:
    """Count once through all that wait and run."""
    levels: dict[int, LevelLoad] = {}
    for sequence in (*scheduler.running, *scheduler.waiting):
        level = levels.get(sequence.priority)
        if level is None:
            mean = scheduler.lengths.mean(sequence.priority)
            level = LevelLoad(priority=sequence.priority, mean_output_tokens=mean)
            levels[sequence.priority] = level
        remaining = scheduler.lengths.remaining(sequence)
        if sequence.status is SequenceStatus.RUNNING:
            level.num_running += 1
            level.running_output_tokens += remaining
        else:
            level.num_waiting += 1
            level.waiting_output_tokens += remaining
        if not sequence.is_decoding:
            level.prefill_tokens += sequence.num_uncommitted
    return SchedulerLoad(levels=tuple(levels.values()), unit=unit, last_key=last_key)


def view_of(scheduler: Scheduler, load: SchedulerLoad, now_s: float) -> SchedulerView:
    """Queue and running set, oldest first."""
    waiting = sorted(scheduler.waiting, key=lambda sequence: sequence.request.arrived_s)
    backlog_s = sum(
        level.prefill_tokens * load.unit.prefill_s + level.waiting_output_tokens * load.unit.output_s
        for level in load.levels
    )
    return SchedulerView(
        waiting=tuple(_sequence_view(sequence, now_s) for sequence in waiting),
        running=tuple(_sequence_view(sequence, now_s) for sequence in scheduler.running),
        backlog_s=backlog_s,
    )


def _sequence_view(sequence: Sequence, now_s: float) -> SequenceView:
    request = sequence.request
    return SequenceView(
        request_id=request.message.request_id,
        choice=sequence.choice,
        priority=sequence.priority,
        flow=request.message.flow,
        running=sequence.status is SequenceStatus.RUNNING,
        age_s=now_s - request.arrived_s,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_output_tokens=sequence.num_output_tokens,
        num_blocks=sequence.num_blocks,
        num_preemptions=sequence.num_preemptions,
        slack_s=slack_s(sequence, now_s),
    )
