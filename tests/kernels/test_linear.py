"""Linear layers: every weight format against float64, and bits that do not depend on the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.kernels.base import AnyWeight, Ops
from surefoot.kernels.cpu.ops import CpuOps
from surefoot.kernels.weights import GROUP, GroupKind, GroupWeight, dequantise, quantise_q8_0

from .numerics import assert_close
from .weight_samples import KINDS, random_weight

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = (*KINDS, *DTYPES)
SIZES = (1, 63, 111)
"""Rows, and outputs, that fill no tile."""


def _weight(fmt: GroupKind | torch.dtype, num_out: int, num_in: int) -> AnyWeight:
    if isinstance(fmt, torch.dtype):
        return torch.randn(num_out, num_in).to(fmt)
    return random_weight(fmt, num_out, num_in)


def _quantised_rows(x: Tensor) -> Tensor:
    """What group formats make of activations, in float64: int8, but for the largest of each half group."""
    halves = x.unflatten(1, (-1, 2, GROUP // 2))
    top, other = halves.abs().topk(2, dim=-1).values.amax(-2, keepdim=True).split(1, dim=-1)
    scales = torch.maximum(other / 127.0, top / 32767.0)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    return ((halves * (1.0 / scales)).round().double() * scales.double()).flatten(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_out", SIZES)
def test_dense_product(ops: Ops, dtype: torch.dtype, num_out: int) -> None:
    """16- and 32-bit weights multiply like float64 matrices of the same numbers."""
    weight, x = _weight(dtype, num_out, 72), torch.randn(7, 72)
    actual = ops.linear(x, ops.prepare_linear(weight))
    # The reference rounds the activations to the weight's dtype.
    assert_close("linear", actual, x.double() @ weight.double().T, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_out", SIZES)
@pytest.mark.parametrize("rows", SIZES)
def test_group_product_is_exact_on_quantised_activations(
    cpu: CpuOps, kind: GroupKind, num_out: int, rows: int
) -> None:
    """Group formats multiply the codes of activations exactly, but for the rounding of float sums."""
    weight, x = random_weight(kind, num_out, 96), torch.randn(rows, 96)
    actual = cpu.linear(x, cpu.prepare_linear(weight))
    assert_close(f"linear {kind}", actual, _quantised_rows(x) @ dequantise(weight).double().T)


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_codes_do_not_overflow(cpu: CpuOps, kind: GroupKind) -> None:
    """The largest codes against the largest activations give the exact sum: no intermediate saturates."""
    data = random_weight(kind, 16, 64).blocks.clone()
    data[..., -(32 if kind == "q8_0" else 16) :] = 0x80 if kind == "q8_0" else 0xFF
    weight = GroupWeight(kind=kind, data=data.flatten(1))
    x = torch.tensor([[1.0], [-1.0]]).expand(2, 64).contiguous()
    assert_close(
        f"linear {kind}",
        cpu.linear(x, cpu.prepare_linear(weight)),
        x.double() @ dequantise(weight).double().T,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_outliers_leave_the_others_their_bits(cpu: CpuOps, kind: GroupKind) -> None:
    """One number in each half of a group may be hundreds of times larger, wherever it is."""
    weight, x = random_weight(kind, 16, 32), torch.rand(256, 32).add(1.0)
    first, second = torch.arange(256) // 16, 16 + torch.arange(256) % 16
    x[torch.arange(256), first], x[torch.arange(256), second] = -250.0, 400.0
    actual, dense = cpu.linear(x, cpu.prepare_linear(weight)), dequantise(weight).double().T
    # Half a step of what the others need, 2 / 127, for 30 numbers; 400 / 127 would be two hundred times that.
    assert ((actual - x.double() @ dense).abs() <= 30 * (1 / 127) * dense.abs().amax(0) + 1e-3).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_bits_do_not_depend_on_the_batch(cpu: CpuOps, fmt: GroupKind | torch.dtype) -> None:
    """A row alone, among others and in any tile has the same bits."""
    weight = cpu.prepare_linear(_weight(fmt, 111, 96))
    x = torch.randn(300, 96)
    together = cpu.linear(x, weight)
    for rows in (*range(1, 18), 63):
        assert torch.equal(cpu.linear(x[:rows], weight), together[:rows])
    assert torch.equal(cpu.linear(x[257:], weight), together[257:])


@pytest.mark.parametrize("fmt", FORMATS)
def test_bits_do_not_depend_on_threads(
    cpu: CpuOps, cpu_threads: CpuOps, fmt: GroupKind | torch.dtype
) -> None:
    """One thread and three give the same bits."""
    weight, x = _weight(fmt, 111, 96), torch.randn(63, 96)
    alone = cpu.linear(x, cpu.prepare_linear(weight))
    assert torch.equal(cpu_threads.linear(x, cpu_threads.prepare_linear(weight)), alone)


@pytest.mark.parametrize("fmt", FORMATS)
def test_bias_is_added(cpu: CpuOps, fmt: GroupKind | torch.dtype) -> None:
    """A bias is added once to every row."""
    weight, bias, x = _weight(fmt, 33, 64), torch.randn(33), torch.randn(5, 64)
    plain = cpu.linear(x, cpu.prepare_linear(weight))
    assert torch.equal(cpu.linear(x, cpu.prepare_linear(weight, bias)), plain + bias)


def test_fused_weights_equal_separate_ones(cpu: CpuOps) -> None:
    """Several weights as one layer, of one format or of several, give the bits that each gives alone."""
    weights = [
        random_weight("q4_1", 20, 64),
        random_weight("q4_1", 7, 64),
        random_weight("q8_0", 9, 64),
        torch.randn(5, 64),
    ]
    bias, x = torch.randn(41), torch.randn(6, 64)
    fused = cpu.linear(x, cpu.prepare_linear(weights, bias))
    separate = torch.cat([cpu.linear(x, cpu.prepare_linear(w)) for w in weights], dim=1) + bias
    assert torch.equal(fused, separate)


def test_reference_takes_every_format(ops: Ops) -> None:
    """Both op sets accept groups and lists of weights; quantised activations cost under a hundredth."""
    weights = [quantise_q8_0(torch.randn(20, 64)), torch.randn(5, 64)]
    x = torch.randn(6, 64)
    expected = torch.cat(
        [x.double() @ (dequantise(weights[0]).double().T), x.double() @ weights[1].double().T], dim=1
    )
    assert_close("linear", ops.linear(x, ops.prepare_linear(weights)), expected, torch.bfloat16)


def test_unequal_widths_are_refused(cpu: CpuOps) -> None:
    """Weights of one layer share their inputs."""
    with pytest.raises(ValueError, match=r"\[64, 96\]"):
        cpu.prepare_linear([torch.randn(4, 64), random_weight("q8_0", 4, 96)])


def test_rows_may_be_strided(cpu: CpuOps) -> None:
    """A column slice of a wider matrix multiplies as its copy does."""
    weight, wide = cpu.prepare_linear(random_weight("q4_0", 16, 64)), torch.randn(5, 192)
    assert torch.equal(cpu.linear(wide[:, 64:128], weight), cpu.linear(wide[:, 64:128].contiguous(), weight))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("fmt", FORMATS)
def test_faults_are_not_rounded_away(cpu: CpuOps, fmt: GroupKind | torch.dtype, bad: float) -> None:
    """An activation that is not finite makes its row not finite, and no other."""
    x = torch.randn(3, 64)
    x[1, 40] = bad
    finite = cpu.linear(x, cpu.prepare_linear(_weight(fmt, 16, 64))).isfinite()
    assert finite[[0, 2]].all()
    assert not finite[1].any()


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_zeros_and_of_tiny_numbers(cpu: CpuOps, kind: GroupKind) -> None:
    """Activations whose group has no scale, or hardly one, are as good as 0, and their row stays finite."""
    weight, x = random_weight(kind, 33, 96), torch.randn(4, 96)
    x[0], x[1, 32:64], x[2, :32], x[3] = 0.0, 0.0, 1e-44, -1e-41
    actual = cpu.linear(x, cpu.prepare_linear(weight))
    assert not actual[0].any()
    assert_close(f"linear {kind}", actual, x.double() @ dequantise(weight).double().T, torch.bfloat16)
    assert actual[3].abs().max() < 1e-38


def test_no_rows_give_no_rows(cpu: CpuOps) -> None:
    """An empty batch is answered with an empty result."""
    assert cpu.linear(torch.empty(0, 64), cpu.prepare_linear(random_weight("q4_1", 16, 64))).shape == (0, 16)
