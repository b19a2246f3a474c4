"""The one place that picks an op set: by device, once, at start."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from .base import Ops
from .reference import ReferenceOps

Progress = Callable[[str, int, int], None]
"""Called with (kernel, done, total) while kernels are compiled or loaded."""


def select_ops(
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
    cache_dir: Path | None = None,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> Ops:
    """The fastest op set for a device; its `name` is worth a line in the log.

    On a CPU kernels are compiled into `cache_dir`, by a process of its own (None: here, and nothing is
    kept), and run on `num_threads` threads (None: one per core that this process may use). On a GPU (torch
    calls ROCm's `cuda` too) activations are in `dtype`, and Triton compiles when a kernel is first launched,
    into a cache of its own; there `batch_invariant` makes linear layers' bits independent of the batch, at a
    cost (`triton/linear.py`); on a CPU they always are. Elsewhere it is the reference.
    """
    # Imports stand here and not above: numba and triton take a while, and each serves one path.
    kind = torch.device(device).type
    if kind == "cuda":
        from .triton.ops import TritonOps

        return TritonOps(dtype, batch_invariant=batch_invariant)
    if kind != "cpu":
        return ReferenceOps()
    from .compile import compile_apart
    from .cpu.launch import Launcher
    from .cpu.ops import CpuOps

    if cache_dir is not None:
        compile_apart(cache_dir, progress or (lambda name, done, total: None))
    return CpuOps(Launcher(cache_dir, num_threads or len(os.sched_getaffinity(0))), progress)
