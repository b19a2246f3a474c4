"""The naive scheduler: first come, first served. Kept to compare with, and to check the other against."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from .cost_model import CostModel
from .prefix_cache import PrefixCache
from .scheduler import BlockHolder, ScheduledChunk
from .sequence import Sequence, SequenceStatus
from .settings import EngineSettings


class FirstComeScheduler(BlockHolder):
    """First come, first served, within a token budget per step. Priorities and promises mean nothing to it.

    Running sequences come first, those that decode before those that still prefill; what the budget leaves
    goes to waiting ones. Blocks are taken as they are needed. When none is left the latest started sequence
    is preempted: it gives up its blocks, waits at the front, and is computed again. The oldest one therefore
    always moves on, because admission refused what could not fit the cache alone.
    """

    def __init__(
        self, settings: EngineSettings, blocks: PrefixCache, costs: CostModel, clock: Callable[[], float]
    ) -> None:
        """What a step costs, and when it is, are of no interest here."""
        super().__init__(settings, blocks)
        self.waiting: deque[Sequence] = deque()

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)

    def wait_s(self) -> float:
        """Never waits."""
        return 0.0

    def schedule(self) -> list[ScheduledChunk]:
        """The next step's chunks; their blocks are allocated."""
        self._reclaim()
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
            self._extend(sequence, num_tokens)
            chunks.append(ScheduledChunk(sequence, num_tokens))
            budget -= num_tokens
        return chunks

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its blocks."""
        self.lengths.observe(sequence)
        if sequence.status is SequenceStatus.RUNNING:
            self._stop(sequence, SequenceStatus.FINISHED)
        else:
            self.waiting.remove(sequence)
            sequence.status = SequenceStatus.FINISHED

    def _next_up(self) -> Sequence | None:
        return self.waiting[0] if self.waiting else None

    def _chunk_size(self, sequence: Sequence, budget: int) -> int:
        return min(sequence.num_runnable, budget, self._settings.max_prefill_chunk or budget)

    def _can_start_next(self) -> bool:
        """Start a sequence only if all it has so far fits, so that it is not preempted in its own prefill."""
        if not self.waiting or len(self.running) >= self._settings.max_sequences:
            return False
        sequence = self.waiting[0]
        return self._blocks.num_blocks_wanted(sequence) + self._num_kept_free <= self._pool.num_free

    def _allocate(self, sequence: Sequence, num_tokens: int, chunks: list[ScheduledChunk]) -> bool:
        """Get the blocks for a running sequence, preempting later ones; False if it was preempted itself."""
        while self._num_wanted(sequence, num_tokens) > self._pool.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            self.waiting.appendleft(victim)
            chunks[:] = [chunk for chunk in chunks if chunk.sequence is not victim]
            if victim is sequence:
                return False
        self._extend(sequence, num_tokens)
        return True
