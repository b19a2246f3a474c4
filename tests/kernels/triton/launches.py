"""Triton's own launcher on tensors of the CPU: kernels are neither compiled nor run, only what would be
compiled is noted. The interpreter is more lenient: it drops arguments that a kernel does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


@contextmanager
def noted_compilations() -> Iterator[list[str]]:
    """Launches do nothing. The list gets the name of each kernel that a launch on sm_90 would compile."""
    compiled: list[str] = []
    met: set[JITFunction[Any]] = set()
    compiled_kernel = SimpleNamespace(
        run=lambda *_: None, launch_metadata=lambda *_: None, function=None, packed_metadata=None
    )

    def note(self: JITFunction[Any], key: str, *_: object) -> SimpleNamespace:
        compiled.append(self.fn.__name__)
        met.add(self)
        self.device_caches[0][0][key] = compiled_kernel
        return compiled_kernel

    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.driver, "_active", driver)
        patch.setattr(JITFunction, "_do_compile", note)
        try:
            yield compiled
        finally:
            for kernel in met:
                kernel.device_caches.clear()
