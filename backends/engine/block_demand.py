"""How many blocks will be wanted: a sequence starts only where all that run are expected to end."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter

from surefoot.kernels.layout import BLOCK_TOKENS

from .cache_rule import BOUNDARY_TOKENS
from .output_lengths import OutputLengths
from .prefix_cache import PrefixCache
from .sequence import Sequence


class BlockDemand:
    """Admission on expected lengths, over a pool.

    What is wanted most at any time from now on: when one sequence ends, those that will go on hold what they
    have and as many tokens more as that one still had to come. The largest of these sums has to fit (the
    future peak of Gong et al., "Past-Future Scheduler", ASPLOS 2025, with a mean in place of a sample).
    """

    def __init__(self, blocks: PrefixCache, lengths: OutputLengths) -> None:
        self._blocks = blocks
        self._pool = blocks.pool
        self._lengths = lengths

    def fits_now(self, sequence: Sequence) -> bool:
        """Whether all that a sequence has so far finds room."""
        return self._blocks.num_blocks_wanted(sequence) <= self._pool.num_free

    def fits(self, sequence: Sequence, running: Iterable[Sequence], num_reserved: int) -> bool:
        """Whether it finds room, now and until all have ended as expected, beside `num_reserved` blocks."""
        running = list(running)
        # Those that have demoted nothing yet will want more before they want less.
        to_come = sum(_more_at_first(other) for other in running)
        if self._blocks.num_blocks_wanted(sequence) + to_come + num_reserved > self._pool.num_free:
            return False
        return self._peak((sequence, *running)) + num_reserved <= self._pool.num_blocks

    def _peak(self, sequences: Iterable[Sequence]) -> float:
        """Blocks at the moment at which most are wanted. The last block of each list counts as half full."""
        sequences, remaining = list(sequences), self._lengths.remaining
        to_come = sorted(((remaining(seq), seq) for seq in sequences), key=itemgetter(0), reverse=True)
        counted: set[int] = set()
        peak = num_held = growth = 0.0
        for num_more, sequence in to_come:
            num_blocks, blocks_per_token = _blocks_of(sequence)
            num_held += num_blocks - self._num_shared(sequence, counted)
            growth += blocks_per_token
            peak = max(peak, num_held + growth * num_more)
        return peak + _most_after_boundaries(sequences) / BLOCK_TOKENS

    def _num_shared(self, sequence: Sequence, counted: set[int]) -> int:
        """Blocks that it shares with one that was counted before, which will end no sooner. `counted` are the
        last of the blocks that those found in the cache: who has the same one has all before it too.

        In full precision alone: who demotes gives them back.
        """
        if sequence.cache_rule is not None or not (found := self._blocks.found(sequence)):
            return 0
        if found[-1] in counted:
            return len(found)
        counted.add(found[-1])
        return 0


def _more_at_first(sequence: Sequence) -> int:
    """Blocks that a running sequence will want on the way to its first demotion; under pressure it needs none
    for that beside those that are kept free for all.
    """
    if sequence.cache_rule is None or sequence.num_demoted:
        return 0
    if sequence.is_under_pressure:
        return max(0, sequence.blocks_missing(sequence.num_uncommitted))
    return max(0, sequence.peak_blocks - sequence.num_blocks)


def _blocks_of(sequence: Sequence) -> tuple[float, float]:
    """What a sequence's tokens hold when all have run, those after its last boundary left out, and what each
    token more adds.
    """
    rule, num_tokens = sequence.cache_rule, len(sequence.token_ids)
    if rule is None or num_tokens < rule.first_demotion:
        return (num_tokens + BLOCK_TOKENS / 2) / BLOCK_TOKENS, 1 / BLOCK_TOKENS
    return rule.mean_blocks(num_tokens), rule.blocks_per_token


def _most_after_boundaries(sequences: Iterable[Sequence]) -> int:
    """The most tokens that all together will have had since their last boundaries, if none ends: few where
    boundaries take turns, many where they come at once.
    """
    lengths = ((seq.cache_rule, len(seq.token_ids)) for seq in sequences)
    since = sorted(
        (
            rule.num_since_boundary(num_tokens)
            for rule, num_tokens in lengths
            if rule is not None and rule.eager and num_tokens >= rule.first_demotion
        ),
        reverse=True,
    )
    # When it is the turn of one, those with more tokens than it had theirs already.
    moments = (
        sum(since) + len(since) * (BOUNDARY_TOKENS - 1 - own) - BOUNDARY_TOKENS * place
        for place, own in enumerate(since)
    )
    return max(moments, default=0)
