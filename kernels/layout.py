"""How a block's bytes are laid out: the one module that knows.

A block is a fixed number of bytes per layer: what 16 tokens of K and V take in the model's 16-bit dtype
(or 32-bit, in tests). A `CacheFormat` says how many bits a number takes in it, and so how many tokens it
holds; every format fills the same blocks. A block is split evenly over the KV heads; within a head's part
come the K plane, the V plane, and in quantised formats the plane of (scale, zero point) pairs:

* K transposed, `[row, tokens]`: scores of neighbouring tokens are computed from neighbouring bytes, one
  dimension at a time, so that no sum runs across lanes. A capacity is seldom a multiple of 16: the last 16
  tokens of a row may overlap the 16 before, and nothing beyond the block is read.
* V as `[tokens, row]`: the weighted sum reads it row by row.
* pairs as float16 `[4, tokens]`: K's scales, K's zero points, V's scales, V's zero points; each is read as
  a vector of neighbouring tokens.

A row of 8-bit codes is `head_dim` bytes. In 4 bits it is half as many: byte i holds dimension i in its low
half and dimension `head_dim / 2 + i` in its high half, so that 16 bytes give 2 vectors of neighbouring
dimensions by a mask and a shift. Where head_dim is a multiple of 32, code planes begin at multiples of 16
bytes.
"""

from __future__ import annotations

import torch
from msgspec import Struct

BLOCK_TOKENS = 16
"""Tokens of a block in the full-precision format."""

PAIRS = 4
"""float16 numbers of a token and KV head beside its codes: scale and zero point of K, then of V."""


class CacheFormat(Struct, frozen=True):
    """Bits of a number of K and of V; (16, 16) is the model's own dtype."""

    k_bits: int
    v_bits: int

    def __post_init__(self) -> None:
        if (self.k_bits, self.v_bits) not in {(16, 16), (8, 8), (8, 4), (4, 4)}:
            raise ValueError(
                f"no cache format ({self.k_bits}, {self.v_bits}): (16, 16), (8, 8), (8, 4), (4, 4)"
            )

    @property
    def is_full(self) -> bool:
        """Whether numbers are stored as they are."""
        return self.k_bits == 16


FULL, INT8, K8V4, INT4 = (CacheFormat(*bits) for bits in ((16, 16), (8, 8), (8, 4), (4, 4)))

FORMATS = (FULL, INT8, K8V4, INT4)
"""Every format, from the most bits to the fewest."""


class BlockLayout(Struct, frozen=True, kw_only=True):
    """The shape of one layer's blocks. `dtype` is what K and V are stored in where they are not quantised."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in one layer, all heads, in full precision."""
        return self.bytes_per_token(FULL)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return BLOCK_TOKENS * self.token_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head's part of a block."""
        return self.block_bytes // self.num_kv_heads

    def bytes_per_token(self, cache_format: CacheFormat) -> int:
        """Bytes of one token in one layer, all heads, pairs included."""
        codes = self.row_bytes(cache_format.k_bits) + self.row_bytes(cache_format.v_bits)
        return self.num_kv_heads * (codes + (0 if cache_format.is_full else 2 * PAIRS))

    def capacity(self, cache_format: CacheFormat) -> int:
        """Tokens that a block holds."""
        return self.block_bytes // self.bytes_per_token(cache_format)

    def row_bytes(self, bits: int) -> int:
        """Bytes of one token's K or V of one head."""
        return self.head_dim * self.dtype.itemsize if bits == 16 else self.head_dim * bits // 8

    def v_offset(self, cache_format: CacheFormat) -> int:
        """Where the V plane begins in a head's part, in bytes."""
        return self.capacity(cache_format) * self.row_bytes(cache_format.k_bits)

    def pairs_offset(self, cache_format: CacheFormat) -> int:
        """Where the pairs begin in a head's part, in bytes."""
        return self.v_offset(cache_format) + self.capacity(cache_format) * self.row_bytes(cache_format.v_bits)

    def k_plane(self, layer: torch.Tensor) -> torch.Tensor:
        """K of a layer's uint8 blocks `[num_blocks, block_bytes]` as `[num_blocks, num_kv_heads, head_dim,
        16]`, in full precision.
        """
        return self.planes(layer, FULL)[0]

    def v_plane(self, layer: torch.Tensor) -> torch.Tensor:
        """V of a layer's uint8 blocks `[num_blocks, block_bytes]` as `[num_blocks, num_kv_heads, 16,
        head_dim]`, in full precision.
        """
        return self.planes(layer, FULL)[1].transpose(2, 3)

    def planes(self, layer: torch.Tensor, cache_format: CacheFormat) -> tuple[torch.Tensor, ...]:
        """Views of a layer's blocks as K, V and, in quantised formats, pairs: each `[num_blocks,
        num_kv_heads, row, capacity]`, in the layout's dtype, as uint8 codes, and in float16.
        """
        heads = layer.unflatten(1, (self.num_kv_heads, self.head_bytes))
        capacity, codes = self.capacity(cache_format), self.dtype if cache_format.is_full else torch.uint8
        begin, middle = self.v_offset(cache_format), self.pairs_offset(cache_format)
        k = heads[..., :begin].view(codes).unflatten(2, (-1, capacity))
        v = heads[..., begin:middle].view(codes).unflatten(2, (capacity, -1)).transpose(2, 3)
        if cache_format.is_full:
            return k, v
        pairs = heads[..., middle : middle + 2 * PAIRS * capacity].view(torch.float16)
        return k, v, pairs.unflatten(2, (PAIRS, capacity))
