"""Which cache blocks are free, who holds the others, and what is worth keeping in those that nobody holds.

Knows numbers and opaque keys only, no tensors and no tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from msgspec import Struct


class OutOfBlocks(Exception):
    """More blocks were asked for than are free."""


class CachedBlock(Struct, frozen=True):
    """A block under its content's key, and the key of the content before it (None for a chain's first)."""

    block: int
    parent: bytes | None


class BlockPool:
    """Block ids with reference counts, and an index of the blocks whose content has a key.

    A block is held by one sequence or shared by several; it is free again when the last of them lets go. A
    free block that has a key is *cached*: it can be held again as it is, until it is given out for other
    content. Blocks without a key are given out first, then cached ones in the order in which they were let
    go. Who lets go of a chain must do so from its tail, so that no parent goes before its child.
    """

    def __init__(self, num_blocks: int) -> None:
        """All of `num_blocks` (at least 1) start free."""
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least 1 block, got {num_blocks}")
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._index: dict[bytes, CachedBlock] = {}
        self._keys: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Free blocks with a key, the longest unused first."""
        self._num_evictions = 0

    @property
    def num_blocks(self) -> int:
        """Blocks in all, free or used."""
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content could be used again."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with a reference count above 0."""
        return self.num_blocks - self.num_free

    def ref_count(self, block: int) -> int:
        """How many hold this block."""
        return self._ref_counts[block]

    def find(self, key: bytes) -> int | None:
        """The block that has this content, used or free."""
        cached = self._index.get(key)
        return None if cached is None else cached.block

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` free blocks, all or none; raises `OutOfBlocks`."""
        if num_blocks > self.num_free:
            raise OutOfBlocks(f"{num_blocks} blocks wanted, {self.num_free} of {self.num_blocks} free")
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Hold used or cached blocks once more."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                assert block in self._cached, f"block {block} is free and has no content to share"
                del self._cached[block]
            self._ref_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Let go of blocks, each as often as it is listed."""
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is free already"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if block in self._keys:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def publish(self, block: int, key: bytes, parent: bytes | None) -> None:
        """Let a used block be found by `key`, which no other may have, after the content of `parent`."""
        assert self._ref_counts[block] > 0, f"block {block} is free"
        assert block not in self._keys, f"block {block} has a key"
        assert key not in self._index, "the key has a block"
        self._index[key] = CachedBlock(block, parent)
        self._keys[block] = key

    def touch(self, key: bytes) -> None:
        """Count content as used now, if it is there."""
        block = self.find(key)
        if block is not None and block in self._cached:
            self._cached.move_to_end(block)

    def forget(self) -> None:
        """Take every block's key away."""
        self._free += self._cached
        self._cached.clear()
        self._index.clear()
        self._keys.clear()

    def take_evictions(self) -> int:
        """How many cached blocks were given out for other content since this was asked last."""
        count, self._num_evictions = self._num_evictions, 0
        return count

    def check_integrity(self) -> None:
        """Assert that lists, counts and index say the same; for tests and idle moments."""
        assert all(count >= 0 for count in self._ref_counts)
        assert len(set(self._free)) == len(self._free), "a block is on the free list twice"
        assert not self._cached.keys() & set(self._free), "a block is cached and on the free list"
        assert self._cached.keys() | set(self._free) == {b for b, n in enumerate(self._ref_counts) if n == 0}
        assert self._cached.keys() <= self._keys.keys(), "a cached block has no key"
        assert not self._keys.keys() & set(self._free), "a block on the free list has a key"
        assert {entry.block: key for key, entry in self._index.items()} == self._keys, "index and keys differ"
        self._check_chains()

    def _check_chains(self) -> None:
        """No parent may be given out while its child can be found."""
        order = {block: place for place, block in enumerate(self._cached)}
        for entry in self._index.values():
            if entry.parent is None:
                continue
            assert entry.parent in self._index, "a child can be found, but not its parent"
            parent = self._index[entry.parent].block
            if parent in order:
                assert entry.block in order, "a parent is free while its child is used"
                assert order[entry.block] < order[parent], "a parent would be given out before its child"

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._index[self._keys.pop(block)]
        self._num_evictions += 1
        return block
