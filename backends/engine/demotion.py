"""Which blocks change hands when tokens are demoted, and what is to be moved between them.

Knows numbers only. What it plans is carried out by the runner, move by move, so that blocks which one move
has left may be given out for a later one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from msgspec import Struct

from surefoot.kernels.layout import BLOCK_TOKENS, FULL, CacheFormat

from .cache_rule import CacheRule, Split
from .prefix_cache import PrefixCache
from .sequence import Sequence


class Places(Struct, frozen=True):
    """Where tokens lie: a block and a slot each."""

    format: CacheFormat
    blocks: list[int]
    slots: list[int]

    @classmethod
    def of(cls, cache_format: CacheFormat, capacity: int, table: list[int], tokens: Seq[int]) -> Places:
        """The tokens of a block list whose blocks hold `capacity` each."""
        return cls(
            cache_format,
            [table[token // capacity] for token in tokens],
            [token % capacity for token in tokens],
        )


class Move(Struct, frozen=True):
    """Tokens to copy, all read before any is written; into another format, or as they are."""

    source: Places
    target: Places


class Demoter:
    """Demotes sequences at their boundaries.

    The first time a sequence's blocks may be shared, or published for others: it copies what stays in full
    precision to fresh blocks and lets go of the old ones, which the prefix cache may keep. Later it moves
    its window together in place. Choices of a request share the full blocks of their demoted prompt in the
    lower format. Those of the higher one are each choice's own: their tokens leave for the lower one, the
    oldest first, and the next take their places.
    """

    def __init__(self, blocks: PrefixCache) -> None:
        self._blocks = blocks
        self._pool = blocks.pool
        self._moves: list[Move] = []

    def take_moves(self) -> list[Move]:
        """What was planned since this was asked last."""
        moves, self._moves = self._moves, []
        return moves

    def num_wanted(self, sequence: Sequence, num_tokens: int) -> int:
        """Free blocks that it takes to demote what is due, and to commit `num_tokens` more tokens."""
        if sequence.num_to_demote == 0:
            return max(0, sequence.blocks_missing(num_tokens))
        num_full = sequence.num_full - sequence.num_to_demote + num_tokens
        held = len(sequence.block_table) if sequence.num_demoted else 0
        num_new = self._num_new(sequence, len(self._shared(sequence))).total
        return num_new + max(0, math.ceil(num_full / BLOCK_TOKENS) - held)

    def demote(self, sequence: Sequence) -> None:
        """Demote what is due, if anything is; the blocks are known to be free."""
        rule, count = sequence.cache_rule, sequence.num_to_demote
        if rule is None or count == 0:
            return
        shared = self._shared(sequence)
        self._pool.share(shared)
        new = self._num_new(sequence, len(shared))
        sequence.low_table = [*sequence.low_table, *shared, *self._pool.allocate(new.low)]
        sequence.high_table = [*sequence.high_table, *self._pool.allocate(new.high)]
        goal = rule.split(sequence.num_demoted + count)
        high_places = self._requantise(sequence, rule, goal, len(shared) * rule.capacity)
        self._keep(sequence, rule.sinks, count)
        sequence.num_low, sequence.high_places = goal.low, high_places

    def num_taken(self, sequence: Sequence) -> int:
        """Free blocks that it takes to demote all of a sequence that may be, before any are given back."""
        rule = sequence.cache_rule
        if rule is None:
            return 0
        before, sequence.num_to_reclaim = sequence.num_to_reclaim, rule.demotable(sequence.num_committed)
        num_wanted = self.num_wanted(sequence, 0) if sequence.num_to_demote else 0
        sequence.num_to_reclaim = before
        return num_wanted

    def gain(self, sequence: Sequence) -> int:
        """How many more blocks are free if all of a sequence that may be is demoted now; 0 or less if none,
        or if it takes more than are free while it runs.
        """
        rule = sequence.cache_rule
        if rule is None or rule.demotable(sequence.num_committed) <= sequence.num_demoted:
            return 0
        if (num_taken := self.num_taken(sequence)) > self._pool.num_free:
            return 0
        if sequence.num_demoted:
            num_kept = sequence.num_committed - rule.demotable(sequence.num_committed)
            return len(sequence.block_table) - math.ceil(num_kept / BLOCK_TOKENS) - num_taken
        return sum(self._pool.ref_count(block) == 1 for block in sequence.block_table) - num_taken

    def reclaim(self, running: Iterable[Sequence], num_blocks: int) -> None:
        """Demote sequences until so many blocks are free, lowest priority first.

        None that is in the step being planned: it may lose blocks that the step writes to.
        """
        for sequence in sorted(running, key=lambda seq: (seq.priority, -seq.start_number)):
            if self._pool.num_free >= num_blocks:
                return
            if self.gain(sequence) > 0:
                assert sequence.cache_rule is not None
                sequence.num_to_reclaim = sequence.cache_rule.demotable(sequence.num_committed)
                sequence.was_reclaimed = True
                self.demote(sequence)

    def _requantise(self, sequence: Sequence, rule: CacheRule, goal: Split, num_shared: int) -> list[int]:
        """Move what is due to the lower format, tokens of the higher one first, as they are older; then the
        rest to the higher one, where those left places. Returns the places of its tokens.
        """
        places, num_low = sequence.high_places, sequence.num_low
        lowered = places[: goal.low - num_low]
        taken = [*lowered, *range(len(places), goal.high)]
        first = rule.sinks + goal.low - num_low - len(lowered)

        def low(tokens: range) -> Places:
            return Places.of(rule.format.low, rule.capacity, sequence.low_table, tokens)

        def high(tokens: list[int]) -> Places:
            return Places.of(rule.format.high, rule.high_capacity, sequence.high_table, tokens)

        self._move(high(lowered), low(range(num_low, num_low + len(lowered))))
        source = range(rule.sinks + num_shared, first)
        self._move(_full(sequence.block_table, source), low(range(goal.low - len(source), goal.low)))
        source = range(first, first + goal.high - len(places) + len(lowered))
        self._move(_full(sequence.block_table, source), high(taken))
        return [*places[len(lowered) :], *taken]

    def _keep(self, sequence: Sequence, num_sinks: int, num_gone: int) -> None:
        """Move what stays in full precision together."""
        window = range(num_sinks + num_gone, sequence.num_full)
        num_kept = num_sinks + len(window)
        old, num_blocks = sequence.block_table, math.ceil(num_kept / BLOCK_TOKENS)
        if sequence.num_demoted:
            self._move(_full(old, window), _full(old, range(num_sinks, num_kept)))
            sequence.block_table = old[:num_blocks]
            self._pool.free(old[num_blocks:])
            return
        fresh = self._pool.allocate(num_blocks)
        self._move(_full(old, [*range(num_sinks), *window]), _full(fresh, range(num_kept)))
        self._blocks.let_go(sequence)
        sequence.block_table = fresh

    def _move(self, source: Places, target: Places) -> None:
        if source.blocks:
            self._moves.append(Move(source, target))

    def _num_new(self, sequence: Sequence, num_shared: int) -> Split:
        """Blocks of both formats that must be allocated."""
        rule = sequence.cache_rule
        assert rule is not None
        goal = rule.demoted_blocks(sequence.num_demoted + sequence.num_to_demote)
        low = goal.low - len(sequence.low_table) - num_shared
        return Split(low, goal.high - len(sequence.high_table))

    def _shared(self, sequence: Sequence) -> list[int]:
        """Full blocks of the demoted prompt, in the lower format, that another choice has, for one that has
        demoted nothing.
        """
        rule = sequence.cache_rule
        if rule is None or sequence.num_demoted:
            return []
        other = max(sequence.request.sequences, key=lambda choice: choice.num_low)
        num_wanted = rule.split(sequence.num_to_demote).low
        num_equal = max(0, min(other.num_low, num_wanted, rule.num_prompt - rule.sinks))
        return other.low_table[: num_equal // rule.capacity]


def _full(table: list[int], tokens: Seq[int]) -> Places:
    return Places.of(FULL, BLOCK_TOKENS, table, tokens)
