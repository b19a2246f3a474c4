"""Those that wait, in the order in which they should start.

Higher priority first. Within a priority, flows share service in proportion to their weights (start-time fair
queueing: Goyal, Vin and Cheng, SIGCOMM 1996). Within a flow the one with the least slack comes first, then
the one that arrived first.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator

from msgspec import Struct, field

from .promise import latest_start_s
from .sequence import Sequence

Place = tuple[float, int]
"""A sequence's order within its flow: when it must start at the latest, then the number of its arrival."""


class Flow(Struct):
    """A flow within a priority. `virtual` is what it was served, in tokens per weight."""

    virtual: float = 0.0
    num_waiting: int = 0
    heap: list[Place] = field(default_factory=list)


class Level(Struct):
    """A priority. `virtual` is the service at which the flow started last stood."""

    priority: int
    virtual: float = 0.0
    num_waiting: int = 0
    num_running: int = 0
    neglected_since_s: float = math.inf
    """When a sequence of this level started or stopped last, or when the first one came to wait."""
    flows: dict[str, Flow] = field(default_factory=dict)


class WaitingQueue:
    """Sequences by level, flow and slack. A start charges the flow for the work that is expected of it.

    A flow that has nothing waiting earns no credit: when it comes back it stands where the others do. So a
    level's service is shared among those who want it, and nothing is held back for those who do not.
    """

    def __init__(self, work_s: Callable[[Sequence], float]) -> None:
        """`work_s` predicts the seconds until a sequence's first token once it has started."""
        self._work_s = work_s
        self._levels: dict[int, Level] = {}
        self._by_number: dict[int, Sequence] = {}
        self._numbers: dict[Sequence, int] = {}
        self._counter = itertools.count()

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._numbers)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._numbers

    @property
    def levels(self) -> list[Level]:
        """Those with something waiting or running, highest priority first."""
        return sorted(self._levels.values(), key=lambda level: -level.priority)

    def add(self, sequence: Sequence, now_s: float) -> None:
        """Queue a sequence."""
        message = sequence.request.message
        level = self._levels.setdefault(message.priority, Level(message.priority))
        flow = level.flows.setdefault(message.flow, Flow())
        if not flow.num_waiting:
            flow.virtual = max(flow.virtual, level.virtual)
        if not level.num_waiting:
            level.neglected_since_s = now_s
        flow.num_waiting += 1
        level.num_waiting += 1
        number = next(self._counter)
        self._by_number[number], self._numbers[sequence] = sequence, number
        heapq.heappush(flow.heap, (latest_start_s(sequence, self._work_s(sequence)), number))

    def head(self, level: Level) -> Sequence:
        """Who is next in a level that has someone waiting."""
        flow = min((flow for flow in level.flows.values() if flow.num_waiting), key=lambda flow: flow.virtual)
        while (sequence := self._by_number.get(flow.heap[0][1])) is None:
            heapq.heappop(flow.heap)
        return sequence

    def start(self, sequence: Sequence, num_tokens: float, now_s: float) -> None:
        """Take out a sequence that starts; it is expected to be `num_tokens` of work."""
        level, flow = self._take(sequence)
        level.num_running += 1
        level.neglected_since_s = now_s
        level.virtual = flow.virtual
        sequence.charged_tokens = num_tokens
        flow.virtual += num_tokens / sequence.request.message.weight

    def leave(self, sequence: Sequence) -> None:
        """Take out a sequence that will not start."""
        level, _ = self._take(sequence)
        self._forget_if_idle(level)

    def stopped(self, sequence: Sequence, num_tokens: int, now_s: float) -> None:
        """Settle the account of a sequence that ran: it was `num_tokens` of work after all."""
        message = sequence.request.message
        level = self._levels[message.priority]
        level.num_running -= 1
        level.neglected_since_s = now_s
        level.flows[message.flow].virtual += (num_tokens - sequence.charged_tokens) / message.weight
        self._forget_if_idle(level)

    def _take(self, sequence: Sequence) -> tuple[Level, Flow]:
        del self._by_number[self._numbers.pop(sequence)]
        level = self._levels[sequence.request.message.priority]
        flow = level.flows[sequence.request.message.flow]
        level.num_waiting -= 1
        flow.num_waiting -= 1
        if not flow.num_waiting:
            flow.heap.clear()
        return level, flow

    def _forget_if_idle(self, level: Level) -> None:
        """Accounts are kept as long as a level is busy; after that nobody owes anybody."""
        if not level.num_waiting and not level.num_running:
            del self._levels[level.priority]
