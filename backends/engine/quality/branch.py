"""A sequence whose tokens lie in blocks of several formats, and that can be forked: read once, try all plans.

The layout and the kernels are the engine's. Its bookkeeping is not: here a token may move between any two
formats at any time, so that plans can be compared that the engine does not offer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct, field

from surefoot.kernels.base import Ops, Past, Slots
from surefoot.kernels.layout import FORMATS, FULL, BlockLayout, CacheFormat


class OutOfBlocks(Exception):
    """The store was made too small for what is tried with it."""


class BlockStore:
    """Blocks of equal bytes, uint8 `[num_layers, num_blocks, block_bytes]`, each held by some branches."""

    def __init__(self, ops: Ops, layout: BlockLayout, num_layers: int, num_blocks: int) -> None:
        self.ops, self.layout = ops, layout
        self.data = torch.zeros(num_layers, num_blocks, layout.block_bytes, dtype=torch.uint8)
        self._holders = [0] * num_blocks

    @property
    def num_used(self) -> int:
        """Blocks that are held."""
        return len(self._holders) - self._holders.count(0)

    def take(self) -> int:
        """A block that nobody holds."""
        try:
            block = self._holders.index(0)
        except ValueError as error:
            raise OutOfBlocks(f"all {len(self._holders)} blocks are held") from error
        self._holders[block] = 1
        return block

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder."""
        for block in blocks:
            self._holders[block] += 1

    def give(self, blocks: Sequence[int]) -> None:
        """One holder less."""
        for block in blocks:
            self._holders[block] -= 1


class Held(Struct):
    """A branch's tokens of one format, by position, in the order of its blocks' slots."""

    positions: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


class Branch:
    """One sequence. Positions are those of the text, also after tokens were dropped."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self.length = 0
        """The position of the next token."""
        self.held = {cache_format: Held() for cache_format in FORMATS}

    def __enter__(self) -> Branch:
        return self

    def __exit__(self, *_: Any) -> None:
        for held in self.held.values():
            self._store.give(held.blocks)
        self.held = {cache_format: Held() for cache_format in FORMATS}

    @property
    def num_blocks(self) -> int:
        """Blocks of all formats."""
        return sum(len(held.blocks) for held in self.held.values())

    def fork(self) -> Branch:
        """The same tokens again. Full blocks are shared, since nothing is written to them any more."""
        other = Branch(self._store)
        other.length = self.length
        for cache_format, held in self.held.items():
            num_full = len(held.positions) // self._store.layout.capacity(cache_format)
            blocks = held.blocks[:num_full]
            self._store.share(blocks)
            for block in held.blocks[num_full:]:
                blocks.append(self._store.take())
                self._store.data[:, blocks[-1]] = self._store.data[:, block]
            other.held[cache_format] = Held(list(held.positions), blocks)
        return other

    def extend(self, num_tokens: int) -> Slots:
        """Room for the next tokens, in full precision."""
        self.length += num_tokens
        return self._append(FULL, range(self.length - num_tokens, self.length))

    def move(self, targets: Mapping[int, CacheFormat | None]) -> None:
        """Give tokens, by position, another format; None drops them. Those that stay are moved together."""
        for source in FORMATS:
            held, leaving = self.held[source], Held()
            moves: dict[CacheFormat, list[int]] = {}
            for place, position in enumerate(held.positions):
                target = targets.get(position, source)
                if target is not None:
                    moves.setdefault(target, []).append(place)
            if len(moves.get(source, ())) == len(held.positions):
                continue
            leaving, self.held[source] = held, Held()
            for target, places in moves.items():
                old = self._slots(source, leaving.blocks, places)
                new = self._append(target, [leaving.positions[place] for place in places])
                self._store.ops.demote(self._store.data, self._store.layout, old, new)
            self._store.give(leaving.blocks)

    def _append(self, cache_format: CacheFormat, positions: Sequence[int]) -> Slots:
        held, capacity = self.held[cache_format], self._store.layout.capacity(cache_format)
        first = len(held.positions)
        held.positions += positions
        while len(held.blocks) * capacity < len(held.positions):
            held.blocks.append(self._store.take())
        return self._slots(cache_format, held.blocks, range(first, len(held.positions)))

    def _slots(self, cache_format: CacheFormat, blocks: Sequence[int], places: Sequence[int]) -> Slots:
        place = torch.tensor(places, dtype=torch.int32)
        capacity = self._store.layout.capacity(cache_format)
        table = torch.tensor(blocks, dtype=torch.int32)
        return Slots(blocks=table[(place // capacity).long()], slots=place % capacity, format=cache_format)


def pasts_of(branches: Sequence[Branch]) -> list[Past]:
    """What a step's branches have committed, of every format that occurs."""
    pasts = []
    for cache_format in FORMATS:
        held = [branch.held[cache_format] for branch in branches]
        widest = max(len(own.blocks) for own in held)
        if widest:
            table = [[*own.blocks, *[0] * (widest - len(own.blocks))] for own in held]
            lengths = [len(own.positions) for own in held]
            pasts.append(
                Past(
                    block_table=torch.tensor(table, dtype=torch.int32),
                    lengths=torch.tensor(lengths, dtype=torch.int32),
                    format=cache_format,
                )
            )
    return pasts
