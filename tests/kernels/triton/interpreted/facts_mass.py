"""The share of attention that tokens received, against float64."""

from __future__ import annotations

import pytest
import torch

from surefoot.kernels.base import Observed
from surefoot.kernels.layout import FULL, INT4, INT8, K8V4, CacheFormat
from surefoot.kernels.reference import ReferenceOps
from surefoot.kernels.triton.mass import past_mass, present_mass

from ...numerics import assert_close
from .facts_attention import BF16, F16, F32, Case, Heads

reference = ReferenceOps()


@pytest.mark.parametrize(
    ("cache_format", "heads", "dtype"),
    [
        (FULL, (4, 1, 64), BF16),
        (FULL, (3, 3, 96), F32),
        (INT8, (3, 1, 64), F16),
        (INT8, (1, 1, 128), BF16),
        (K8V4, (8, 1, 96), F32),
        (INT4, (4, 2, 128), BF16),
        (INT4, (6, 2, 64), F16),
    ],
)
def test_mass(cache_format: CacheFormat, heads: Heads, dtype: torch.dtype) -> None:
    """Mass of past and present tokens per observed row and KV head; 0 outside the row's sequence."""
    case = Case([3, 1, 40], {cache_format: [63, 0, 111]}, heads, dtype)
    rows = torch.tensor([0, 2, 3, 4, 43], dtype=torch.int32)
    lse, exact_lse = case.both()[1], case.exact_both()[1]
    observed, exact = Observed(rows=rows, lse=lse), Observed(rows=rows, lse=exact_lse)
    where = case.cu_rows, case.layer, case.layout, case.pasts[0], case.scale
    actual = past_mass(case.q, *where, observed)
    expected = reference.past_mass(case.q.double(), *where, exact)
    assert_close("past mass", actual, expected, dtype)
    assert torch.equal(actual == 0, expected == 0)
    actual = present_mass(case.q, case.k, case.cu_rows, case.scale, observed)
    expected = reference.present_mass(case.q.double(), case.k.double(), case.cu_rows, case.scale, exact)
    assert_close("present mass", actual, expected, dtype)
    assert torch.equal(actual == 0, expected == 0)


def test_all_mass_is_one() -> None:
    """A row's mass over its past and present is 1 per query head, and has the same bits again."""
    case = Case([2, 20], {INT4: [63, 5], FULL: [17, 1]}, (4, 2, 64), BF16)
    observed = Observed(rows=torch.arange(22, dtype=torch.int32), lse=case.both()[1])
    where = case.cu_rows, case.layer, case.layout
    total = present_mass(case.q, case.k, case.cu_rows, case.scale, observed, max_rows=20).sum(-1)
    for past in case.pasts:
        mass, again = (past_mass(case.q, *where, past, case.scale, observed) for _ in range(2))
        assert torch.equal(mass, again)
        total += mass.sum(-1)
    assert torch.allclose(total, torch.full_like(total, 2.0), rtol=1e-3)
