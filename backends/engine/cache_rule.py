"""Which of a sequence's tokens lie in which format, and the blocks that takes: arithmetic, no state.

A *boundary* is a number of committed tokens at which tokens are demoted before the next one runs: the end of
the prompt, and every 64th token after it; in a prompt that the cache cannot hold in full precision, every
512th token too. No step's rows of a sequence lie on both sides of one. So what a
query sees of another token follows from the length of the prompt, the query's position and the plan alone,
and a sequence that is computed again from its tokens gets the same bits.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from surefoot.backends.types import CachePlan
from surefoot.kernels.layout import BLOCK_TOKENS, FORMATS, FULL, BlockLayout, CacheFormat

BOUNDARY_TOKENS = 64
"""Generated tokens between two boundaries."""

GRID_TOKENS = 512
"""Prompt tokens between two boundaries, where the prompt has any."""


def format_name(cache_format: CacheFormat) -> str:
    """As plans and metrics spell it."""
    return f"k{cache_format.k_bits}v{cache_format.v_bits}"


FULL_NAME = format_name(FULL)
FORMAT_NAMES = {format_name(each): each for each in FORMATS}


class CacheRule(Struct, frozen=True, kw_only=True):
    """What becomes of a prompt of `num_prompt` tokens, and of what is generated after it, in one format.

    A block holds `capacity` tokens of the format. The first `sinks` tokens stay in full precision, and at
    each boundary the latest `recent`. `grid` is the distance of boundaries within the prompt, None for none.
    One that is not `eager` has no boundaries: the scheduler demotes when blocks run out.
    """

    format: CacheFormat
    capacity: int
    num_prompt: int
    sinks: int
    recent: int
    grid: int | None = None
    eager: bool = True

    @property
    def first_demotion(self) -> int:
        """The first boundary at which anything is demoted. What is committed up to it was computed as in
        full precision.
        """
        if self.grid is not None:
            first = ((self.sinks + self.recent) // self.grid + 1) * self.grid
            if first < self.num_prompt:
                return first
        beyond = self.sinks + self.recent - self.num_prompt
        return self.num_prompt + max(0, beyond // BOUNDARY_TOKENS + 1) * BOUNDARY_TOKENS

    def next_boundary(self, num_committed: int) -> int | None:
        """The first one after so many tokens: those before it may run in one step. None for no more."""
        if not self.eager:
            return None
        if self.grid is not None and num_committed < self.num_prompt:
            return min((num_committed // self.grid + 1) * self.grid, self.num_prompt)
        since = num_committed - self.num_prompt
        return self.num_prompt + max(0, since // BOUNDARY_TOKENS + 1) * BOUNDARY_TOKENS

    def num_demoted(self, num_committed: int) -> int:
        """Tokens that are demoted before the token after `num_committed` ones runs."""
        return self._num_demoted(num_committed) if self.eager else 0

    def demotable(self, num_committed: int) -> int:
        """Tokens that are not protected."""
        return max(0, num_committed - self.recent - self.sinks)

    def blocks_of(self, num_committed: int) -> int:
        """Blocks that hold so many tokens when the next one is about to run, all demoted that may be."""
        num_demoted = self._num_demoted(num_committed)
        return _ceil(num_committed - num_demoted, BLOCK_TOKENS) + _ceil(num_demoted, self.capacity)

    def peak(self, num_tokens: int) -> int:
        """The most blocks held at once on the way to so many tokens, if none are shared.

        That is at the first demotion, which copies what it keeps since the blocks may be shared; or at the
        end, when another boundary is reached.
        """
        first = self.first_demotion
        if num_tokens <= first:
            return _ceil(num_tokens, BLOCK_TOKENS)
        window = _ceil(self.sinks + self.recent + (self.grid or BOUNDARY_TOKENS), BLOCK_TOKENS)
        start = _ceil(first, BLOCK_TOKENS) + _ceil(self._num_demoted(first), self.capacity) + window
        return max(start, window + _ceil(self._num_demoted(num_tokens), self.capacity))

    def longest(self, num_blocks: int, at_most: int) -> int:
        """The most tokens, prompt included, whose peak is within `num_blocks`; 0 if the prompt's is not."""
        if self.peak(self.num_prompt + 1) > num_blocks:
            return 0
        low, high = self.num_prompt, at_most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.peak(middle) <= num_blocks else (low, middle - 1)
        return low

    def _num_demoted(self, num_committed: int) -> int:
        """At the last boundary."""
        since = num_committed - self.num_prompt
        if since >= 0:
            return self.demotable(num_committed - since % BOUNDARY_TOKENS)
        return 0 if self.grid is None else self.demotable(num_committed - num_committed % self.grid)


class CacheSpace(Struct, frozen=True, kw_only=True):
    """A cache of `num_blocks` blocks for contexts of at most `max_context` tokens."""

    layout: BlockLayout
    num_layers: int
    num_blocks: int
    max_context: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        return self.num_layers * self.layout.block_bytes

    def rule(self, plan: CachePlan, num_prompt: int, *, is_seeded: bool = False) -> CacheRule | None:
        """What a plan means for a prompt; None for full precision.

        A seed asks for the same answer again, so it makes `pressure` into `eager`, whose answers repeat.
        """
        cache_format = FORMAT_NAMES[plan.format]
        if cache_format == FULL:
            return None
        rule = CacheRule(
            format=cache_format,
            capacity=self.layout.capacity(cache_format),
            num_prompt=num_prompt,
            sinks=plan.sinks,
            recent=plan.recent,
            eager=plan.demote == "eager" or is_seeded,
        )
        if rule.peak(num_prompt + 1) <= self.num_blocks:
            return rule
        return replace(rule, grid=GRID_TOKENS, eager=True)

    def longest(self, plan: CachePlan, num_prompt: int) -> int:
        """The longest context that fits the cache and the model, for a prompt of so many tokens."""
        rule = self.rule(plan, num_prompt)
        if rule is None:
            return min(self.max_context, self.num_blocks * BLOCK_TOKENS)
        return rule.longest(self.num_blocks, self.max_context)


def _ceil(count: int, size: int) -> int:
    return -(-count // size)
