"""Who is let in: what could not be served within its promise, or within reason, is told so at once.

The event loop's side of admission. It counts what it let in itself, and takes everything else from the
load that the engine's thread publishes now and then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from msgspec import Struct

from surefoot.backends.errors import Overloaded
from surefoot.backends.types import GenerateRequest

from .output_lengths import UNKNOWN_OUTPUT
from .scheduler_load import LevelLoad, SchedulerLoad
from .settings import EngineSettings

MAX_RETRY_S = 60.0
MIN_RETRY_S = 0.1


class _Entered(Struct, frozen=True):
    """A request that was let in."""

    priority: int
    num_choices: int
    prefill_tokens: int
    output_tokens: float


class _Ahead(Struct, kw_only=True):
    """All that goes before a newcomer, or beside it: of its priority or above."""

    num_open: int = 0
    prefill_s: float = 0.0
    waiting_s: float = 0.0
    """Predicted work of those that have not started."""
    work_s: float = 0.0
    """Of all."""


class Door:
    """Bounds what waits, per priority and with what goes before it: in sequences, in seconds, by target."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._entered: dict[int, _Entered] = {}
        self._num_open: Counter[int] = Counter()
        self.num_refused: Counter[str] = Counter()
        """By `Overloaded.reason`."""
        self.load = SchedulerLoad()
        """As of some time ago; set by the engine's thread."""

    def check_room(self, priority: int) -> None:
        """Raise `Overloaded` if too many answers of this priority or above are open."""
        limit = self._settings.max_sequences + self._settings.max_waiting
        num_open = sum(count for each, count in self._num_open.items() if each >= priority)
        if num_open >= limit:
            ahead = self._ahead(priority)
            raise self._refusal(
                "requests",
                f"{num_open} answers are running or waiting, and {limit} is the limit",
                ahead.work_s / max(ahead.num_open, 1),
            )

    def check(self, request: GenerateRequest) -> None:
        """Raise `Overloaded` if too many wait, too much work does, or the first token would be late.

        A request's own prefill is not held against it: on a quieter server it would take as long.
        """
        self.check_room(request.priority)
        ahead = self._ahead(request.priority)
        if ahead.waiting_s > self._settings.max_waiting_s:
            raise self._refusal(
                "seconds",
                f"{ahead.waiting_s:.0f} s of work are waiting, and {self._settings.max_waiting_s:.0f} s is"
                " the limit",
                ahead.waiting_s - self._settings.max_waiting_s,
            )
        target_s, wait_s = request.ttft_target_s, self._wait_s(ahead)
        if target_s is not None and wait_s > target_s:
            raise self._refusal(
                "target",
                f"the first token would take more than {wait_s:.1f} s, and {target_s:g} s were promised",
                wait_s - target_s,
            )

    def enter(self, key: int, request: GenerateRequest, num_prompt_tokens: int, max_tokens: int) -> None:
        """Count a request as open."""
        params = request.params
        mean = next(
            (level.mean_output_tokens for level in self.load.levels if level.priority == request.priority),
            float(UNKNOWN_OUTPUT),
        )
        self._entered[key] = _Entered(
            request.priority,
            params.n,
            params.n * num_prompt_tokens,
            params.n * min(mean, max_tokens),
        )
        self._num_open[request.priority] += params.n

    def leave(self, key: int) -> None:
        """It is over."""
        entered = self._entered.pop(key)
        self._num_open[entered.priority] -= entered.num_choices
        if not self._num_open[entered.priority]:
            del self._num_open[entered.priority]

    def _ahead(self, priority: int) -> _Ahead:
        load, ahead = self.load, _Ahead()
        for level in (*load.levels, *self._unknown_to(load)):
            if level.priority < priority:
                continue
            prefill_s = level.prefill_tokens * load.unit.prefill_s
            waiting_s = level.waiting_output_tokens * load.unit.output_s
            ahead.num_open += level.num_waiting + level.num_running
            ahead.prefill_s += prefill_s
            ahead.waiting_s += prefill_s + waiting_s
            ahead.work_s += prefill_s + waiting_s + level.running_output_tokens * load.unit.output_s
        return ahead

    def _unknown_to(self, load: SchedulerLoad) -> Iterator[LevelLoad]:
        """What was let in since the load was counted. Keys only grow, so the newest are last."""
        for key in reversed(self._entered):
            if key <= load.last_key:
                return
            entered = self._entered[key]
            yield LevelLoad(
                priority=entered.priority,
                num_waiting=entered.num_choices,
                prefill_tokens=entered.prefill_tokens,
                waiting_output_tokens=entered.output_tokens,
            )

    def _wait_s(self, ahead: _Ahead) -> float:
        """Until a newcomer could start: prefills go first, and with every place taken some must end."""
        num_too_many = ahead.num_open + 1 - self._settings.max_sequences
        if num_too_many <= 0:
            return ahead.prefill_s
        return max(ahead.prefill_s, ahead.work_s * min(num_too_many / ahead.num_open, 1.0))

    def _refusal(self, reason: str, message: str, retry_after_s: float) -> Overloaded:
        self.num_refused[reason] += 1
        retry_after_s = min(max(retry_after_s, MIN_RETRY_S), MAX_RETRY_S)
        return Overloaded(f"{message}: try again later", retry_after_s=retry_after_s, reason=reason)
