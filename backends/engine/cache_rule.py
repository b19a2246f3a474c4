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
from surefoot.kernels.layout import BLOCK_TOKENS, FORMATS, FULL, INT4, K8V4, BlockLayout, CacheFormat

BOUNDARY_TOKENS = 64
"""Generated tokens between two boundaries."""

GRID_TOKENS = 512
"""Prompt tokens between two boundaries, where the prompt has any."""


def format_name(cache_format: CacheFormat) -> str:
    """As plans and metrics spell it."""
    return f"k{cache_format.k_bits}v{cache_format.v_bits}"


FULL_NAME = format_name(FULL)
MIXED_NAME = "mixed"
MIXED_SHARE = 0.25
"""Of the tokens that `mixed` demotes the share, the latest, that has k8v4; the others have k4v4."""


class PlanFormat(Struct, frozen=True):
    """What a plan's tokens are demoted to: a `share` of them, the latest, to `high`, the others to `low`."""

    low: CacheFormat
    high: CacheFormat = FULL
    share: float = 0.0


PLAN_FORMATS = {format_name(each): PlanFormat(each) for each in FORMATS} | {
    MIXED_NAME: PlanFormat(INT4, K8V4, MIXED_SHARE)
}
"""By the name that plans have for them."""


class Split(Struct, frozen=True):
    """How many tokens, or blocks, a plan's demoted tokens are in each of its formats."""

    low: int
    high: int

    @property
    def total(self) -> int:
        """Of both."""
        return self.low + self.high


class CacheRule(Struct, frozen=True, kw_only=True):
    """What becomes of a prompt of `num_prompt` tokens, and of what is generated after it.

    A block holds `capacity` tokens of `format.low`, `high_capacity` of `format.high`. The first `sinks`
    tokens stay in full precision, and at each boundary the latest `recent`. `grid` is the distance of
    boundaries within the prompt, None for none. One that is not `eager` has no boundaries: the scheduler
    demotes when blocks run out.
    """

    format: PlanFormat
    capacity: int
    high_capacity: int
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

    @property
    def blocks_per_token(self) -> float:
        """What a token more adds in the long run."""
        share = self.format.share
        return (1 - share) / self.capacity + share / self.high_capacity

    def mean_blocks(self, num_committed: int) -> float:
        """What so many tokens take of blocks on average, without those since the last boundary."""
        tokens = self.split(self._num_demoted(num_committed))
        full = num_committed - self.num_since_boundary(num_committed) - tokens.total
        high = tokens.high / self.high_capacity + 0.5 if self.format.share else 0
        return full / BLOCK_TOKENS + 0.5 + tokens.low / self.capacity + 0.5 + high

    def num_since_boundary(self, num_committed: int) -> int:
        """Tokens of the answer since the last boundary."""
        return max(0, num_committed - self.num_prompt) % BOUNDARY_TOKENS if self.eager else 0

    def split(self, num_demoted: int) -> Split:
        """How so many demoted tokens are in the formats. A token more adds one to one of the two numbers."""
        num_high = round(self.format.share * num_demoted)
        return Split(num_demoted - num_high, num_high)

    def demoted_blocks(self, num_demoted: int) -> Split:
        """Blocks that hold so many demoted tokens."""
        tokens = self.split(num_demoted)
        return Split(_ceil(tokens.low, self.capacity), _ceil(tokens.high, self.high_capacity))

    def peak(self, num_tokens: int) -> int:
        """The most blocks held at once on the way to so many tokens, if none are shared.

        That is at the first demotion, which copies what it keeps since the blocks may be shared; or at the
        end, when another boundary is reached.
        """
        first = self.first_demotion
        if num_tokens <= first:
            return _ceil(num_tokens, BLOCK_TOKENS)
        window = _ceil(self.sinks + self.recent + (self.grid or BOUNDARY_TOKENS), BLOCK_TOKENS)
        start = _ceil(first, BLOCK_TOKENS) + self.demoted_blocks(self._num_demoted(first)).total + window
        return max(start, window + self.demoted_blocks(self._num_demoted(num_tokens)).total)

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

    @property
    def max_full(self) -> int:
        """The longest context in full precision."""
        return min(self.max_context, self.num_blocks * BLOCK_TOKENS)

    def rule(self, plan: CachePlan, num_prompt: int, *, is_seeded: bool = False) -> CacheRule | None:
        """What a plan means for a prompt; None for full precision.

        A seed asks for the same answer again, so it makes `pressure` into `eager`, whose answers repeat.
        """
        plan_format = PLAN_FORMATS[plan.format]
        if plan_format.low == FULL:
            return None
        rule = CacheRule(
            format=plan_format,
            capacity=self.layout.capacity(plan_format.low),
            high_capacity=self.layout.capacity(plan_format.high),
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
            return self.max_full
        return rule.longest(self.num_blocks, self.max_context)


def _ceil(count: int, size: int) -> int:
    return -(-count // size)
