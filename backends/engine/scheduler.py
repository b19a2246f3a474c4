"""Which sequences run in the next step, and with how many tokens each: the protocol, and what all share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from surefoot.kernels.layout import BLOCK_TOKENS

from .cost_model import CostModel, StepShape
from .demotion import Demoter, Move
from .output_lengths import OutputLengths
from .prefix_cache import PrefixCache
from .sequence import Sequence, SequenceStatus
from .settings import EngineSettings
from .speculation.base import Draft

WATERMARK = 1 / 8
"""The share of blocks that should be free: if it is not, sequences of `pressure` plans are demoted."""


class ScheduledChunk(Struct, frozen=True):
    """A sequence's share of a step: the first `num_tokens` of its uncommitted tokens.

    What follows them in the step is a draft of what may come next; only a chunk that samples has one.
    """

    sequence: Sequence
    num_tokens: int
    draft: Draft | None = None

    @property
    def draft_token_ids(self) -> tuple[int, ...]:
        """The draft's tokens, if there is one."""
        return () if self.draft is None else self.draft.token_ids

    @property
    def num_rows(self) -> int:
        """Rows of the step, the draft's included."""
        return self.num_tokens + len(self.draft_token_ids)

    @property
    def num_sampled(self) -> int:
        """Rows that a token is sampled for."""
        return 1 + len(self.draft_token_ids) if self.samples else 0

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the newest token, so that a next one is sampled."""
        return self.num_tokens == self.sequence.num_uncommitted


class Scheduler(Protocol):
    """Decides each step. One thread calls it, and commits what was scheduled before it asks again."""

    running: list[Sequence]
    """In the order of their start."""
    lengths: OutputLengths
    """How long answers turned out."""

    @property
    def waiting(self) -> Collection[Sequence]:
        """Those that do not run."""

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""

    def wait_s(self) -> float:
        """For how long the next step had better be put off, unless something new comes in. 0 mostly."""

    def schedule(self) -> list[ScheduledChunk]:
        """The next step's chunks; their blocks are allocated. None while `wait_s` is above 0."""

    def reserve(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks for up to `num_tokens` more tokens after those scheduled, from free ones alone; returns for
        how many there are.
        """

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its blocks."""

    def take_preemptions(self) -> int:
        """How many sequences were preempted since this was asked last."""

    def take_moves(self) -> list[Move]:
        """What must be moved within the cache, in this order, before anything else is done with it."""


MakeScheduler = Callable[[EngineSettings, PrefixCache, CostModel, Callable[[], float]], Scheduler]
"""Settings, blocks, costs, clock."""


class BlockHolder:
    """What every scheduler does alike: the running set, and who holds which blocks."""

    def __init__(self, settings: EngineSettings, blocks: PrefixCache) -> None:
        self._settings = settings
        self._blocks = blocks
        self._pool = blocks.pool
        self._demoter = Demoter(blocks)
        self.running: list[Sequence] = []
        self.lengths = OutputLengths()
        self._num_preemptions = 0
        self._num_starts = 0
        self._num_kept_free = 0
        """Blocks that a start must leave free, so that there is room to demote."""

    def reserve(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks for drafts; nobody loses any for them."""
        num_scheduled = sequence.num_uncommitted
        room = (len(sequence.block_table) + self._pool.num_free) * BLOCK_TOKENS
        num_tokens = min(num_tokens, room - sequence.num_full - num_scheduled)
        if (missing := sequence.blocks_missing(num_scheduled + num_tokens)) > 0:
            sequence.block_table += self._pool.allocate(missing)
        return num_tokens

    def take_preemptions(self) -> int:
        """How many sequences were preempted since this was asked last."""
        count, self._num_preemptions = self._num_preemptions, 0
        return count

    def take_moves(self) -> list[Move]:
        """What demotion moves within the cache since this was asked last."""
        return self._demoter.take_moves()

    def _start(self, sequence: Sequence) -> None:
        """From waiting to running, with the cached blocks that it begins with and no others yet."""
        self._blocks.attach(sequence)
        sequence.status = SequenceStatus.RUNNING
        self._num_starts += 1
        sequence.start_number = self._num_starts
        self.running.append(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Give up all blocks: to compute the sequence again is to start it again."""
        self._blocks.release(sequence)

    def _stop(self, sequence: Sequence, status: SequenceStatus) -> None:
        """Take a running sequence out."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.status = status

    def _preempt(self, sequence: Sequence) -> None:
        """Back to waiting; the scheduler queues it."""
        self._stop(sequence, SequenceStatus.WAITING)
        sequence.num_preemptions += 1
        self._num_preemptions += 1
        if sequence.cache_rule is not None and sequence.is_under_pressure:
            # What it held cannot be had again, and with boundaries it is known to fit.
            sequence.cache_rule = replace(sequence.cache_rule, eager=True)
            sequence.was_reclaimed = True

    def _next_up(self) -> Sequence | None:
        """Who would start next."""
        raise NotImplementedError

    def _reclaim(self) -> None:
        """Call before a step is planned: make room for it and for who would start, by demoting those whose
        plans leave it to us. Unused cached blocks count as free, so they go first.
        """
        willing = [sequence for sequence in self.running if sequence.is_under_pressure]
        # As long as so many are free, any of them can be demoted.
        self._num_kept_free = max((self._demoter.num_taken(sequence) for sequence in willing), default=0)
        if not willing:
            return
        most = self._settings.max_batched_tokens
        taken = (self._num_wanted(sequence, min(sequence.num_runnable, most)) for sequence in self.running)
        # What demoting takes may itself grow in the step, by a block of each list.
        num_free = max(round(WATERMARK * self._pool.num_blocks), self._num_kept_free + sum(taken) + 2)
        self._demoter.reclaim(willing, num_free)
        if len(self.running) < self._settings.max_sequences and (next_up := self._next_up()) is not None:
            lower = [sequence for sequence in willing if sequence.priority <= next_up.priority]
            self._demoter.reclaim(lower, num_free + self._blocks.num_blocks_wanted(next_up))

    def _num_wanted(self, sequence: Sequence, num_tokens: int) -> int:
        """Free blocks that it takes to demote what is due, and to commit `num_tokens` more tokens."""
        return self._demoter.num_wanted(sequence, num_tokens)

    def _extend(self, sequence: Sequence, num_tokens: int) -> None:
        """Demote what is due, and allocate what `num_tokens` more tokens need; they are known to fit."""
        self._demoter.demote(sequence)
        # Blocks that were reserved for a draft may be there already.
        sequence.block_table += self._pool.allocate(max(0, sequence.blocks_missing(num_tokens)))


def shape_of(chunks: Iterable[ScheduledChunk]) -> StepShape:
    """What of a step its cost depends on. A draft's rows are sampled from, as a sequence's last row is."""
    shape = StepShape()
    for chunk in chunks:
        shape.add(chunk.num_rows, chunk.sequence.num_committed)
        shape.num_sequences += len(chunk.draft_token_ids)
    return shape
