"""Which sequences run in the next step, and with how many tokens each."""

from __future__ import annotations

from collections import deque

from msgspec import Struct

from .block_pool import BlockPool
from .prefix_cache import PrefixCache
from .sequence import Sequence, SequenceStatus
from .settings import EngineSettings


class ScheduledChunk(Struct, frozen=True):
    """A sequence's share of a step: the first `num_tokens` of its uncommitted tokens."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the newest token, so that a next one is sampled."""
        return self.num_tokens == self.sequence.num_uncommitted


class Scheduler:
    """First come, first served, within a token budget per step.

    Running sequences come first, those that decode before those that still prefill; what the budget leaves
    goes to waiting ones. Blocks are taken as they are needed. When none is left the latest started sequence
    is preempted: it gives up its blocks, waits at the front, and is computed again. The oldest one therefore
    always moves on, because admission refused what could not fit the cache alone.
    """

    def __init__(
        self, settings: EngineSettings, pool: BlockPool, prefix_cache: PrefixCache | None = None
    ) -> None:
        """Without a prefix cache of the engine's nothing is shared."""
        self._settings = settings
        self._pool = pool
        self._prefix_cache = prefix_cache or PrefixCache(pool)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In the order of their start."""
        self._num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)

    def schedule(self) -> list[ScheduledChunk]:
        """The next step's chunks; their blocks are allocated."""
        budget = self._settings.max_batched_tokens
        chunks: list[ScheduledChunk] = []
        for sequence in sorted(self.running, key=lambda seq: not seq.is_decoding):
            if sequence.status is not SequenceStatus.RUNNING or budget == 0:
                continue
            num_tokens = self._chunk_size(sequence, budget)
            if self._allocate(sequence, num_tokens, chunks):
                chunks.append(ScheduledChunk(sequence, num_tokens))
                budget = self._settings.max_batched_tokens - sum(chunk.num_tokens for chunk in chunks)
        while budget > 0 and self._can_start_next():
            sequence = self.waiting.popleft()
            self._start(sequence)
            num_tokens = self._chunk_size(sequence, budget)
            sequence.block_table += self._pool.allocate(sequence.blocks_missing(num_tokens))
            chunks.append(ScheduledChunk(sequence, num_tokens))
            budget -= num_tokens
        return chunks

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its blocks."""
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        self._release(sequence)
        sequence.status = SequenceStatus.FINISHED

    def take_preemptions(self) -> int:
        """How many sequences were preempted since this was asked last."""
        count, self._num_preemptions = self._num_preemptions, 0
        return count

    def _chunk_size(self, sequence: Sequence, budget: int) -> int:
        return min(sequence.num_uncommitted, budget, self._settings.max_prefill_chunk or budget)

    def _can_start_next(self) -> bool:
        """Start a sequence only if all it has so far fits, so that it is not preempted in its own prefill."""
        if not self.waiting or len(self.running) >= self._settings.max_sequences:
            return False
        return self._prefix_cache.num_blocks_wanted(self.waiting[0]) <= self._pool.num_free

    def _start(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)
        self._prefix_cache.attach(sequence)

    def _allocate(self, sequence: Sequence, num_tokens: int, chunks: list[ScheduledChunk]) -> bool:
        """Get the blocks for a running sequence, preempting later ones; False if it was preempted itself."""
        missing = sequence.blocks_missing(num_tokens)
        while missing > self._pool.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            chunks[:] = [chunk for chunk in chunks if chunk.sequence is not victim]
            if victim is sequence:
                return False
        sequence.block_table += self._pool.allocate(missing)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.status = SequenceStatus.WAITING
        self.waiting.appendleft(sequence)
        self._num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self._prefix_cache.release(sequence)
