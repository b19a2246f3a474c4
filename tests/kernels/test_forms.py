"""The forms for other processors, in processes that compile for less than this one has."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from surefoot.kernels.cpu.forms import form_of, host_form
from surefoot.kernels.cpu.ops import CpuOps

from .form_outputs import form_outputs

_FEATURES = {
    "portable": "+sse2",
    "avx2": "+sse2,+sse4.2,+ssse3,+avx,+avx2,+fma,+f16c,+bmi,+bmi2",
}
_AVX512 = frozenset(["avx512f", "avx512bw", "avx512vl", "avx512vnni", "fma", "f16c", "avx2"])

on_x86_with_fma = pytest.mark.skipif(
    platform.machine() != "x86_64" or not host_form().has_fma, reason="compiles for x86-64 with AVX2 and FMA"
)


def _outputs_of(form: str, cache: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    """Run the ops in a process that sees a lesser processor."""
    environment = {**os.environ, "NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": _FEATURES[form]}
    target = tmp_path / "outputs.pt"
    command = [sys.executable, str(Path(__file__).with_name("form_outputs.py")), str(cache), str(target)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"cpu-{form}"
    return torch.load(target)


@on_x86_with_fma
def test_the_avx2_form_gives_the_same_bits(cpu: CpuOps, kernel_cache: Path, tmp_path: Path) -> None:
    """Where the processor fuses multiply and add, every form computes the same bits in every op."""
    expected = form_outputs(cpu)
    for name, actual in _outputs_of("avx2", kernel_cache, tmp_path).items():
        assert torch.equal(actual, expected[name]), name


@on_x86_with_fma
def test_the_portable_form_agrees(cpu: CpuOps, kernel_cache: Path, tmp_path: Path) -> None:
    """Without a fused multiply-add only the last bits differ."""
    expected = form_outputs(cpu)
    for name, actual in _outputs_of("portable", kernel_cache, tmp_path).items():
        difference = (actual.double() - expected[name].double()).norm() / expected[name].double().norm()
        assert difference < 1e-5, name


@pytest.mark.parametrize(
    ("triple", "features", "name"),
    [
        ("x86_64-unknown-linux-gnu", _AVX512, "avx512-vnni"),
        ("x86_64-unknown-linux-gnu", _AVX512 - {"avx512vnni"}, "avx2"),
        ("x86_64-unknown-linux-gnu", frozenset({"avx2"}), "portable"),
        ("aarch64-unknown-linux-gnu", frozenset(), "portable"),
    ],
)
def test_the_form_follows_from_the_features(triple: str, features: frozenset[str], name: str) -> None:
    """The widest form is taken whose every instruction the processor has."""
    assert form_of(triple, features).name == name


def test_arm_always_fuses() -> None:
    """On AArch64 the portable form uses the fused multiply-add."""
    assert form_of("aarch64-unknown-linux-gnu", frozenset()).has_fma
    assert not form_of("x86_64-unknown-linux-gnu", frozenset()).has_fma
