"""Attention over a past in several formats at once, and the mass that its tokens receive."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from surefoot.kernels.base import Observed, Ops, Past, in_fold_order
from surefoot.kernels.cpu.ops import CpuOps
from surefoot.kernels.layout import FORMATS, FULL, INT4, INT8, K8V4, BlockLayout, CacheFormat
from surefoot.kernels.reference import ReferenceOps

from .numerics import assert_close

HEADS = ((9, 3, 64), (4, 4, 96), (8, 1, 128), (4, 1, 72))
"""Query heads, KV heads, head_dim."""

MIXES = ({INT8: 1}, {INT4: 63}, {K8V4: 111}, {INT8: 111, FULL: 63}, {INT4: 300, K8V4: 1, INT8: 60, FULL: 17})
"""Tokens of the longest sequence per format."""


class Case:
    """Sequences with random queries and a random cache in some formats; other blocks and slots give NaN."""

    def __init__(
        self,
        rows: list[int],
        lengths: dict[CacheFormat, list[int]],
        heads: tuple[int, int, int] = HEADS[0],
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        num_heads, num_kv_heads, head_dim = heads
        self.layout = BlockLayout(num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
        self.scale = head_dim**-0.5
        self.cu_rows = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
        self.q = torch.randn(sum(rows), num_heads, head_dim)
        self.k, self.v = (torch.randn(sum(rows), num_kv_heads, head_dim) for _ in range(2))
        counts = {f: [math.ceil(n / self.layout.capacity(f)) for n in ns] for f, ns in lengths.items()}
        # 0xFF bytes are NaN in every dtype that numbers and pairs are stored in.
        total = 3 + sum(sum(c) for c in counts.values())
        self.layer = torch.full((total, self.layout.block_bytes), 0xFF, dtype=torch.uint8)
        order, self.pasts = torch.randperm(total).to(torch.int32), []
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
        ReferenceOps().commit(self.layer[None], self.layout, k, v + 0.3, *at, cache_format)

    def past_attention(self, ops: Ops, *, double: bool = False) -> tuple[Tensor, Tensor]:
        q = self.q.double() if double else self.q
        return ops.past_attention(q, self.cu_rows, self.layer, self.layout, self.pasts, self.scale)

    def attention(self, ops: Ops) -> tuple[Tensor, Tensor]:
        lse = torch.empty(self.q.shape[:2])
        qkv = self.q, self.k, self.v
        out = ops.attention(*qkv, self.cu_rows, self.layer, self.layout, self.pasts, self.scale, lse)
        return out, lse

    def exact(self) -> tuple[Tensor, Tensor]:
        """The merged output and log-sum-exp in float64."""
        q, k, v = (t.double() for t in (self.q, self.k, self.v))
        lse = torch.empty(self.q.shape[:2], dtype=torch.float64)
        args = self.cu_rows, self.layer, self.layout, self.pasts, self.scale
        return ReferenceOps().attention(q, k, v, *args, lse), lse

    def sequence(self, b: int, rows: slice = slice(None)) -> Case:
        """Sequence b by itself, or some of its rows."""
        alone = object.__new__(Case)
        alone.layout, alone.scale, alone.layer = self.layout, self.scale, self.layer
        own = slice(int(self.cu_rows[b]), int(self.cu_rows[b + 1]))
        alone.q, alone.k, alone.v = self.q[own][rows], self.k[own][rows], self.v[own][rows]
        alone.cu_rows = torch.tensor([0, len(alone.q)], dtype=torch.int32)
        alone.pasts = [
            Past(block_table=p.block_table[b : b + 1], lengths=p.lengths[b : b + 1], format=p.format)
            for p in self.pasts
        ]
        return alone


def _mixed(mix: dict[CacheFormat, int], rows: list[int], heads: tuple[int, int, int] = HEADS[0]) -> Case:
    """The mix in the first sequence, less of it in the next, nothing in the last."""
    return Case(rows, {f: [n, n // 2, 0] for f, n in mix.items()}, heads)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mix", MIXES)
def test_mixed_past(ops: Ops, heads: tuple[int, int, int], mix: dict[CacheFormat, int]) -> None:
    """Every row attends to the tokens of all formats as what they stand for, in one softmax."""
    case = _mixed(mix, [1, 40, 2], heads)
    out, lse = case.past_attention(ops)
    expected_out, expected_lse = case.past_attention(ReferenceOps(), double=True)
    assert not out[-2:].any()
    assert (lse[-2:] == -math.inf).all()
    assert_close("out", out, expected_out)
    assert_close("lse", lse[lse.isfinite()], expected_lse[expected_lse.isfinite()])


@pytest.mark.parametrize("cache_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_full_blocks(ops: Ops, cache_format: CacheFormat, dtype: torch.dtype) -> None:
    """A past that ends with a block's or a partition's last slot is seen whole."""
    capacity = BlockLayout(num_kv_heads=3, head_dim=64, dtype=dtype).capacity(cache_format)
    partition = 256 // capacity * capacity
    case = Case([1, 1, 1], {cache_format: [capacity, partition, 2 * partition + 1]}, dtype=dtype)
    assert_close("out", case.past_attention(ops)[0], case.past_attention(ReferenceOps(), double=True)[0])


def test_no_past_at_all(ops: Ops) -> None:
    """A list without formats is an empty past."""
    case = Case([1, 3], {})
    out, lse = case.past_attention(ops)
    assert not out.any()
    assert (lse == -math.inf).all()
    assert_close("attention", case.attention(ops)[0], case.exact()[0])


@pytest.mark.parametrize("rows", [[1, 3, 2], [40, 1, 30]])
@pytest.mark.parametrize("mix", MIXES)
def test_fused_attention(ops: Ops, mix: dict[CacheFormat, int], rows: list[int]) -> None:
    """The one-call form is one softmax over all formats and the present, and gives its log-sum-exp."""
    case = _mixed(mix, rows)
    out, lse = case.attention(ops)
    expected_out, expected_lse = case.exact()
    assert_close("attention", out, expected_out)
    assert_close("lse", lse, expected_lse)


def test_the_order_of_formats_changes_nothing(cpu: CpuOps) -> None:
    """The list's order is not the order of folding: bits are the same."""
    case = _mixed(MIXES[-1], [1, 3, 2])
    out, lse = case.attention(cpu)
    case.pasts.reverse()
    again, again_lse = case.attention(cpu)
    assert torch.equal(again, out)
    assert torch.equal(again_lse, lse)


def test_a_format_comes_once() -> None:
    """Two block lists of one format are refused."""
    past = Case([1], {INT8: [1]}).pasts[0]
    with pytest.raises(ValueError, match="one block list per format"):
        in_fold_order([past, past])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_list_of_full_precision_is_that_past(cpu: CpuOps, dtype: torch.dtype) -> None:
    """One full-precision past by itself and in a list beside empty ones gives the same bits."""
    lengths = {FULL: [300, 17], INT4: [0, 0]}
    case = Case([1, 5], lengths, dtype=dtype)
    out, lse = case.past_attention(cpu)
    case.pasts = case.pasts[:1]
    alone, alone_lse = case.past_attention(cpu)
    assert torch.equal(alone, out)
    assert torch.equal(alone_lse, lse)


@pytest.mark.parametrize("heads", [HEADS[0], (16, 2, 64), (3, 3, 96)])
def test_bits_do_not_depend_on_the_batch(
    cpu: CpuOps, cpu_threads: CpuOps, heads: tuple[int, int, int]
) -> None:
    """A row's bits are its own in every mix: alone, in a chunk, beside others, on one thread or three."""
    lengths = {INT4: [300, 700, 0], K8V4: [0, 111, 1], INT8: [63, 513, 250], FULL: [1, 300, 0]}
    case = Case([1, 40, 3], lengths, heads)
    out, lse = case.past_attention(cpu)
    assert torch.equal(case.past_attention(cpu_threads)[0], out)
    fused = case.attention(cpu)[0]
    assert torch.equal(case.attention(cpu_threads)[0], fused)
    for b, start in enumerate(case.cu_rows[:-1].tolist()):
        for r in (0, int(case.cu_rows[b + 1]) - start - 1):
            alone_out, alone_lse = case.sequence(b, slice(r, r + 1)).past_attention(cpu_threads)
            assert torch.equal(alone_out[0], out[start + r])
            assert torch.equal(alone_lse[0], lse[start + r])
        assert torch.equal(case.sequence(b).attention(cpu)[0], fused[start : int(case.cu_rows[b + 1])])


@pytest.mark.parametrize(("cache_format", "most"), [(INT8, 0.01), (K8V4, 0.12), (INT4, 0.2)])
def test_loss_of_a_format(ops: Ops, cache_format: CacheFormat, most: float) -> None:
    """Against the float32 tokens the output moves by no more than the format's codes do, about."""
    layout = BlockLayout(num_kv_heads=3, head_dim=64, dtype=torch.float32)
    q, token = torch.randn(5, 9, 64), torch.arange(300)
    k, v = torch.randn(1, 300, 3, 64), torch.randn(1, 300, 3, 64)
    cu_rows, outputs = torch.tensor([0, 5], dtype=torch.int32), []
    for stored in (FULL, cache_format):
        capacity = layout.capacity(stored)
        cache = torch.zeros(1, 20, layout.block_bytes, dtype=torch.uint8)
        ops.commit(cache, layout, k, v, (token // capacity).int(), (token % capacity).int(), stored)
        table, lengths = torch.arange(20, dtype=torch.int32)[None], torch.tensor([300], dtype=torch.int32)
        past = Past(block_table=table, lengths=lengths, format=stored)
        outputs.append(ops.past_attention(q, cu_rows, cache[0], layout, past, 0.125)[0])
    assert float((outputs[1] - outputs[0]).norm() / outputs[0].norm()) < most


def _observe(case: Case, ops: Ops, rows: list[int]) -> tuple[list[Tensor], Tensor]:
    """The mass of every past and of the present."""
    lse = case.attention(ops)[1]
    observed = Observed(rows=torch.tensor(rows, dtype=torch.int32), lse=lse)
    cache = case.cu_rows, case.layer, case.layout
    past = [ops.past_mass(case.q, *cache, p, case.scale, observed) for p in case.pasts]
    return past, ops.present_mass(case.q, case.k, case.cu_rows, case.scale, observed)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mix", MIXES)
def test_mass(cpu: CpuOps, heads: tuple[int, int, int], mix: dict[CacheFormat, int]) -> None:
    """Every token's share equals the reference's in float64."""
    case, rows = _mixed(mix, [1, 40, 2], heads), [0, 17, 40, 42]
    masses, present = _observe(case, cpu, rows)
    observed = Observed(rows=torch.tensor(rows, dtype=torch.int32), lse=case.exact()[1])
    reference, q = ReferenceOps(), case.q.double()
    for past, mass in zip(case.pasts, masses, strict=True):
        exact = reference.past_mass(q, case.cu_rows, case.layer, case.layout, past, case.scale, observed)
        assert_close(f"mass {past.format}", mass, exact)
    exact = reference.present_mass(q, case.k.double(), case.cu_rows, case.scale, observed)
    assert_close("present mass", present, exact)


def test_shares_sum_to_the_number_of_heads(ops: Ops) -> None:
    """A row's mass over all formats and the present is 1 a query head; later rows receive none."""
    case = _mixed(MIXES[-1], [3, 270, 1])
    masses, present = _observe(case, ops, [0, 2, 272, 100])
    total = sum(m.sum(-1) for m in masses) + present.sum(-1)
    assert torch.allclose(total, torch.full((4, 3), 3.0), atol=1e-4)
    assert not present[0, :, 1:].any()
    assert not present[3, :, 98:].any()


def test_mass_bits_do_not_depend_on_the_batch(cpu: CpuOps, cpu_threads: CpuOps) -> None:
    """An observed row gives the same bits alone and among others, on one thread or three."""
    case = _mixed(MIXES[-1], [3, 40, 1])
    together, present = _observe(case, cpu_threads, [0, 1, 2, 42])
    alone, alone_present = _observe(case, cpu, [2])
    assert torch.equal(present[2], alone_present[0])
    for a, b in zip(alone, together, strict=True):
        assert torch.equal(a[0], b[2])
