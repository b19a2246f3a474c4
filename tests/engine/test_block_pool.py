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
    """Holders allocate, grow, fork (share), publish, find, let go in part, and are aborted, at random."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holders: list[list[int]] = []
        self.chains: dict[bytes, list[bytes]] = {}
        """Every key that was ever published, with all keys up to it."""
        self.keys: dict[int, bytes] = {}
        """Of blocks that nobody was given since they were published."""

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
        self.keys = {block: key for block, key in self.keys.items() if block not in blocks}
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        known = 0
        while known < len(holder) and holder[known] in self.keys:
            known += 1
        if known == len(holder):
            return
        parent = self.keys[holder[known - 1]] if known else None
        key = len(self.chains).to_bytes(2, "little")
        self.pool.publish(holder[known], key, parent)
        self.keys[holder[known]] = key
        self.chains[key] = [*(self.chains[parent] if parent else []), key]

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def find_a_chain(self, data: st.DataObject) -> None:
        chain = self.chains[data.draw(st.sampled_from(sorted(self.chains)))]
        found = [block for key in chain if (block := self.pool.find(key)) is not None]
        assert [self.keys[block] for block in found] == chain[: len(found)], "a chain lost more than its tail"
        self.pool.share(found)
        self.holders.append(found)

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def touch_a_chain(self, data: st.DataObject) -> None:
        for key in reversed(self.chains[data.draw(st.sampled_from(sorted(self.chains)))]):
            self.pool.touch(key)

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        self.keys.clear()
        self.chains.clear()

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
        self.pool.free(holder[keep:][::-1])
        del holder[keep:]

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.free(self.holders.pop(index)[::-1])

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_integrity()
        counts = Counter(block for holder in self.holders for block in holder)
        assert all(self.pool.ref_count(block) == counts[block] for block in range(NUM_BLOCKS))
        assert self.pool.num_used == len(counts)
        assert self.pool.num_free == NUM_BLOCKS - len(counts)
        assert self.pool.num_cached == len(self.keys.keys() - counts.keys())


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


def chain(pool: BlockPool, name: str, num_blocks: int) -> list[int]:
    """Blocks that are held, published as the chain `name`0, `name`1 and so on."""
    blocks = pool.allocate(num_blocks)
    for at, block in enumerate(blocks):
        pool.publish(block, f"{name}{at}".encode(), f"{name}{at - 1}".encode() if at else None)
    return blocks


def found(pool: BlockPool, *names: str) -> set[str]:
    """Those of the keys that have a block."""
    return {name for name in names if pool.find(name.encode()) is not None}


def test_the_longest_unused_goes_first_and_from_its_tail() -> None:
    """Blocks without content go first, then cached ones: the chain let go first, its last block first."""
    pool = BlockPool(7)
    a, b = chain(pool, "a", 3), chain(pool, "b", 3)
    pool.free(a[::-1])
    pool.free(b[::-1])
    assert (pool.num_free, pool.num_cached, pool.num_used) == (7, 6, 0)
    everything = ("a0", "a1", "a2", "b0", "b1", "b2")
    pool.allocate(1)
    assert found(pool, *everything) == set(everything)
    pool.share(a[:2])
    pool.allocate(2)
    assert found(pool, *everything) == {"a0", "a1", "b0", "b1"}
    pool.free(a[1::-1])
    pool.allocate(2)
    assert found(pool, *everything) == {"a0", "a1"}
    assert (pool.take_evictions(), pool.take_evictions()) == (4, 0)
    pool.check_integrity()


def test_what_is_in_use_is_never_given_out() -> None:
    """With everything held there is nothing to allocate, however much of it has content."""
    pool = BlockPool(4)
    held = chain(pool, "a", 4)
    pool.share(held[:2])
    pool.free(held[::-1])
    assert set(pool.allocate(2)) == set(held[2:])
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)


def test_blank_blocks_cannot_be_shared() -> None:
    """A free block without content has nothing to share."""
    with pytest.raises(AssertionError, match="no content to share"):
        BlockPool(2).share([0])


def test_integrity_check_sees_a_parent_that_would_go_first() -> None:
    """Letting go of a chain from its head is found."""
    pool = BlockPool(3)
    pool.free(chain(pool, "a", 2))
    with pytest.raises(AssertionError, match="before its child"):
        pool.check_integrity()
