"""The real model, loaded once a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.backends.catalog import locate_model
from surefoot.backends.engine.backend import EngineParts
from surefoot.backends.engine.start import EngineOptions, load_parts


@pytest.fixture(scope="session")
def parts(cache_dir: Path) -> EngineParts:
    """SmolLM2-135M as it is served by default: the file's own groups, a 16-bit cache, the fastest ops."""
    return load_parts(EngineOptions(model=locate_model("smollm2"), model_id="m", cache_dir=cache_dir), print)
