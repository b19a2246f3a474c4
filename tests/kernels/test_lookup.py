"""Rows by number: bits are those of the numbers that are stored."""

from __future__ import annotations

import pytest
import torch

from surefoot.kernels.base import Ops
from surefoot.kernels.cpu.ops import CpuOps
from surefoot.kernels.weights import GroupWeight, dequantise

from .weight_samples import KINDS, random_weight

NUMBERS = torch.tensor([62, 0, 17, 16, 15, 17, 31])


@pytest.mark.parametrize("weight", [*KINDS, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_embed(ops: Ops, weight: object) -> None:
    """Rows of a prepared weight are the numbers that the weight stands for, in every format."""
    matrix = (
        torch.randn(63, 72).to(weight) if isinstance(weight, torch.dtype) else random_weight(weight, 63, 96)  # type: ignore[arg-type]  # a kind
    )
    expected = dequantise(matrix) if isinstance(matrix, GroupWeight) else matrix.float()
    packed = ops.prepare_linear(matrix)
    for count in (1, 7):
        assert torch.equal(ops.embed(NUMBERS[:count], packed), expected[NUMBERS[:count]])


def test_take(ops: Ops) -> None:
    """Rows of a table come in the order asked for, and more than once."""
    table = torch.randn(63, 5)
    assert torch.equal(ops.take(table, NUMBERS), table[NUMBERS])


def test_embed_on_threads(cpu: CpuOps, cpu_threads: CpuOps) -> None:
    """Three threads read the same rows as one."""
    matrix, numbers = random_weight("q4_1", 63, 96), torch.randint(0, 63, (200,))
    one, three = (o.embed(numbers, o.prepare_linear(matrix)) for o in (cpu, cpu_threads))
    assert torch.equal(one, three)
