"""Attention over the past and the present, and what is written to blocks."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from surefoot.kernels.base import Ops, Past
from surefoot.kernels.cpu.ops import CpuOps
from surefoot.kernels.layout import BLOCK_TOKENS, BlockLayout
from surefoot.kernels.reference import ReferenceOps

from .numerics import TOLERANCE, assert_close

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS = ((9, 3, 64), (4, 4, 96), (8, 1, 128), (2, 1, 72))
"""Query heads, KV heads, head_dim."""


class Case:
    """Sequences with random queries and a random cache; every block that is not theirs is not a number."""

    def __init__(
        self,
        rows: list[int],
        lengths: list[int],
        heads: tuple[int, int, int] = HEADS[0],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        num_heads, num_kv_heads, head_dim = heads
        self.layout = BlockLayout(num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
        self.scale = head_dim**-0.5
        self.cu_rows = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
        total = sum(rows)
        self.q = torch.randn(total, num_heads, head_dim)
        self.k, self.v = (
            torch.randn(total, num_kv_heads, head_dim),
            torch.randn(total, num_kv_heads, head_dim),
        )
        counts = [math.ceil(n / BLOCK_TOKENS) for n in lengths]
        order = torch.randperm(sum(counts) + 3).to(torch.int32)
        self.layer = torch.full(
            (len(order), self.layout.block_bytes // dtype.itemsize), math.nan, dtype=dtype
        ).view(torch.uint8)
        table = torch.zeros(len(rows), max(1, *counts), dtype=torch.int32)
        for b, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            table[b, :count], order = order[:count], order[count:]
            for t in range(length):
                block = int(table[b, t // BLOCK_TOKENS])
                self.layout.k_plane(self.layer)[block, :, :, t % BLOCK_TOKENS] = torch.randn(
                    num_kv_heads, head_dim
                ).to(dtype)
                self.layout.v_plane(self.layer)[block, :, t % BLOCK_TOKENS] = torch.randn(
                    num_kv_heads, head_dim
                ).to(dtype)
        self.past = Past(block_table=table, lengths=torch.tensor(lengths, dtype=torch.int32))

    def past_attention(self, ops: Ops, *, double: bool = False) -> tuple[Tensor, Tensor]:
        q = self.q.double() if double else self.q
        return ops.past_attention(q, self.cu_rows, self.layer, self.layout, self.past, self.scale)

    def present_attention(self, ops: Ops, *, double: bool = False) -> tuple[Tensor, Tensor]:
        q, k, v = (t.double() if double else t for t in (self.q, self.k, self.v))
        return ops.present_attention(q, k, v, self.cu_rows, self.scale)

    def sequence(self, b: int, rows: slice = slice(None)) -> Case:
        """Sequence b by itself, or some of its rows."""
        alone = object.__new__(Case)
        alone.layout, alone.scale, alone.layer = self.layout, self.scale, self.layer
        own = slice(int(self.cu_rows[b]), int(self.cu_rows[b + 1]))
        alone.q, alone.k, alone.v = self.q[own][rows], self.k[own][rows], self.v[own][rows]
        alone.cu_rows = torch.tensor([0, len(alone.q)], dtype=torch.int32)
        alone.past = Past(block_table=self.past.block_table[b : b + 1], lengths=self.past.lengths[b : b + 1])
        return alone


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_past_attention(ops: Ops, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Every row attends to all committed tokens of its sequence and to no others."""
    case = Case([1, 3, 40, 2], [1, 111, 300, 63], heads, dtype)
    out, lse = case.past_attention(ops)
    expected_out, expected_lse = case.past_attention(ReferenceOps(), double=True)
    assert_close("out", out, expected_out)
    assert_close("lse", lse, expected_lse)


def test_empty_past(ops: Ops) -> None:
    """Without committed tokens the output is 0 and the log-sum-exp -inf."""
    out, lse = Case([1, 30], [0, 0]).past_attention(ops)
    assert not out.any()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rows", [[1], [63, 1, 111], [300, 2]])
def test_present_attention(ops: Ops, heads: tuple[int, int, int], rows: list[int]) -> None:
    """Every row attends to itself and to the rows before it in its sequence."""
    case = Case(rows, [0] * len(rows), heads)
    out, lse = case.present_attention(ops)
    expected_out, expected_lse = case.present_attention(ReferenceOps(), double=True)
    assert_close("out", out, expected_out)
    assert_close("lse", lse, expected_lse)


@pytest.mark.parametrize("heads", HEADS)
def test_merge_is_attention_over_both_parts(ops: Ops, heads: tuple[int, int, int]) -> None:
    """Past and present, merged, are one softmax over all tokens."""
    case = Case([1, 30], [17, 300], heads)
    merged = ops.merge(*case.past_attention(ops), *case.present_attention(ops))
    reference = ReferenceOps()
    expected = reference.merge(
        *case.past_attention(reference, double=True), *case.present_attention(reference, double=True)
    )
    assert_close("merged", merged, expected)


def test_an_empty_part_changes_nothing(ops: Ops) -> None:
    """Merging with an empty past returns the present's output."""
    case = Case([5], [0])
    out, lse = case.present_attention(ops)
    assert torch.allclose(ops.merge(*case.past_attention(ops), out, lse), out, rtol=1e-6, atol=0)


def test_fused_attention_is_past_present_and_merge(ops: Ops) -> None:
    """The one-call form agrees with the three ops it stands for."""
    case = Case([1, 30, 100, 1], [17, 300, 0, 513], dtype=torch.bfloat16)
    fused = ops.attention(
        case.q, case.k, case.v, case.cu_rows, case.layer, case.layout, case.past, case.scale
    )
    reference = ReferenceOps()
    expected = reference.merge(
        *case.past_attention(reference, double=True), *case.present_attention(reference, double=True)
    )
    assert_close("attention", fused, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_past_bits_do_not_depend_on_the_batch(cpu: CpuOps, cpu_threads: CpuOps, dtype: torch.dtype) -> None:
    """A row's bits are its own: alone, in a chunk, beside other sequences, on one thread or three."""
    case = Case([1, 63, 3], [300, 700, 513], dtype=dtype)
    out, lse = case.past_attention(cpu)
    for same_out, same_lse in (case.past_attention(cpu_threads),):
        assert torch.equal(same_out, out)
        assert torch.equal(same_lse, lse)
    for b, start in enumerate(case.cu_rows[:-1].tolist()):
        for r in (0, int(case.cu_rows[b + 1]) - start - 1):
            alone_out, alone_lse = case.sequence(b, slice(r, r + 1)).past_attention(cpu_threads)
            assert torch.equal(alone_out[0], out[start + r])
            assert torch.equal(alone_lse[0], lse[start + r])


def test_present_bits_do_not_depend_on_later_rows(cpu: CpuOps, cpu_threads: CpuOps) -> None:
    """A row's bits depend on the rows before it in its sequence, on no later or other ones."""
    case = Case([300, 1, 63], [0, 0, 0])
    out, lse = case.present_attention(cpu)
    assert torch.equal(case.present_attention(cpu_threads)[0], out)
    for b, start in enumerate(case.cu_rows[:-1].tolist()):
        for rows in (1, 7, 63, 290):
            if rows <= int(case.cu_rows[b + 1]) - start:
                alone_out, alone_lse = case.sequence(b, slice(0, rows)).present_attention(cpu)
                assert torch.equal(alone_out, out[start : start + rows])
                assert torch.equal(alone_lse, lse[start : start + rows])


def test_fused_bits_do_not_depend_on_the_batch(cpu: CpuOps, cpu_threads: CpuOps) -> None:
    """The one-call form gives a sequence the same bits alone and among others."""
    case = Case([1, 63, 3], [300, 700, 0], dtype=torch.bfloat16)

    def fused(ops: CpuOps, c: Case) -> Tensor:
        return ops.attention(c.q, c.k, c.v, c.cu_rows, c.layer, c.layout, c.past, c.scale)

    out = fused(cpu, case)
    assert torch.equal(fused(cpu_threads, case), out)
    for b in range(3):
        assert torch.equal(fused(cpu, case.sequence(b)), out[int(case.cu_rows[b]) : int(case.cu_rows[b + 1])])


def test_queries_may_be_strided(cpu: CpuOps) -> None:
    """Slices of a fused projection are read where they lie."""
    case = Case([3, 9], [20, 40])
    expected = case.past_attention(cpu)[0], case.present_attention(cpu)[0]
    fused = torch.cat((case.q, case.k, case.v), dim=1)
    case.q, case.k, case.v = fused[:, :9], fused[:, 9:12], fused[:, 12:]
    assert torch.equal(case.past_attention(cpu)[0], expected[0])
    assert torch.equal(case.present_attention(cpu)[0], expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_commit(ops: Ops, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Tokens land in their slots, rounded to the cache's dtype, and no other byte changes."""
    _, num_kv_heads, head_dim = heads
    layout = BlockLayout(num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    cache = torch.randint(0, 256, (2, 7, layout.block_bytes), dtype=torch.uint8)
    expected = cache.clone()
    k, v = torch.randn(2, 20, num_kv_heads, head_dim), torch.randn(2, 20, num_kv_heads, head_dim)
    blocks = torch.tensor([3] * 16 + [0] * 4, dtype=torch.int32)
    slots = torch.tensor([*range(16), *range(4)], dtype=torch.int32)
    for layer in range(2):
        for r in range(20):
            layout.k_plane(expected[layer])[blocks[r], :, :, slots[r]] = k[layer, r].to(dtype)
            layout.v_plane(expected[layer])[blocks[r], :, slots[r]] = v[layer, r].to(dtype)
    ops.commit(cache, layout, k, v, blocks, slots)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(3, 64), (3, 72), (2, 40)])
@pytest.mark.parametrize("rows", [1, 63])
def test_keep(ops: Ops, heads: tuple[int, int], dtype: torch.dtype, rows: int) -> None:
    """Rows are rounded as torch rounds them, in place and in the copy; what is not a number stays so."""
    fused = torch.randn(rows, heads[0] + 2, heads[1]) * torch.logspace(-9, 4, heads[1])
    fused[0, 1, :4] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    fused[0, 2, :3] = torch.tensor([1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, 2.0**-25])
    k, v, before = fused[:, 1:-1], torch.randn(rows, *heads), fused.clone()
    expected_k, expected_v = k.to(dtype), v.to(dtype)
    kept_k, kept_v = torch.empty(rows, *heads, dtype=dtype), torch.empty(rows, *heads, dtype=dtype)
    ops.keep(k, v, kept_k, kept_v)
    for kept, left, expected in ((kept_k, k, expected_k), (kept_v, v, expected_v)):
        assert torch.equal(kept.nan_to_num(0.5), expected.nan_to_num(0.5))
        assert torch.equal(left.nan_to_num(0.5), expected.float().nan_to_num(0.5))
        assert torch.equal(kept.isnan(), expected.isnan())
    assert torch.equal(fused[:, [0, -1]], before[:, [0, -1]])


def test_commit_reads_the_first_rows_of_a_longer_buffer(ops: Ops) -> None:
    """Layers may lie further apart than their rows are long."""
    layout = BlockLayout(num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 20, 3, 64).bfloat16() for _ in range(2))
    blocks, slots = torch.tensor([2, 1, 1], dtype=torch.int32), torch.tensor([0, 3, 4], dtype=torch.int32)
    caches = [torch.zeros(2, 3, layout.block_bytes, dtype=torch.uint8) for _ in range(2)]
    ops.commit(caches[0], layout, k[:, :3], v[:, :3], blocks, slots)
    ops.commit(caches[1], layout, k[:, :3].contiguous(), v[:, :3].contiguous(), blocks, slots)
    assert torch.equal(*caches)
    assert caches[0].any()


def test_rounding_of_the_cache_is_all_that_is_lost(ops: Ops) -> None:
    """Attention over a bfloat16 cache stays within the 16-bit tolerance of the float32 one."""
    case = Case([1, 4], [300, 40])
    exact = case.past_attention(ReferenceOps(), double=True)[0]
    rounded = BlockLayout(num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    case.layer = case.layer.view(torch.float32).to(torch.bfloat16).view(torch.uint8)
    case.layout = rounded
    assert TOLERANCE[torch.bfloat16] == 1e-2
    assert_close("out", case.past_attention(ops)[0], exact, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "cuts",
    [[0, 1, 2, 5, 16, 17, 40, 250, 258, 259, 513, 600], [*range(0, 600, 111), 600], [0, 511, 514, 600]],
    ids=["ragged", "even", "late"],
)
def test_where_the_past_ends_changes_no_bit(
    cpu: CpuOps, cpu_threads: CpuOps, cuts: list[int], dtype: torch.dtype
) -> None:
    """However a text is cut into steps, each of its queries gets the same bits."""
    num_heads, num_kv_heads, head_dim = HEADS[0]
    length = cuts[-1]
    layout = BlockLayout(num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
    q = torch.randn(length, num_heads, head_dim)
    k, v = (torch.randn(1, length, num_kv_heads, head_dim).to(dtype) for _ in range(2))
    table = torch.randperm(length // BLOCK_TOKENS + 5).to(torch.int32)

    def outputs(ops: CpuOps, cuts: list[int]) -> Tensor:
        cache = torch.full((1, len(table), layout.block_bytes // dtype.itemsize), math.nan, dtype=dtype)
        blocks = cache.view(torch.uint8)
        parts = []
        for start, end in itertools.pairwise(cuts):
            past = Past(block_table=table[None], lengths=torch.tensor([start], dtype=torch.int32))
            rows, cu_rows = slice(start, end), torch.tensor([0, end - start], dtype=torch.int32)
            parts.append(
                ops.attention(q[rows], k[0, rows], v[0, rows], cu_rows, blocks[0], layout, past, 0.125)
            )
            positions = torch.arange(start, end)
            slots = (positions % BLOCK_TOKENS).to(torch.int32)
            ops.commit(blocks, layout, k[:, rows], v[:, rows], table[positions // BLOCK_TOKENS], slots)
        return torch.cat(parts)

    whole = outputs(cpu, [0, length])
    assert torch.equal(outputs(cpu, cuts), whole)
    assert torch.equal(outputs(cpu_threads, cuts), whole)
