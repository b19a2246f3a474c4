"""docs/cpu-kernels.md: its example of an op works as it stands, and its list of files is complete."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.kernels.cpu import rowwise
from surefoot.kernels.cpu.launch import Launcher, Stage

from .numerics import assert_close

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cpu-kernels.md").read_text(encoding="utf-8")
EXAMPLE = PAGE.partition("## Adding an op")[2].partition("\n## ")[0]
SoftCap = Callable[[Tensor, float], Tensor]


def test_every_file_is_listed() -> None:
    """The table has each file of kernels."""
    table = PAGE.partition("## Files")[2].partition("\n## ")[0]
    files = {path.name for path in (ROOT / "kernels" / "cpu").glob("*.py")} - {"__init__.py"}
    assert set(re.findall(r"`(\w+\.py)`", table)) == files


def defined(block: str, **names: Any) -> Any:
    """The function of a block, where `rowwise.py` has its names."""
    place = {**vars(rowwise), "Tensor": Tensor, **names}
    exec(block, place)
    return place["soft_cap"]


@pytest.fixture(scope="module")
def steps() -> list[str]:
    """Its blocks: meaning, kernel, tape, method."""
    blocks = re.findall(r"^   ```python\n(.*?)^   ```", EXAMPLE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    return [textwrap.dedent(block) for block in blocks]


@pytest.fixture(scope="module")
def made(steps: list[str]) -> Callable[[int], SoftCap]:
    """Makes the op for so many threads, as `CpuOps` would have it. Nothing is kept on disk."""
    kernel = defined(steps[1])
    tapes = eval("{" + steps[2] + "}", {"Stage": Stage, "rowwise": SimpleNamespace(soft_cap=kernel)})

    def make(num_threads: int) -> SoftCap:
        launcher = Launcher(None, num_threads)
        launcher.compile([kernel])
        held = {name: launcher.tape(stages) for name, stages in tapes.items()}
        at = {name: int(tape.ctypes.data) for name, tape in held.items()}
        ops = SimpleNamespace(_empty=torch.empty, _at=at, _run=launcher.run, held=held)
        method = defined(steps[3])
        return lambda x, cap: method(ops, x, cap)

    return make


def test_the_example_is_an_op(steps: list[str], made: Callable[[int], SoftCap]) -> None:
    """It agrees with its meaning in float64 at odd sizes, keeps what is no number, and a row's bits are its
    own: alone, strided, in a batch, on one thread or three.
    """
    reference = defined(steps[0])
    one, three = made(1), made(3)
    for rows in (1, 63):
        for width in (1, 63, 111):
            x = 60.0 * torch.randn(rows, width)
            capped = one(x, 30.0)
            assert_close("soft_cap", capped, reference(None, x.double(), 30.0))
            assert torch.equal(three(x, 30.0), capped)
            assert torch.equal(one(x[rows - 1 :], 30.0)[0], capped[rows - 1])
            assert torch.equal(one(torch.cat((x, x), dim=1)[:, :width], 30.0), capped)
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1e30]])
    assert one(x, 30.0).nan_to_num(0.5).tolist() == [[0.5, 30.0, -30.0, 30.0]]
