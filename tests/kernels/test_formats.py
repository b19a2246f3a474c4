"""Cache formats: blocks of equal bytes, codes, and moving tokens between formats."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from surefoot.kernels.base import Ops, Slots
from surefoot.kernels.codes import dequantise, quantise, rotate, rotation_size
from surefoot.kernels.cpu.ops import CpuOps
from surefoot.kernels.layout import FORMATS, FULL, INT4, INT8, K8V4, BlockLayout, CacheFormat
from surefoot.kernels.reference import ReferenceOps

from .numerics import assert_close

HEADS = ((3, 64), (4, 96), (1, 128), (8, 64), (1, 72))
"""KV heads, head_dim."""

QUANTISED = (INT8, K8V4, INT4)
STEPS = [(a, b) for i, a in enumerate(FORMATS) for b in FORMATS[i:]]
"""From every format to itself and to every lower one."""


def _layout(heads: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> BlockLayout:
    return BlockLayout(num_kv_heads=heads[0], head_dim=heads[1], dtype=dtype)


def _slots(layout: BlockLayout, cache_format: CacheFormat, tokens: Tensor, first_block: int = 0) -> Slots:
    """Where tokens lie in blocks that follow one another."""
    capacity = layout.capacity(cache_format)
    return Slots(
        blocks=(first_block + tokens // capacity).int(), slots=(tokens % capacity).int(), format=cache_format
    )


def _cache(layout: BlockLayout, blocks: int = 24, layers: int = 2) -> Tensor:
    return torch.randint(0, 256, (layers, blocks, layout.block_bytes), dtype=torch.uint8)


def _commit(ops: Ops, cache: Tensor, layout: BlockLayout, k: Tensor, v: Tensor, at: Slots) -> None:
    ops.commit(cache, layout, k, v, at.blocks, at.slots, at.format)


@pytest.mark.parametrize(
    ("head_dim", "expected"), [(64, [16, 30, 39, 56]), (96, [16, 30, 40, 59]), (128, [16, 31, 40, 60])]
)
@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
def test_capacities(num_kv_heads: int, head_dim: int, expected: list[int]) -> None:
    """A block holds as many tokens as its bytes do, pairs included, whatever the number of heads."""
    layout = _layout((num_kv_heads, head_dim))
    assert [layout.capacity(f) for f in FORMATS] == expected


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("cache_format", FORMATS)
def test_planes_share_a_block_without_overlap(heads: tuple[int, int], cache_format: CacheFormat) -> None:
    """Every byte of a block belongs to one number of one plane at most, and the planes fit."""
    layout = _layout(heads)
    layer = torch.zeros(1, layout.block_bytes, dtype=torch.uint8)
    planes = layout.planes(layer, cache_format)
    for plane in planes:
        plane.view(torch.uint8 if plane.element_size() == 1 else torch.int16).add_(1)
    assert int((layer > 0).sum()) == sum(plane.numel() for plane in planes)
    assert int(layer.max()) == 1


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("cache_format", FORMATS)
def test_code_planes_are_aligned(head_dim: int, cache_format: CacheFormat) -> None:
    """Code planes begin at multiples of 16 bytes."""
    layout = _layout((3, head_dim))
    assert layout.head_bytes % 16 == layout.v_offset(cache_format) % 16 == 0


def test_other_formats_are_refused() -> None:
    """K never has fewer bits than V, and the message says what there is."""
    with pytest.raises(ValueError, match=r"no cache format \(4, 8\): \(16, 16\), \(8, 8\)"):
        CacheFormat(4, 8)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 72])
def test_codes_are_within_half_a_step(bits: int, head_dim: int) -> None:
    """A number moves by half a step at most, and by what rounding scale and zero point to float16 adds."""
    x = torch.randn(500, head_dim) * torch.logspace(-3, 2, 500)[:, None] + torch.randn(500, 1)
    codes = quantise(x, bits)
    scale, zero = codes.scale.double()[:, None], codes.zero.double()[:, None]
    rounding = ((2**bits - 1) * scale + zero.abs()) * 2.0**-11 + 2.0**-24
    error = (dequantise(codes, bits, torch.float64) - x.double()).abs()
    assert (error <= 0.5 * scale + rounding).all()


@pytest.mark.parametrize(("bits", "most"), [(8, 0.01), (4, 0.12)])
def test_error_of_normal_numbers(bits: int, most: float) -> None:
    """Normally distributed rows lose less than 1 % in 8 bits and 12 % in 4 (norm over norm)."""
    x = torch.randn(500, 64)
    assert float((dequantise(quantise(x, bits), bits) - x).norm() / x.norm()) < most


@pytest.mark.parametrize("rows", [1, 63, 111])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 72])
def test_rotate(ops: Ops, rows: int, head_dim: int) -> None:
    """Runs of the largest power of two are multiplied by the normalised Hadamard matrix."""
    size = rotation_size(head_dim)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    x = torch.randn(rows, 5, head_dim)
    expected = (x.double().unflatten(-1, (-1, size)) @ matrix / math.sqrt(size)).flatten(-2)
    assert_close("rotate", ops.rotate(x), expected)
    ops.rotate_heads(x[:, 1:4])
    assert_close("in place", x[:, 1:4], expected[:, 1:4])
    assert not torch.equal(x[:, 0], expected[:, 0].float())


def test_rotation_leaves_scores(ops: Ops) -> None:
    """Rotating q and k alike changes no score, and rotating twice gives back what was."""
    q, k = torch.randn(7, 3, 96), torch.randn(7, 3, 96)
    assert_close("scores", (ops.rotate(q) * ops.rotate(k)).sum(-1), (q.double() * k.double()).sum(-1))
    assert_close("twice", ops.rotate(ops.rotate(q)), q.double())


def test_rotation_spreads_an_outlier() -> None:
    """A row with one large number loses less in 4 bits once rotated."""
    x = torch.randn(100, 64)
    x[:, 5] *= 30
    plain, rotated = (dequantise(quantise(y, 4), 4) - y for y in (x, rotate(x)))
    assert rotated.norm() < 0.5 * plain.norm()


def test_rotate_bits_do_not_depend_on_the_batch(cpu: CpuOps, cpu_threads: CpuOps) -> None:
    """A row alone, strided, and among others on three threads has the same bits."""
    x = torch.randn(63, 5, 96)
    expected = cpu_threads.rotate(x)
    assert torch.equal(cpu.rotate(x[7:8])[0], expected[7])
    assert torch.equal(cpu.rotate(x[:, 1:3]), expected[:, 1:3])


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("cache_format", FORMATS)
def test_commit_bytes(cpu_threads: CpuOps, heads: tuple[int, int], cache_format: CacheFormat) -> None:
    """The CPU writes the reference's bytes and changes no other."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        layout = _layout(heads, dtype)
        cache = _cache(layout)
        expected = cache.clone()
        k, v = torch.randn(2, 111, *heads), torch.randn(2, 111, *heads) + 0.5
        k[0, 0], k[0, 1], v[0, 2], v[1, 3] = 0.0, -0.0, 3.0, v[1, 3] * 1e-7
        at = _slots(layout, cache_format, torch.randperm(111))
        _commit(cpu_threads, cache, layout, k, v, at)
        _commit(ReferenceOps(), expected, layout, k, v, at)
        assert torch.equal(cache, expected)


@pytest.mark.parametrize("cache_format", QUANTISED)
def test_a_tokens_codes_are_its_own(ops: Ops, cache_format: CacheFormat) -> None:
    """A token's bytes are the same alone and among others, in whatever slot."""
    layout = _layout((3, 64))
    k, v, first = torch.randn(1, 63, 3, 64), torch.randn(1, 63, 3, 64), torch.zeros(1, dtype=torch.int64)
    together, alone = _cache(layout, layers=1), _cache(layout, layers=1)
    at = _slots(layout, cache_format, torch.arange(63))
    _commit(ops, together, layout, k, v, at)
    for r in (0, 17, 62):
        _commit(ops, alone, layout, k[:, r : r + 1], v[:, r : r + 1], _slots(layout, cache_format, first))
        for a, b in zip(
            layout.planes(alone[0], cache_format), layout.planes(together[0], cache_format), strict=True
        ):
            assert torch.equal(a[0, ..., 0], b[int(at.blocks[r]), ..., int(at.slots[r])])


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("old", "new"), STEPS)
def test_demote_bytes(
    cpu_threads: CpuOps, heads: tuple[int, int], old: CacheFormat, new: CacheFormat
) -> None:
    """The CPU repacks chosen tokens into the reference's bytes and changes no other."""
    layout = _layout(heads)
    cache = _cache(layout)
    k, v = torch.randn(2, 111, *heads), torch.randn(2, 111, *heads)
    _commit(cpu_threads, cache, layout, k, v, _slots(layout, old, torch.arange(111)))
    expected, chosen = cache.clone(), torch.randperm(111)[:63]
    source, target = _slots(layout, old, chosen), _slots(layout, new, torch.arange(63), first_block=10)
    cpu_threads.demote(cache, layout, source, target)
    ReferenceOps().demote(expected, layout, source, target)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("cache_format", QUANTISED)
def test_demotion_gives_what_a_commit_would_have(ops: Ops, cache_format: CacheFormat) -> None:
    """Tokens demoted from full precision have the bytes of tokens committed in the lower format."""
    layout, tokens = _layout((3, 64)), torch.arange(63)
    late = _cache(layout, blocks=12)
    at_once = late.clone()
    k, v = torch.randn(2, 63, 3, 64), torch.randn(2, 63, 3, 64)
    source, target = _slots(layout, FULL, tokens), _slots(layout, cache_format, tokens, first_block=8)
    for cache in (late, at_once):
        _commit(ops, cache, layout, k, v, source)
    ops.demote(late, layout, source, target)
    _commit(ops, at_once, layout, k, v, target)
    assert torch.equal(late, at_once)


@pytest.mark.parametrize("cache_format", FORMATS)
def test_compaction_in_place(ops: Ops, cache_format: CacheFormat) -> None:
    """Tokens move within their own blocks, bytes as they are, whatever the order."""
    layout, tokens = _layout((3, 64)), torch.arange(63)
    cache, kept = _cache(layout), torch.tensor([62, 0, 31, 5, 6, 47])
    k, v = torch.randn(2, 63, 3, 64), torch.randn(2, 63, 3, 64)
    _commit(ops, cache, layout, k, v, _slots(layout, cache_format, tokens))
    expected, target = cache.clone(), _slots(layout, cache_format, torch.arange(6))
    _commit(ops, expected, layout, k[:, kept], v[:, kept], target)
    ops.demote(cache, layout, _slots(layout, cache_format, kept), target)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("cache_format", QUANTISED)
def test_faults_stay_visible(ops: Ops, cache_format: CacheFormat) -> None:
    """A token that is not a number gives a scale that is not, in its own slot alone."""
    layout = _layout((1, 64))
    cache, k = _cache(layout, layers=1), torch.randn(1, 5, 1, 64)
    k[0, 3, 0, 63] = math.nan
    _commit(ops, cache, layout, k, k.clone(), _slots(layout, cache_format, torch.arange(5)))
    pairs = layout.planes(cache[0], cache_format)[2][0, 0, :, :5]
    assert pairs[:, 3].isnan()[::2].all()
    assert pairs[:, [0, 1, 2, 4]].isfinite().all()
