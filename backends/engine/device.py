"""What is said to CUDA directly (torch calls ROCm's so too): which device, memory, copies and graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from msgspec import Struct
from torch import Tensor

from surefoot.kernels.base import Program

from .model_errors import DeviceNotFound

DeviceName = Literal["auto", "cpu", "cuda"]

CPU = torch.device("cpu")

SPARE_SHARE = 0.05
"""Of a GPU's memory, left for what a profiling pass does not see: sampling, graphs, fragments."""


class Memory(Struct, frozen=True):
    """Bytes of a device: in all, still free, and the most that a pass took for as long as it ran."""

    total: int
    free: int
    peak: int

    @property
    def for_cache(self) -> int:
        """What the cache can have. The pass counts twice: graphs keep memory of their own."""
        return max(int(self.free - 2 * self.peak - SPARE_SHARE * self.total), 0)


def find_device(name: DeviceName) -> torch.device:
    """`auto` is the first GPU that torch sees and that knows bfloat16, or else the CPU. Raises
    `DeviceNotFound`.
    """
    if name == "cpu":
        return CPU
    if torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.device("cuda", 0)
    if name == "auto":
        return CPU
    built_for = f"for ROCm {torch.version.hip}" if torch.version.hip else f"for CUDA {torch.version.cuda}"
    raise DeviceNotFound(
        f"device = cuda, but torch {torch.__version__} (built"
        f" {built_for if torch.version.hip or torch.version.cuda else 'for the CPU alone'}) sees no GPU that"
        " computes in bfloat16. Install its driver and a torch built for it, see that CUDA_VISIBLE_DEVICES"
        " does not hide it, or set device = cpu"
    )


def device_name(device: torch.device) -> str:
    """For the log."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def place(tensor: Tensor, device: torch.device) -> Tensor:
    """A host's tensor on `device`. The copy to a GPU is queued, from pinned memory that torch does not give
    out again before it is done: nobody waits.
    """
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def wait(device: torch.device) -> None:
    """Until all that was queued is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_memory(run: Callable[[], object], device: torch.device) -> Memory:
    """Run a pass, and see what it takes and what it leaves."""
    run()  # the first pass compiles, and libraries take what they keep
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    wait(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return Memory(total=total, free=free, peak=peak)


class Called(Struct, frozen=True):
    """The function itself, where there are no graphs."""

    run: Callable[[], Tensor]

    def replay(self) -> Tensor:
        """Call it."""
        return self.run()


class Graph(Struct, frozen=True):
    """A function's launches, and where they leave their result."""

    graph: torch.cuda.CUDAGraph
    result: Tensor

    def replay(self) -> Tensor:
        """One call for all of them."""
        self.graph.replay()
        return self.result


class GraphPool:
    """Captures graphs that share memory: one runs at a time, and none reads what another left."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream()

    def capture(self, run: Callable[[], Tensor]) -> Program:
        """The function is run once before it is captured, as kernels cannot be loaded during a capture. Both
        times on one side stream, as torch's notes on CUDA graphs ask for: libraries keep workspaces by
        stream, and one that is first wanted during a capture would lie in the graphs' memory.
        """
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            run()
        current.wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side):
            result = run()
        return Graph(graph, result)


Capture = Callable[[Callable[[], Tensor]], Program]


def capture_on(device: torch.device) -> Capture:
    """How functions are captured on a device."""
    return GraphPool().capture if device.type == "cuda" else Called
