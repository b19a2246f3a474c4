"""Attention of prompts' chunks, windows, and what may not change a bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.kernels.base import Past
from surefoot.kernels.layout import FULL, INT4, INT8, K8V4, CacheFormat
from surefoot.kernels.triton import attention as attention_module
from surefoot.kernels.triton.splits import FEW_ROWS, SPLIT_BLOCKS
from surefoot.kernels.triton.tiles import Window

from ...numerics import assert_close
from .facts_attention import BF16, F16, F32, Case, Heads


@pytest.mark.parametrize(
    ("cache_format", "heads", "dtype"),
    [
        (FULL, (4, 1, 64), BF16),
        (FULL, (3, 1, 96), F32),
        (INT8, (2, 2, 64), F16),
        (K8V4, (1, 1, 128), BF16),
        (INT4, (4, 1, 64), F32),
        (INT4, (2, 1, 96), BF16),
    ],
)
def test_many_rows(cache_format: CacheFormat, heads: Heads, dtype: torch.dtype) -> None:
    """A chunk of a prompt beside a sequence of few rows: each goes its own way, in one call."""
    Case([63, 2, FEW_ROWS + 1], {cache_format: [63, 40, 0], FULL: [1, 0, 0]}, heads, dtype).check()


def test_bits_do_not_depend_on_the_batch() -> None:
    """A sequence of few rows has the same bits again, alone, without later rows, and beside a long one."""
    lengths = {INT4: [111, 5, 0], FULL: [17, 0, 300]}
    case = Case([3, 1, FEW_ROWS + 1], lengths, (4, 2, 64), BF16)
    out, lse = case.both()
    again, again_lse = case.both(max_rows=FEW_ROWS + 1)
    assert torch.equal(again, out)
    assert torch.equal(again_lse, lse)
    for rows in (1, 3):
        assert torch.equal(case.alone(0, rows).both()[0], out[:rows])


@pytest.mark.parametrize("cache_format", [FULL, INT4])
def test_long_contexts_have_larger_splits(cache_format: CacheFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that would have more splits than there may be has larger ones, and another none of that."""
    lengths = [3 * SPLIT_BLOCKS * 16 + 5, SPLIT_BLOCKS * 16 + 1]
    case = Case([2, 1], {cache_format: lengths}, (1, 1, 64), BF16)
    expected = case.both()[0]
    monkeypatch.setattr(attention_module, "MAX_SPLITS", 2)
    out = case.both()[0]
    assert_close("both", out, case.exact_both()[0], BF16)
    assert torch.equal(out[2:], expected[2:])


def test_rows_of_long_sequences_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of splits have places for as many rows as short sequences can have, not for a prompt's; where
    they lie changes no bit.
    """
    rows = [2, 3 * FEW_ROWS, 1]
    case = Case(rows, {FULL: [40, 17, 5]}, (2, 1, 64), BF16)
    sizes = []
    launch = attention_module.fold_splits

    class Noting:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
            def run(**args: Any) -> object:
                sizes.append((len(args["parts_out"]), args["part_stride"]))
                return launch[grid](**args)

            return run

    monkeypatch.setattr(attention_module, "fold_splits", Noting())
    apart = case.both()[0]
    assert sizes == [(3 * FEW_ROWS, FEW_ROWS)]
    assert torch.equal(apart[:2], case.alone(0).both()[0])
    assert torch.equal(apart[-1:], case.alone(2).both()[0])
    assert sizes[1:] == [(2, 0), (1, 0)]


@pytest.mark.parametrize("first_rows", [2, FEW_ROWS + 4])
def test_window(first_rows: int) -> None:
    """With a window a row sees what lies fewer than `size` positions back, wherever blocks hold it."""
    size, length, rows = 20, 40, [first_rows, 1]
    case = Case(rows, {FULL: [length, 0], INT4: [0, length]}, (2, 1, 64), F32)
    positions = torch.cat([length + torch.arange(n) for n in rows]).int()
    slots = torch.full((len(case.layer), 128), -1, dtype=torch.int32)
    where = torch.randperm(length).int()
    for b, past in enumerate(case.pasts):
        token, capacity = torch.arange(length), case.layout.capacity(past.format)
        slots[past.block_table[b][token // capacity], token % capacity] = where
    out, lse = case.both(window=Window(size=size, rows=positions, slots=slots))
    for b, past in enumerate(case.pasts):
        k, v = _read(case, past, b, length)
        for r in range(int(case.cu_rows[b]), int(case.cu_rows[b + 1])):
            near = where > positions[r] - size
            own = slice(max(int(case.cu_rows[b]), r - size + 1), r + 1)
            seen_k = torch.cat((k[near], case.k[own, 0].double()))
            seen_v = torch.cat((v[near], case.v[own, 0].double()))
            scores = case.q[r].double() @ seen_k.T * case.scale
            assert_close(f"row {r}", out[r], scores.softmax(-1) @ seen_v)
            assert_close(f"lse {r}", lse[r], scores.logsumexp(-1))


def _read(case: Case, past: Past, b: int, length: int) -> tuple[Tensor, Tensor]:
    """K and V `[length, head_dim]` of the one KV head."""
    capacity, token = case.layout.capacity(past.format), torch.arange(length)
    planes = [
        p[past.block_table[b][token // capacity], 0, :, token % capacity]
        for p in case.layout.planes(case.layer, past.format)
    ]
    if past.format.is_full:
        return planes[0].double(), planes[1].double()
    k, v, pairs = planes
    unpacked = (torch.cat((codes & 15, codes >> 4), dim=-1).double() for codes in (k, v))
    pairs = pairs.double()
    scales = ((pairs[:, :1], pairs[:, 1:2]), (pairs[:, 2:3], pairs[:, 3:]))
    first, second = (codes * s + z for codes, (s, z) in zip(unpacked, scales, strict=True))
    return first, second
