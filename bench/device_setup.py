"""What a process needs to know to check or to time something on a device: plain values, for another one."""

from __future__ import annotations

import torch
from msgspec import Struct

from surefoot.backends.engine.model_config import ModelConfig
from surefoot.kernels.base import Ops
from surefoot.kernels.reference import ReferenceOps
from surefoot.kernels.select import select_ops

from .device_loads import SMALL, SMALL_LOAD, EngineLoad, Shape
from .device_model import SLIM, TINY


class Setup(Struct, frozen=True, kw_only=True):
    """A device, and what is tried on it."""

    device_name: str
    shape: Shape
    load: EngineLoad
    checked: ModelConfig
    """The model whose steps are checked: with heads like `shape`'s, its kernels are those that are timed."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return torch.device(self.device_name)

    @property
    def is_reference(self) -> bool:
        """Whether the plain ops run on a CPU, to try the benchmark itself."""
        return self.device.type == "cpu"

    def ops(self) -> Ops:
        """The op set that is looked at."""
        return ReferenceOps() if self.is_reference else select_ops(self.device)

    def invariant_ops(self) -> Ops | None:
        """The same with batch-invariant products, where there is a choice."""
        return None if self.is_reference else select_ops(self.device, batch_invariant=True)


ON_A_GPU = Setup(device_name="cuda:0", shape=Shape(), load=EngineLoad(), checked=SLIM)
REFERENCE = Setup(device_name="cpu", shape=SMALL, load=SMALL_LOAD, checked=TINY)
