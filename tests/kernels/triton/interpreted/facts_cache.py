"""Commit and demote: the reference's bytes, and no other byte changed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.kernels.base import Slots
from surefoot.kernels.layout import FORMATS, FULL, INT4, INT8, K8V4, BlockLayout, CacheFormat
from surefoot.kernels.reference import ReferenceOps
from surefoot.kernels.triton import demote as demote_module
from surefoot.kernels.triton.commit import commit
from surefoot.kernels.triton.demote import demote

HEADS = ((3, 64), (2, 96), (1, 128), (1, 72))
"""KV heads, head_dim."""

STEPS = [(a, b) for i, a in enumerate(FORMATS) for b in FORMATS[i:]]
"""From every format to itself and to every lower one."""


def _slots(layout: BlockLayout, cache_format: CacheFormat, tokens: Tensor, first_block: int = 0) -> Slots:
    """Where tokens lie in blocks that follow one another."""
    capacity = layout.capacity(cache_format)
    return Slots(
        blocks=(first_block + tokens // capacity).int(), slots=(tokens % capacity).int(), format=cache_format
    )


def _cache(layout: BlockLayout, blocks: int = 16, layers: int = 2) -> Tensor:
    return torch.randint(0, 256, (layers, blocks, layout.block_bytes), dtype=torch.uint8)


def _filled(layout: BlockLayout, at: Slots, rows: int, layers: int = 2) -> Tensor:
    """A cache in which tokens of many sizes lie at `at`."""
    cache, shape = _cache(layout, layers=layers), (layers, rows, layout.num_kv_heads, layout.head_dim)
    sizes = torch.logspace(-6, 3, rows)[:, None, None]
    ReferenceOps().commit(
        cache, layout, torch.randn(shape) * sizes, torch.randn(shape) + 0.5, at.blocks, at.slots, at.format
    )
    return cache


@pytest.mark.parametrize(("rows", "heads"), [(1, HEADS[0]), (63, HEADS[1]), (111, HEADS[2]), (63, HEADS[3])])
@pytest.mark.parametrize("cache_format", FORMATS)
def test_commit_bytes(rows: int, heads: tuple[int, int], cache_format: CacheFormat) -> None:
    """The reference's bytes are written, in every layer, and no other byte is."""
    layout = BlockLayout(num_kv_heads=heads[0], head_dim=heads[1], dtype=torch.bfloat16)
    cache = _cache(layout)
    expected = cache.clone()
    k, v = torch.randn(2, rows, *heads), torch.randn(2, rows, *heads) + 0.5
    k[0, 0], v[0, rows // 2], v[1, rows - 1] = 0.0, 3.0, v[1, rows - 1] * 1e-7
    at = _slots(layout, cache_format, torch.randperm(rows))
    commit(cache, layout, k, v, at.blocks, at.slots, cache_format)
    ReferenceOps().commit(expected, layout, k, v, at.blocks, at.slots, cache_format)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize(
    ("dtype", "given", "cache_format"),
    [
        (torch.float32, torch.float32, FULL),
        (torch.float32, torch.bfloat16, INT4),
        (torch.bfloat16, torch.bfloat16, FULL),
        (torch.bfloat16, torch.float16, INT8),
        (torch.float16, torch.float32, FULL),
        (torch.float16, torch.float32, K8V4),
    ],
)
def test_commit_rounds_to_the_layouts_dtype(
    dtype: torch.dtype, given: torch.dtype, cache_format: CacheFormat
) -> None:
    """Strided rows of any dtype are rounded to the layout's before they are quantised."""
    layout = BlockLayout(num_kv_heads=2, head_dim=64, dtype=dtype)
    cache = _cache(layout)
    expected = cache.clone()
    fused = torch.randn(2, 21, 5, 64).to(given)
    fused[1, 3], fused[1, 4, 3, 7] = -0.0, 0.0
    k, v = fused[:, :, 1:3], fused[:, :, 3:]
    at = _slots(layout, cache_format, torch.arange(21))
    commit(cache, layout, k, v, at.blocks, at.slots, cache_format)
    ReferenceOps().commit(expected, layout, k, v, at.blocks, at.slots, cache_format)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("cache_format", [INT8, K8V4, INT4])
def test_commit_of_what_is_not_finite(cache_format: CacheFormat) -> None:
    """Infinities and what is no number give the reference's bytes, and spoil no neighbour."""
    layout = BlockLayout(num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    cache = _cache(layout, layers=1)
    expected = cache.clone()
    k, v = torch.randn(1, 9, 2, 64), torch.randn(1, 9, 2, 64)
    k[0, 1, 0, 5], k[0, 2, 1, 40], v[0, 3, 0, 1], v[0, 4, 0, 63] = torch.inf, -torch.inf, torch.nan, 3e38
    at = _slots(layout, cache_format, torch.arange(9))
    commit(cache, layout, k, v, at.blocks, at.slots, cache_format)
    ReferenceOps().commit(expected, layout, k, v, at.blocks, at.slots, cache_format)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize(("source", "target"), STEPS)
def test_demote_bytes(source: CacheFormat, target: CacheFormat) -> None:
    """Tokens come to lie in the target's format with the reference's bytes, and no other byte changes."""
    layout = BlockLayout(num_kv_heads=1, head_dim=96, dtype=torch.bfloat16)
    at = _slots(layout, source, torch.arange(63))
    to = _slots(layout, target, torch.randperm(63), first_block=8)
    cache = _filled(layout, at, 63)
    expected = cache.clone()
    demote(cache, layout, at, to)
    ReferenceOps().demote(expected, layout, at, to)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("target", [INT8, K8V4, INT4])
def test_demoted_bytes_are_committed_bytes(target: CacheFormat) -> None:
    """A token demoted from full precision has the bytes that committing it would have given."""
    layout = BlockLayout(num_kv_heads=2, head_dim=96, dtype=torch.bfloat16)
    cache, k, v = _cache(layout, layers=1), torch.randn(1, 40, 2, 96), torch.randn(1, 40, 2, 96)
    committed = cache.clone()
    at, to = _slots(layout, FULL, torch.arange(40)), _slots(layout, target, torch.arange(40), first_block=8)
    commit(cache, layout, k, v, at.blocks, at.slots)
    demote(cache, layout, at, to)
    commit(committed, layout, k, v, to.blocks, to.slots, target)
    assert torch.equal(cache[:, 8:], committed[:, 8:])


@pytest.mark.parametrize("cache_format", FORMATS)
def test_compaction_in_place(cache_format: CacheFormat) -> None:
    """Where sources and targets overlap in every way, all tokens are read before any is written."""
    layout = BlockLayout(num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    at = _slots(layout, cache_format, torch.arange(111))
    to = _slots(layout, cache_format, torch.randperm(111))
    cache = _filled(layout, at, 111)
    expected = cache.clone()
    demote(cache, layout, at, to)
    ReferenceOps().demote(expected, layout, at, to)
    assert torch.equal(cache, expected)


def test_repacking_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens may be demoted into blocks that they came from, a few layers at a time."""
    layout = BlockLayout(num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    at, to = _slots(layout, FULL, torch.arange(63)), _slots(layout, INT4, torch.arange(63))
    cache = _filled(layout, at, 63, layers=5)
    expected = cache.clone()
    monkeypatch.setattr(demote_module, "STAGING_BYTES", 2 * 2 * layout.block_bytes)
    demote(cache, layout, at, to)
    ReferenceOps().demote(expected, layout, at, to)
    assert torch.equal(cache, expected)


def test_no_tokens_change_nothing() -> None:
    """Committing or demoting no tokens leaves every byte."""
    layout = BlockLayout(num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    cache, none = _cache(layout), _slots(layout, INT8, torch.arange(0))
    before, empty = cache.clone(), torch.empty(2, 0, 2, 64)
    commit(cache, layout, empty, empty, none.blocks, none.slots, INT8)
    demote(cache, layout, none, none)
    assert torch.equal(cache, before)
