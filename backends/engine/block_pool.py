"""Which cache blocks are free, and who holds the others. Knows numbers only, no tensors."""

from __future__ import annotations

from collections.abc import Sequence


class OutOfBlocks(Exception):
    """More blocks were asked for than are free."""


class BlockPool:
    """A free list of block ids with reference counts.

    A block is held by one sequence or shared by several; it is free again when the last of them lets go.
    """

    def __init__(self, num_blocks: int) -> None:
        """All of `num_blocks` (at least 1) start free."""
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least 1 block, got {num_blocks}")
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_blocks(self) -> int:
        """Blocks in all, free or used."""
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with a reference count above 0."""
        return self.num_blocks - self.num_free

    def ref_count(self, block: int) -> int:
        """How many hold this block."""
        return self._ref_counts[block]

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` free blocks, all or none; raises `OutOfBlocks`."""
        if num_blocks > self.num_free:
            raise OutOfBlocks(f"{num_blocks} blocks wanted, {self.num_free} of {self.num_blocks} free")
        blocks = [self._free.pop() for _ in range(num_blocks)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Hold used blocks once more."""
        assert all(self._ref_counts[block] > 0 for block in blocks), "only a used block can be shared"
        for block in blocks:
            self._ref_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Let go of blocks, each as often as it is listed."""
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is free already"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)

    def check_integrity(self) -> None:
        """Assert that the free list and the reference counts say the same; for tests and idle moments."""
        assert all(count >= 0 for count in self._ref_counts)
        assert len(set(self._free)) == len(self._free), "a block is on the free list twice"
        assert set(self._free) == {b for b, count in enumerate(self._ref_counts) if count == 0}
