"""The block pool against a model without tensors, in any order of operations."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from surefoot.backends.engine.block_pool import BlockPool, OutOfBlocks

NUM_BLOCKS = 13


class PoolMachine(RuleBasedStateMachine):
    """Holders allocate, grow, fork (share), let go in part, and are aborted, at random."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holders: list[list[int]] = []

    @rule(count=st.integers(0, NUM_BLOCKS + 2))
    def allocate(self, count: int) -> None:
        free_before = self.pool.num_free
        try:
            blocks = self.pool.allocate(count)
        except OutOfBlocks:
            assert count > free_before == self.pool.num_free
            return
        assert len(blocks) == count <= free_before
        held = {block for holder in self.holders for block in holder}
        assert not held & set(blocks), "a used block was given out again"
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share_a_prefix(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        prefix = holder[: data.draw(st.integers(0, len(holder)))]
        self.pool.share(prefix)
        self.holders.append(list(prefix))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free_some(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        keep = data.draw(st.integers(0, len(holder)))
        self.pool.free(holder[keep:])
        del holder[keep:]

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.free(self.holders.pop(index))

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_integrity()
        counts = Counter(block for holder in self.holders for block in holder)
        assert all(self.pool.ref_count(block) == counts[block] for block in range(NUM_BLOCKS))
        assert self.pool.num_used == len(counts)
        assert self.pool.num_free == NUM_BLOCKS - len(counts)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_out_of_blocks_says_how_many() -> None:
    """The error names what was wanted, what is free, and the whole."""
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="2 blocks wanted, 1 of 4 free"):
        pool.allocate(2)


def test_freeing_twice_is_caught() -> None:
    """A block that is free already cannot be freed again."""
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="is free already"):
        pool.free(blocks)


def test_integrity_check_can_fail() -> None:
    """Damage to the free list is found."""
    pool = BlockPool(3)
    pool._free.append(pool._free[0])
    with pytest.raises(AssertionError, match="twice"):
        pool.check_integrity()
