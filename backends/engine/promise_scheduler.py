"""The scheduler that keeps promises: as much work in each step as the promised tail leaves room for."""

from __future__ import annotations

import math
from collections.abc import Callable

from .batching_window import BatchingWindow
from .block_demand import BlockDemand
from .cost_model import CostModel, context_tokens
from .prefix_cache import PrefixCache
from .promise import first_token_due_s
from .scheduler import BlockHolder, ScheduledChunk
from .seen import Seen
from .sequence import Pace, Sequence, SequenceStatus
from .settings import EngineSettings
from .step_plan import StepPlan, pace_limit_s, tpot_target_s
from .waiting import Level, WaitingQueue

AGEING_S = 5.0
"""A level that waits for so long with nothing running gets a start ahead of its turn."""
STARVING_S = 60.0
"""If blocks or a place are wanting for it, nothing else starts from here on until it has got them."""
PAUSE_S = 1.0
"""The longest that a running sequence stands still for the promises of others."""

MAX_PREEMPTIONS = 3
"""After so many a sequence is a victim only if every other one has had as many."""

URGENT_S = 1.0
"""A start that is due within so long may preempt a lower priority."""

FIRST_TOKEN_SHARE = 0.5
"""Of the time until a first token is due, what one step of those below may take."""
RECENT_SHARE = 0.45
"""Of a TTFT target that a newcomer will likely have, what a step of those below may make it wait.

Shorter steps make long prompts of those below pay a step's fixed cost more often: at 0.35 their first token
came 6 % later on an idle server, at 0.45 4.5 % (simulated; test_simulator.py), at no cost to the newcomer.
"""


class PromiseScheduler(BlockHolder):
    """Higher priorities first, within what was promised to those that run.

    A step goes through the priorities from the highest: decodes, prefills, starts. TPOT targets limit the
    predicted seconds that prefills may make of it. Decodes always run, unless promises to higher priorities
    leave no room: then they are paused, blocks kept, and take turns.

    Nobody waits for ever. A paused sequence runs after `PAUSE_S`, a level with none running starts one after
    `AGEING_S`. Blocks are taken as they are needed: if none is left the sequence of least rank gives up its
    own (it is preempted), or stands still if that is the one that asks. The one of highest rank is nobody's
    victim, and admission refused what does not fit the whole cache, so it always moves on.
    """

    def __init__(
        self, settings: EngineSettings, blocks: PrefixCache, costs: CostModel, clock: Callable[[], float]
    ) -> None:
        super().__init__(settings, blocks)
        self._costs = costs
        self._clock = clock
        self._queue = WaitingQueue(self._first_token_work_s)
        self._demand = BlockDemand(blocks, self.lengths)
        self._seen = Seen()
        self._window = BatchingWindow()
        self._num_turns = 0

    @property
    def waiting(self) -> WaitingQueue:
        """Those that do not run."""
        return self._queue

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self._queue or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        now_s = self._clock()
        self._seen.observe(sequence, now_s)
        self._window.observe(sequence, now_s)
        self._queue.add(sequence, now_s)

    def wait_s(self) -> float:
        """For how long the next step had better be put off, unless something new comes in. 0 mostly."""
        if self.running or not self._queue or len(self._queue) >= self._settings.max_sequences:
            return 0.0
        return self._window.wait_s(self._queue, self._costs.predict(1, 1, 1), self._clock())

    def schedule(self) -> list[ScheduledChunk]:
        """The next step's chunks; their blocks are allocated. None while `wait_s` is above 0."""
        if self.wait_s() > 0:
            return []
        now_s = self._clock()
        self._reclaim()
        decoding = [sequence for sequence in self.running if sequence.is_decoding]
        for sequence in decoding:
            if sequence.pace is None:
                sequence.pace = Pace(now_s, sequence.num_output_tokens)
        plan = StepPlan(self._costs.cost, self._settings.max_batched_tokens, decoding, now_s)
        self._run_overdue(plan, now_s)
        self._start_neglected(plan, now_s)
        for priority in self._priorities():
            self._run_level(priority, plan, now_s)
        self._note_paused(plan, now_s)
        return plan.chunks

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its blocks."""
        self.lengths.observe(sequence)
        if sequence.status is SequenceStatus.RUNNING:
            num_done = sequence.num_committed - sequence.committed_at_start
            self._queue.stopped(sequence, num_done, self._clock())
            self._stop(sequence, SequenceStatus.FINISHED)
        else:
            self._queue.leave(sequence)
            sequence.status = SequenceStatus.FINISHED

    def _next_up(self) -> Sequence | None:
        return next((self._queue.head(level) for level in self._queue.levels if level.num_waiting), None)

    def _priorities(self) -> list[int]:
        """Of all that wait or run, highest first."""
        return [level.priority for level in self._queue.levels]

    def _run_level(self, priority: int, plan: StepPlan, now_s: float) -> None:
        plan.narrow(RECENT_SHARE * self._seen.tightest_ttft_s(priority, now_s))
        level = [sequence for sequence in self.running if sequence.priority == priority]
        decoding = [sequence for sequence in level if sequence.is_decoding]
        for sequence in sorted(decoding, key=lambda seq: seq.last_turn):
            if sequence in plan or sequence.status is not SequenceStatus.RUNNING:
                continue
            if plan.decode_fits(sequence):
                self._run(sequence, 1, plan)
            plan.pass_over(sequence)
        prefilling = [sequence for sequence in level if not sequence.is_decoding]
        for sequence in sorted(prefilling, key=lambda seq: (first_token_due_s(seq), seq.start_number)):
            if sequence not in plan and sequence.status is SequenceStatus.RUNNING:
                self._prefill(sequence, plan, at_least=plan.least_prefill)
        prefilling += self._start_waiting(priority, plan, now_s)
        plan.bind(pace_limit_s(decoding, self._costs.cost, now_s))
        for sequence in prefilling:
            # One that is computed again has had its first token.
            if sequence.num_output_tokens == 0:
                plan.bind(FIRST_TOKEN_SHARE * max(first_token_due_s(sequence) - now_s, 0.0))

    def _run_overdue(self, plan: StepPlan, now_s: float) -> None:
        """Those that have stood still for too long move on, whatever the limit."""
        for sequence in sorted(self.running, key=lambda seq: seq.last_turn):
            since_s = sequence.paused_since_s
            if since_s is None or now_s - since_s < PAUSE_S or sequence.status is not SequenceStatus.RUNNING:
                continue
            if sequence.is_decoding:
                self._run(sequence, 1, plan)
            else:
                self._prefill(sequence, plan, at_least=plan.least_prefill)

    def _start_neglected(self, plan: StepPlan, now_s: float) -> None:
        """Each level that waits with nothing running for too long starts one, if there is room."""
        for level in self._queue.levels:
            neglected_s = now_s - level.neglected_since_s
            if not level.num_waiting or level.num_running or neglected_s < AGEING_S:
                continue
            sequence = self._queue.head(level)
            if self._has_place(0) and plan.prefill_room > 0 and self._demand.fits_now(sequence):
                self._begin(sequence, now_s)
                self._prefill(sequence, plan, at_least=max(plan.least_prefill, 1))
            elif neglected_s > STARVING_S:
                plan.starts_blocked = True

    def _start_waiting(self, priority: int, plan: StepPlan, now_s: float) -> list[Sequence]:
        """Start as many of a level as this step and the promises have room for; returns them."""
        started: list[Sequence] = []
        level = next((level for level in self._queue.levels if level.priority == priority), None)
        while level is not None and level.num_waiting and self._may_start(level, plan, now_s):
            sequence = self._queue.head(level)
            self._begin(sequence, now_s)
            self._prefill(sequence, plan, at_least=plan.least_prefill)
            started.append(sequence)
        return started

    def _may_start(self, level: Level, plan: StepPlan, now_s: float) -> bool:
        sequence = self._queue.head(level)
        if plan.starts_blocked or plan.prefill_room <= 0:
            return False
        if not plan.has_time(sequence) or not self._pace_allows(sequence):
            return False
        if self._finds_room(sequence, now_s) or self._make_room(sequence, plan, now_s):
            return True
        # Whoever comes after must not take what this one waits for.
        plan.starts_blocked = True
        return False

    def _finds_room(self, sequence: Sequence, now_s: float) -> bool:
        """Whether there are a place and blocks beside what is kept for higher priorities."""
        if not self.running:
            return True
        reserved = self._reserved_share(sequence.priority, now_s)
        return self._has_place(round(reserved * self._settings.max_sequences)) and self._demand.fits(
            sequence, self.running, max(round(reserved * self._pool.num_blocks), self._num_kept_free)
        )

    def _pace_allows(self, sequence: Sequence) -> bool:
        """Whether steps would keep the tightest TPOT target if the sequence decoded beside its betters."""
        beside = [other for other in self.running if other.priority >= sequence.priority]
        targets = (tpot_target_s(each, self._costs.cost) for each in (sequence, *beside))
        tightest_s = min((target for target in targets if target is not None), default=math.inf)
        if not beside or tightest_s == math.inf:
            return True
        num_tokens = sum(len(each.token_ids) for each in (sequence, *beside))
        return self._costs.predict(len(beside) + 1, len(beside) + 1, num_tokens) <= tightest_s

    def _reserved_share(self, priority: int, now_s: float) -> float:
        """What a level must leave free for a higher one that may come at any time."""
        return self._settings.headroom if self._seen.highest(now_s) > priority else 0.0

    def _has_place(self, num_reserved: int) -> bool:
        return len(self.running) < max(self._settings.max_sequences - num_reserved, 1)

    def _begin(self, sequence: Sequence, now_s: float) -> None:
        self._start(sequence)
        work = sequence.num_uncommitted + self.lengths.remaining(sequence)
        self._queue.start(sequence, work, now_s)
        sequence.committed_at_start = sequence.num_committed
        sequence.paused_since_s = None

    def _prefill(self, sequence: Sequence, plan: StepPlan, *, at_least: int) -> None:
        """A chunk as long as budget and limit allow, or `at_least`."""
        most = min(
            sequence.num_runnable,
            self._settings.max_prefill_chunk or sequence.num_runnable,
            plan.prefill_room,
        )
        num_tokens = max(plan.largest_prefill(sequence, most), min(at_least, most))
        if num_tokens > 0:
            self._run(sequence, num_tokens, plan)

    def _run(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> None:
        """Plan a chunk if blocks can be had for it, from sequences of lesser rank if need be."""
        while self._num_wanted(sequence, num_tokens) > self._pool.num_free:
            plan.starts_blocked = True
            victim = min(self.running, key=_rank)
            if victim is sequence:
                if len(self.running) == 1 and sequence.is_under_pressure:
                    # No block is left to demote it by way of: it starts again, with boundaries.
                    self._give_up(sequence, plan)
                return
            self._give_up(victim, plan)
        self._extend(sequence, num_tokens)
        plan.take(sequence, num_tokens)
        self._num_turns += 1
        sequence.last_turn = self._num_turns

    def _make_room(self, sequence: Sequence, plan: StepPlan, now_s: float) -> bool:
        """Preempt lower priorities for one whose first token is nearly due; False if that does not do."""
        if first_token_due_s(sequence) - self._first_token_work_s(sequence) - now_s > URGENT_S:
            return False
        reserved = self._reserved_share(sequence.priority, now_s)
        num_places = self._settings.max_sequences - round(reserved * self._settings.max_sequences)
        num_blocks = self._blocks.num_blocks_wanted(sequence) + round(reserved * self._pool.num_blocks)
        # Even where nobody has to go at once, somebody must be there to go when blocks run out.
        victims = [victim for victim in sorted(self.running, key=_rank) if _may_yield(victim, sequence)]
        num_free = self._pool.num_free + sum(victim.num_blocks for victim in victims)
        if not victims or len(self.running) - len(victims) >= num_places or num_free < num_blocks:
            return False
        for victim in victims:
            if len(self.running) < num_places and num_blocks <= self._pool.num_free:
                break
            self._give_up(victim, plan)
        return len(self.running) < num_places and num_blocks <= self._pool.num_free

    def _give_up(self, victim: Sequence, plan: StepPlan) -> None:
        num_done = victim.num_committed - victim.committed_at_start
        plan.drop(victim)
        self._preempt(victim)
        # Queued first, so that its level never looks idle and forgets its accounts.
        now_s = self._clock()
        self._queue.add(victim, now_s)
        self._queue.stopped(victim, num_done, now_s)

    def _note_paused(self, plan: StepPlan, now_s: float) -> None:
        for sequence in self.running:
            if sequence in plan:
                sequence.paused_since_s = None
            elif sequence.paused_since_s is None:
                sequence.paused_since_s = now_s

    def _first_token_work_s(self, sequence: Sequence) -> float:
        num_tokens = sequence.num_uncommitted
        return self._costs.predict(num_tokens, 1, context_tokens(num_tokens, 0))


def _may_yield(victim: Sequence, sequence: Sequence) -> bool:
    """Whether a sequence may be preempted so that another one starts."""
    return victim.priority < sequence.priority and victim.num_preemptions < MAX_PREEMPTIONS


def _rank(sequence: Sequence) -> tuple[bool, int, int]:
    """Who keeps blocks when they run out: those that lost theirs often, then by priority, then by start."""
    return sequence.num_preemptions >= MAX_PREEMPTIONS, sequence.priority, -sequence.start_number
