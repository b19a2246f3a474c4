"""Attention over past and present against float64: sizes, heads, mixes of formats, windows, repeats."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from surefoot.kernels.base import Past
from surefoot.kernels.layout import FULL, INT4, INT8, K8V4, BlockLayout, CacheFormat
from surefoot.kernels.reference import ReferenceOps
from surefoot.kernels.triton.attention import attention, past_attention, present_attention
from surefoot.kernels.triton.merge import merge
from surefoot.kernels.triton.splits import FEW_ROWS, SPLIT_BLOCKS
from surefoot.kernels.triton.tiles import Window

from ...numerics import assert_close

reference = ReferenceOps()
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
Heads = tuple[int, int, int]
"""Query heads, KV heads, head_dim."""


class Case:
    """Sequences with random queries, keys and values, and a random cache; all else in memory is NaN."""

    def __init__(
        self, rows: list[int], lengths: dict[CacheFormat, list[int]], heads: Heads, dtype: torch.dtype
    ) -> None:
        num_heads, num_kv_heads, head_dim = heads
        self.dtype, self.scale, total = dtype, head_dim**-0.5, sum(rows)
        self.layout = BlockLayout(num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
        self.cu_rows = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
        # Rows of a fused projection: strided.
        fused = torch.randn(total, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
        self.q, self.k, self.v = fused.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        counts = {f: [math.ceil(n / self.layout.capacity(f)) for n in ns] for f, ns in lengths.items()}
        num_blocks = 3 + sum(sum(own) for own in counts.values())
        # 0xFF bytes are NaN in every dtype that numbers and pairs are stored in.
        self.layer = torch.full((num_blocks, self.layout.block_bytes), 0xFF, dtype=torch.uint8)
        order, self.pasts = torch.randperm(num_blocks).int(), []
        for cache_format, own in counts.items():
            table = torch.zeros(len(rows), max(1, *own), dtype=torch.int32)
            for b, count in enumerate(own):
                table[b, :count], order = order[:count], order[count:]
                self._fill(table[b], lengths[cache_format][b], cache_format)
            sizes = torch.tensor(lengths[cache_format], dtype=torch.int32)
            self.pasts.append(Past(block_table=table, lengths=sizes, format=cache_format))

    def _fill(self, table: Tensor, length: int, cache_format: CacheFormat) -> None:
        token, capacity = torch.arange(length), self.layout.capacity(cache_format)
        k, v = (torch.randn(1, length, self.layout.num_kv_heads, self.layout.head_dim) for _ in range(2))
        at = table[token // capacity], token % capacity
        reference.commit(self.layer[None], self.layout, k, v + 0.3, *at, cache_format)

    def alone(self, sequence: int, rows: int | None = None) -> Case:
        """One of the sequences, or the first of its rows."""
        case, own = object.__new__(Case), slice(sequence, sequence + 1)
        case.layout, case.layer, case.scale, case.dtype = self.layout, self.layer, self.scale, self.dtype
        begin, end = self.cu_rows[sequence : sequence + 2].tolist()
        case.q, case.k, case.v = (
            x[begin : end if rows is None else begin + rows] for x in (self.q, self.k, self.v)
        )
        case.cu_rows = torch.tensor([0, len(case.q)], dtype=torch.int32)
        case.pasts = [
            Past(block_table=p.block_table[own], lengths=p.lengths[own], format=p.format) for p in self.pasts
        ]
        return case

    def past(self, **options: Window | int | None) -> tuple[Tensor, Tensor]:
        return past_attention(
            self.q, self.cu_rows, self.layer, self.layout, self.pasts, self.scale, **options
        )

    def exact_past(self) -> tuple[Tensor, Tensor]:
        q = self.q.double()
        return reference.past_attention(q, self.cu_rows, self.layer, self.layout, self.pasts, self.scale)

    def both(self, **options: Window | int | None) -> tuple[Tensor, Tensor]:
        lse = torch.empty(self.q.shape[:2])
        args = self.q, self.k, self.v, self.cu_rows, self.layer, self.layout, self.pasts, self.scale
        return attention(*args, lse, **options), lse

    def exact_both(self) -> tuple[Tensor, Tensor]:
        q, k, v = (t.double() for t in (self.q, self.k, self.v))
        lse = torch.empty(q.shape[:2], dtype=torch.float64)
        args = self.cu_rows, self.layer, self.layout, self.pasts, self.scale
        return reference.attention(q, k, v, *args, lse), lse

    def check(self) -> None:
        """Past alone, and past and present, in output and log-sum-exp."""
        for name, (out, lse), (exact, exact_lse) in (
            ("past", self.past(), self.exact_past()),
            ("both", self.both(), self.exact_both()),
        ):
            assert out.dtype == self.dtype
            assert_close(name, out, exact, self.dtype)
            seen = exact_lse.isfinite()
            assert (lse[~seen] == -math.inf).all()
            assert_close(f"{name} lse", lse[seen], exact_lse[seen], self.dtype)


@pytest.mark.parametrize(
    ("cache_format", "length", "heads", "rows", "dtype"),
    [
        (FULL, 63, (1, 1, 64), 9, BF16),
        (FULL, 111, (4, 1, 128), 6, F16),
        (FULL, 1, (6, 2, 96), 2, F32),
        (INT8, 111, (3, 1, 64), 1, F32),
        (INT8, 63, (4, 1, 128), 3, BF16),
        (INT8, 1, (2, 2, 96), 8, F16),
        (K8V4, 111, (4, 1, 96), 1, BF16),
        (K8V4, 1, (8, 1, 128), 5, F32),
        (K8V4, 63, (3, 1, 64), 2, F16),
        (INT4, 111, (8, 1, 64), 4, BF16),
        (INT4, 63, (3, 1, 96), 1, F16),
        (INT4, 1, (1, 1, 72), 7, F32),
        (FULL, 63, (8, 1, 96), 3, BF16),
        (FULL, 111, (3, 1, 128), 1, BF16),
        (INT8, 63, (8, 1, 64), 4, BF16),
        (INT8, 111, (3, 1, 128), 6, F16),
        (K8V4, 63, (1, 1, 128), 9, BF16),
        (K8V4, 111, (4, 1, 64), 7, F32),
        (INT4, 111, (3, 1, 128), 2, F32),
        (INT4, 63, (4, 1, 128), 5, BF16),
    ],
)
def test_few_rows(
    cache_format: CacheFormat, length: int, heads: Heads, rows: int, dtype: torch.dtype
) -> None:
    """1 to 9 rows over a past in one format, of odd sizes, on every head_dim and grouping of heads."""
    Case([rows], {cache_format: [length]}, heads, dtype).check()


@pytest.mark.parametrize(("heads", "dtype"), [((4, 1, 128), BF16), ((2, 2, 64), F32), ((3, 1, 96), F16)])
def test_mixed_formats(heads: Heads, dtype: torch.dtype) -> None:
    """All formats in one call, in sequences with some, others and none, and one that has no rows."""
    lengths = {INT4: [63, 0, 3, 0], FULL: [17, 0, 1, 63], K8V4: [1, 5, 0, 0], INT8: [40, 0, 0, 0]}
    Case([2, 1, 0, 3], lengths, heads, dtype).check()


@pytest.mark.parametrize("cache_format", [FULL, INT8, K8V4, INT4])
def test_full_blocks_and_splits(cache_format: CacheFormat) -> None:
    """A past that ends with a block's last slot, or fills a split and one slot more, is seen whole."""
    capacity = BlockLayout(num_kv_heads=1, head_dim=64, dtype=BF16).capacity(cache_format)
    lengths = [capacity, SPLIT_BLOCKS * capacity + 1]
    case = Case([1, 1], {cache_format: lengths}, (1, 1, 64), BF16)
    assert_close("past", case.past()[0], case.exact_past()[0], BF16)


def test_nothing_committed() -> None:
    """Without a past its output is 0 and its log-sum-exp -inf; a list without formats is such a past."""
    for lengths in ({FULL: [0, 0], INT4: [0, 0]}, {}):
        case = Case([3, FEW_ROWS + 1], lengths, (2, 1, 64), BF16)
        out, lse = case.past()
        assert not out.any()
        assert (lse == -math.inf).all()
        assert_close("both", case.both()[0], case.exact_both()[0], BF16)


@pytest.mark.parametrize(("heads", "dtype"), [((4, 1, 64), BF16), ((3, 1, 96), F32), ((8, 1, 128), F16)])
def test_present(heads: Heads, dtype: torch.dtype) -> None:
    """Every row sees itself and the rows before it in its sequence."""
    case = Case([1, 111, 9, 0, 17], {}, heads, dtype)
    q, k, v = (t.double() for t in (case.q, case.k, case.v))
    out, lse = present_attention(case.q, case.k, case.v, case.cu_rows, case.scale)
    exact, exact_lse = reference.present_attention(q, k, v, case.cu_rows, case.scale)
    assert_close("present", out, exact, dtype)
    assert_close("lse", lse, exact_lse, dtype)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_merge(dtype: torch.dtype) -> None:
    """Parts become one softmax; one that is empty changes no bit, and two that are give 0."""
    a, b = (torch.randn(7, 3, 96).to(dtype) for _ in range(2))
    lse_a, lse_b = torch.randn(7, 3) * 5, torch.randn(7, 3) * 5
    exact = reference.merge(a.double(), lse_a.double(), b.double(), lse_b.double())
    assert_close("merge", merge(a, lse_a, b, lse_b), exact, dtype)
    none = torch.full_like(lse_a, -math.inf)
    assert torch.equal(merge(a, lse_a, torch.zeros_like(b), none), a)
    assert not merge(torch.zeros_like(a), none, torch.zeros_like(b), none).any()
