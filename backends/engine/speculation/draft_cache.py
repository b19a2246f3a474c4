"""What a draft model has in its own cache, of which sequences. Numbers only, no tensors."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Container
from itertools import takewhile

from msgspec import Struct, field

from surefoot.kernels.layout import BLOCK_TOKENS

from ..block_pool import BlockPool
from ..sequence import Sequence


class Cached(Struct):
    """Of a sequence. The first `num_committed` of its tokens are in the blocks.

    `drafted` was proposed when the sequence had `num_before` tokens, and is in the cache up to its last
    token, which never ran. Until it is known what became of it, `num_committed` counts it as well.
    """

    block_table: list[int] = field(default_factory=list)
    num_committed: int = 0
    num_before: int = 0
    drafted: tuple[int, ...] = ()


class DraftCache:
    """Blocks of a draft model's own pool, by sequence.

    All of it is full precision, and a token's place is its position, so what was drafted in vain needs no
    undoing: it is no longer counted, and what comes instead is written over it. A sequence that is preempted
    keeps what it has here; where blocks run out, the sequence that was drafted for longest ago loses its own.
    """

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self._cached: OrderedDict[Sequence, Cached] = OrderedDict()
        """The longest unused first."""

    @property
    def num_tokens(self) -> int:
        """The longest sequence that it could hold."""
        return self.pool.num_blocks * BLOCK_TOKENS

    def num_missing(self, sequence: Sequence) -> int:
        """Tokens of the sequence that must run before the next one can be drafted; `settle` first."""
        cached = self._cached.get(sequence)
        return len(sequence.token_ids) - (0 if cached is None else cached.num_committed)

    def settle(self, sequence: Sequence) -> tuple[tuple[int, ...], int] | None:
        """Take back what was drafted last and did not come: the tokens whose turn it was since, and how many
        of them were right. None if nothing is open.
        """
        cached = self._cached.get(sequence)
        if cached is None or not cached.drafted:
            return None
        came = sequence.token_ids[cached.num_before : cached.num_before + len(cached.drafted)]
        pairs = zip(cached.drafted, came, strict=False)
        num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        tried = cached.drafted[: len(came)]
        num_committed = cached.num_before + min(num_right, len(cached.drafted) - 1)
        # The newest token runs again even where it was drafted: what follows it is drafted from its logits.
        cached.num_committed = min(num_committed, len(sequence.token_ids) - 1)
        cached.drafted = ()
        return tried, num_right

    def hold(self, sequence: Sequence, num_more: int, busy: Container[Sequence]) -> Cached | None:
        """What there is of a sequence, with blocks for `num_more` more tokens; None if there are not enough.

        Others lose theirs for it, but not those that are `busy`.
        """
        cached = self._cached.setdefault(sequence, Cached())
        self._cached.move_to_end(sequence)
        missing = math.ceil((cached.num_committed + num_more) / BLOCK_TOKENS) - len(cached.block_table)
        while missing > self.pool.num_free:
            victims = (each for each in self._cached if each is not sequence and each not in busy)
            if (victim := next(victims, None)) is None:
                return None
            self.drop(victim)
        cached.block_table += self.pool.allocate(max(0, missing))
        return cached

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence and free its blocks."""
        if (cached := self._cached.pop(sequence, None)) is not None:
            self.pool.free(cached.block_table)
