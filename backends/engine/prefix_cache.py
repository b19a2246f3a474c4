"""Which blocks a sequence need not compute: those that hold the tokens it begins with.

A full block's key is a hash over its 16 token ids and the key of the block before it, so it names everything
that the block's K and V depend on. A chain begins with a root key. Requests of one salt have the same root;
another salt has one that nobody can guess or hit, and meets nothing but misses, after the same work as if
nothing were cached.
"""

from __future__ import annotations

import hashlib
import secrets
from struct import Struct as Packing

from surefoot.kernels.layout import BLOCK_TOKENS

from .block_pool import BlockPool
from .sequence import Request, Sequence, SequenceStatus

KEY_BYTES = 16

_pack_tokens = Packing(f"<{BLOCK_TOKENS}I").pack


class PrefixCache:
    """Gives sequences the blocks they begin with, publishes what they compute, and takes blocks back.

    Blocks of committed prompt and output tokens are published, and are never written again. When two
    sequences compute the same block at once, the first one's is published and the second one keeps its own.

    Choices of a request share in any case. Requests share with one another if `between_requests` is set, and
    unless the prompt's log-probabilities are wanted, for which every token has to run.
    """

    def __init__(
        self, pool: BlockPool, identity: tuple[str, ...] = (), *, between_requests: bool = False
    ) -> None:
        """`identity` names all that K and V depend on beside tokens: weights, dtype, format."""
        self.pool = pool
        self._identity = identity
        self._between_requests = between_requests
        self._secret = secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE)

    def enter(self, request: Request) -> None:
        """Settle whom a new request shares with."""
        if self._between_requests and not request.scores_prompt:
            request.root_key = self._root_key(request.message.salt, request.cache_rule is not None)
            request.num_queried_tokens = len(request.prompt_token_ids)
        elif request.message.params.n > 1:
            request.root_key = secrets.token_bytes(KEY_BYTES)

    def num_blocks_wanted(self, sequence: Sequence) -> int:
        """Free blocks that it takes to get to where a sequence that is to start has all its tokens."""
        in_use = sum(self.pool.ref_count(block) > 0 for block in self._find(sequence))
        return sequence.peak_blocks - in_use

    def found(self, sequence: Sequence) -> list[int]:
        """The blocks in the cache that a running sequence began with, or that one would begin with now."""
        if sequence.status is SequenceStatus.RUNNING:
            return sequence.block_table[: sequence.num_found]
        return self._find(sequence)

    def attach(self, sequence: Sequence) -> None:
        """Give a sequence that starts, with nothing committed, the cached blocks that it begins with."""
        blocks = self._find(sequence)
        self.pool.share(blocks)
        sequence.block_table = blocks
        sequence.num_published = sequence.num_found = len(blocks)
        sequence.num_committed = len(blocks) * BLOCK_TOKENS
        if sequence.request.first_step_s is None:
            sequence.request.num_cached_tokens = sequence.num_committed

    def publish(self, sequence: Sequence) -> None:
        """Call after each commit: blocks that it filled can be found from now on, unless it has demoted
        tokens: what it computes then depends on them.

        A block is published only after its parent, and where that parent is the sequence's own: held by it,
        the parent cannot go before the child. What is left over is published when all are let go at once.
        """
        if sequence.request.root_key is None or sequence.num_demoted:
            return
        for index in range(sequence.num_published, sequence.num_committed // BLOCK_TOKENS):
            if index == 0 or self._is_published(sequence, index - 1):
                self._publish(sequence, index)
            sequence.num_published = index + 1

    def release(self, sequence: Sequence) -> None:
        """Take back a sequence's blocks; what is in the full ones can be found until they are given out."""
        self.let_go(sequence)
        self.pool.free([*sequence.low_table, *sequence.high_table])
        sequence.low_table, sequence.high_table, sequence.high_places = [], [], []
        sequence.num_published = sequence.num_committed = sequence.num_low = 0
        sequence.num_to_reclaim = 0

    def let_go(self, sequence: Sequence) -> None:
        """Take back the blocks in full precision alone. They can be found if nothing was demoted yet."""
        is_own = sequence.request.root_key is None or sequence.num_demoted > 0
        num_full = 0 if is_own else sequence.num_committed // BLOCK_TOKENS
        for index in range(num_full):
            self._publish(sequence, index)
        # From the tail, as what is let go first is given out first. The published one of equal blocks moves
        # to where this sequence's own would be, since its children may be this sequence's.
        for index in reversed(range(len(sequence.block_table))):
            if index < num_full:
                self.pool.touch(sequence.block_keys[index])
            self.pool.free([sequence.block_table[index]])
        sequence.block_table, sequence.num_found = [], 0

    def distrust(self, request: Request) -> None:
        """Its numbers went wrong, perhaps by a block that others share: let no block be found again."""
        request.root_key = None
        self.pool.forget()

    def _find(self, sequence: Sequence) -> list[int]:
        """The published blocks that a sequence begins with, short of what has to run."""
        if sequence.request.root_key is None:
            return []
        most = len(sequence.token_ids) - 1
        if sequence.cache_rule is not None:
            most = min(most, sequence.cache_rule.first_demotion)
        blocks: list[int] = []
        for index in range(most // BLOCK_TOKENS):
            block = self.pool.find(self._key(sequence, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _is_published(self, sequence: Sequence, index: int) -> bool:
        return self.pool.find(self._key(sequence, index)) == sequence.block_table[index]

    def _publish(self, sequence: Sequence, index: int) -> None:
        """Unless an equal block is published already."""
        key = self._key(sequence, index)
        if self.pool.find(key) is None:
            parent = self._key(sequence, index - 1) if index else None
            self.pool.publish(sequence.block_table[index], key, parent)

    def _key(self, sequence: Sequence, index: int) -> bytes:
        """Of full block `index` of the sequence's tokens; each is hashed once in the sequence's life."""
        keys = sequence.block_keys
        while len(keys) <= index:
            start = len(keys) * BLOCK_TOKENS
            parent = keys[-1] if keys else sequence.request.root_key
            assert parent is not None, "the request shares with nobody"
            tokens = _pack_tokens(*sequence.token_ids[start : start + BLOCK_TOKENS])
            keys.append(hashlib.blake2b(parent + tokens, digest_size=KEY_BYTES).digest())
        return keys[index]

    def _root_key(self, salt: str, is_rotated: bool) -> bytes:
        """Keys of sequences that may be demoted are stored rotated, and are of no use to others."""
        digest = hashlib.blake2b(key=self._secret, digest_size=KEY_BYTES)
        for part in (*self._identity, *(["rotated"] * is_rotated), salt):
            # Lengths first: no two lists of parts may look the same when joined.
            encoded = part.encode()
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        return digest.digest()
