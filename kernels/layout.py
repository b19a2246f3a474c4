"""How a block's bytes are laid out: the one module that knows.

A block is a fixed number of bytes per layer: what 16 tokens of K and V take in the model's 16-bit dtype
(or 32-bit, in tests). It is split evenly over the KV heads; within a head's part come the K codes, then
the V codes. K is stored transposed, `[head_dim, tokens]`, so that scores of neighbouring tokens are
computed from neighbouring bytes; V as `[tokens, head_dim]`, which the weighted sum reads row by row.
"""

from __future__ import annotations

import torch
from msgspec import Struct

BLOCK_TOKENS = 16
"""Tokens of a block in the full-precision format."""


class BlockLayout(Struct, frozen=True, kw_only=True):
    """The shape of one layer's blocks. `dtype` is what K and V are stored in."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in one layer, all heads."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return BLOCK_TOKENS * self.token_bytes

    def k_plane(self, layer: torch.Tensor) -> torch.Tensor:
        """K of a layer's uint8 blocks `[num_blocks, block_bytes]` as `[num_blocks, num_kv_heads, head_dim,
        16]`.
        """
        plane: torch.Tensor = self._planes(layer)[:, :, 0].unflatten(2, (self.head_dim, BLOCK_TOKENS))
        return plane

    def v_plane(self, layer: torch.Tensor) -> torch.Tensor:
        """V of a layer's uint8 blocks `[num_blocks, block_bytes]` as `[num_blocks, num_kv_heads, 16,
        head_dim]`.
        """
        plane: torch.Tensor = self._planes(layer)[:, :, 1].unflatten(2, (BLOCK_TOKENS, self.head_dim))
        return plane

    def _planes(self, layer: torch.Tensor) -> torch.Tensor:
        return layer.view(self.dtype).view(layer.shape[0], self.num_kv_heads, 2, self.head_dim * BLOCK_TOKENS)
