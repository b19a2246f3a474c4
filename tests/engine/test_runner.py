"""What the runner keeps the cache in."""

from __future__ import annotations

import pytest
import torch

from surefoot.backends.engine.runner import CACHE_LINE, untouched_zeros


@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 5, 12288), (30, 50, 12288)])
def test_blocks_begin_with_cache_lines(shape: tuple[int, int, int]) -> None:
    """The cache's memory is zeros of the shape asked for, and no block of whole lines shares one."""
    cache = untouched_zeros(*shape)
    assert (cache.shape, cache.dtype, int(cache.sum())) == (shape, torch.uint8, 0)
    assert {block.data_ptr() % CACHE_LINE for layer in cache for block in layer} == {0}
