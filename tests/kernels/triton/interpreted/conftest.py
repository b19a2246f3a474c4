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
def bfloat16_is_rounded() -> Iterator[None]:
    """Conversion to bfloat16 rounds to nearest even as GPUs do; the interpreter cuts off."""
    convert = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        numbers = torch.from_numpy(np.array(data, dtype=np.float32))
        return numbers.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", rounded)
        yield
