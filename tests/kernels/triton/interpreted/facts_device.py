"""The device benchmark's checks, on the kernels that it is for."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from surefoot.bench.device_checks import CHECKS
from surefoot.bench.device_rows import Check
from surefoot.bench.device_sections import Section, rows_of
from surefoot.bench.device_setup import REFERENCE, Setup
from surefoot.kernels.base import Ops
from surefoot.kernels.triton.ops import TritonOps


class Interpreted(Setup):
    """Triton's kernels in place of the plain ops."""

    def ops(self) -> Ops:
        return TritonOps(self.shape.dtype)

    def invariant_ops(self) -> Ops:
        return TritonOps(self.shape.dtype, batch_invariant=True)


SETUP = Interpreted(
    device_name="cpu",
    shape=replace(REFERENCE.shape, dtype=torch.bfloat16),
    load=REFERENCE.load,
    checked=REFERENCE.checked,
)


# Steps of a model and an engine's answers take the interpreter minutes; `facts_engine.py` has a smaller one.
@pytest.mark.parametrize("section", CHECKS[:-2], ids=lambda section: section.name)
def test_kernels_pass_the_checks_of_a_device(section: Section) -> None:
    """Each section finds the kernels right, in the dtype in which they serve."""
    rows = list(rows_of(section, SETUP))
    assert rows
    assert all(isinstance(row, Check) for row in rows)
    assert [row.line for row in rows if not row.is_good] == []
