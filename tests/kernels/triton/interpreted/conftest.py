"""What the interpreted facts share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


@pytest.fixture(autouse=True)
def nan_filled_memory() -> Iterator[None]:
    """`torch.empty` gives NaN, so that an element nobody wrote fails loudly."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True, scope="session")
def bfloat16_arithmetic() -> Iterator[None]:
    """bfloat16 as GPUs have it: the interpreter cuts it off where they round to nearest even, and multiplies
    matrices of its bits.
    """
    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        numbers = torch.from_numpy(np.array(data, dtype=np.float32))
        return numbers.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        numbers = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(numbers, tl.float32)

    def dot_of_numbers(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", rounded)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_of_numbers)
        yield
