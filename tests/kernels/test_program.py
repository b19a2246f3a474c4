"""Recording what ops launch, and running it again."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from surefoot.kernels.cpu.ops import CpuOps
from surefoot.kernels.cpu.program import Workspace
from surefoot.kernels.reference import ReferenceOps
from surefoot.kernels.weights import quantise_q8_0


class Block:
    """Some ops in a row, over an input that stays where it is."""

    def __init__(self, ops: CpuOps, rows: int) -> None:
        self.ops, self.x, self.residual = ops, torch.randn(rows, 64), torch.randn(rows, 64)
        self.norm = torch.randn(64)
        self.up = ops.prepare_linear(quantise_q8_0(torch.randn(192, 64)))
        self.down = ops.prepare_linear([torch.randn(32, 96), torch.randn(32, 96).bfloat16()])

    def forward(self) -> Tensor:
        """Launches and views alone."""
        x = self.ops.add_rms_norm(self.residual, self.x, self.norm, 1e-5)
        fed = self.ops.silu_mul(self.ops.linear(x, self.up))
        return self.ops.linear(fed, self.down).unflatten(1, (2, 32))


@pytest.mark.parametrize("threads", ["cpu", "cpu_threads"])
@pytest.mark.parametrize("rows", [1, 5, 63])
def test_a_replay_is_the_function(request: pytest.FixtureRequest, threads: str, rows: int) -> None:
    """A replay reads what its input holds then, writes what the function would write, and gives its bits."""
    block = Block(request.getfixturevalue(threads), rows)
    before = block.residual.clone()
    program = block.ops.record(block.forward)
    assert program is not None
    assert torch.equal(block.residual, before), "recording runs nothing"
    for _ in range(3):
        block.x.copy_(torch.randn(rows, 64))
        residual = block.residual.clone()
        got, left = program.replay().clone(), block.residual.clone()
        block.residual.copy_(residual)
        assert torch.equal(got, block.forward())
        assert torch.equal(left, block.residual)


def test_programs_take_turns(cpu: CpuOps) -> None:
    """Programs of several shapes share memory, and none disturbs the next."""
    blocks = [Block(cpu, rows) for rows in (3, 1, 40)]
    programs = [cpu.record(block.forward) for block in blocks]
    for block, program in [*zip(blocks, programs, strict=True)] * 2:
        assert program is not None
        residual = block.residual.clone()
        got = program.replay().clone()
        block.residual.copy_(residual)
        assert torch.equal(got, block.forward())


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x + 1.0,
        lambda x: x.add_(1.0),
        lambda x: x.t().contiguous(),
        lambda x: x[x[:, 0] > 0],
        lambda x: x * float(x.sum()),
        lambda x: torch.cat((x, x)),
    ],
)
def test_what_torch_computes_is_not_recorded(cpu: CpuOps, forward: object) -> None:
    """A function that computes something by other means than ops is refused, and ops run as before."""
    x, weight = torch.randn(3, 64), torch.ones(64)
    assert cpu.record(lambda: cpu.rms_norm(forward(x), weight, 1e-5)) is None  # type: ignore[operator]  # a function
    assert cpu.rms_norm(x, weight, 1e-5).isfinite().all()


def test_recording_does_not_load_a_compiler() -> None:
    """Watching what torch does leaves its compiler, which takes 200 MB and seconds to load, where it is."""
    program = (
        "import sys, torch; from surefoot.kernels.cpu.program import LaunchesOnly\n"
        "x = torch.ones(4)\n"
        "with LaunchesOnly(): x.view(2, 2)\n"
        "print(sorted({'torch._dynamo', 'sympy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_fault_while_recording_leaves_the_ops_as_they_were(cpu: CpuOps) -> None:
    """An error of the function comes out, and ops run as before."""
    with pytest.raises(ZeroDivisionError):
        cpu.record(lambda: torch.empty(1 // 0))
    assert cpu.rms_norm(torch.randn(3, 64), torch.ones(64), 1e-5).isfinite().all()


def test_the_reference_records_nothing() -> None:
    """The plain op set says that it cannot, and runs nothing."""
    assert ReferenceOps().record(lambda: torch.empty(1 // 0)) is None


def test_workspace_memory_is_taken_again_when_nothing_holds_it() -> None:
    """Tensors that live at the same time never share memory; a view keeps its memory taken."""
    workspace = Workspace()
    first, second = workspace.empty(10, 100), workspace.empty(10, 100)
    view, places = first[3:].view(-1), {first.data_ptr(), second.data_ptr()}
    assert len(places) == 2
    del first
    third = workspace.empty(1000)
    assert third.data_ptr() not in places
    del view, second
    assert {workspace.empty(900).data_ptr(), workspace.empty(900).data_ptr()} <= places
    half = workspace.empty(7, dtype=torch.bfloat16)
    assert (half.dtype, half.shape, half.data_ptr() % 64) == (torch.bfloat16, (7,), 0)
    workspace.release()
    assert workspace.empty(1000).data_ptr() in places
