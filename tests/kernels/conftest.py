"""What kernel tests share: the op sets and memory that is NaN until someone writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from surefoot.kernels.base import Ops
from surefoot.kernels.cpu.launch import Launcher
from surefoot.kernels.cpu.ops import CpuOps
from surefoot.kernels.reference import ReferenceOps


@pytest.fixture(autouse=True)
def nan_filled_memory() -> Iterator[None]:
    """`torch.empty` gives NaN, so that an element nobody wrote fails loudly."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def kernel_cache(cache_dir: Path) -> Path:
    """Where compiled kernels are kept; the folder's name in it holds the sources' hash."""
    return cache_dir


@pytest.fixture(scope="session")
def cpu(kernel_cache: Path) -> CpuOps:
    """The CPU op set on one thread: several workers share the cores."""
    return CpuOps(Launcher(kernel_cache, 1))


@pytest.fixture(scope="session")
def cpu_threads(kernel_cache: Path) -> CpuOps:
    """The CPU op set on three threads, however many cores there are: few numbers of rows part evenly."""
    return CpuOps(Launcher(kernel_cache, 3))


@pytest.fixture(scope="session", params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Ops:
    """Every op set in turn."""
    return ReferenceOps() if request.param == "reference" else request.getfixturevalue("cpu")
