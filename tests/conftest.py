"""What all tests share: prepared weights, and a real server over the real model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .server_process import ServerProcess


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared weights and compiled kernels, made once for all test processes of a run."""
    base = tmp_path_factory.getbasetemp()
    # Under xdist each process has a folder of its own; what they share lies beside those.
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "surefoot-cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def server(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """`surefoot serve` with the real model, for all tests of one process that change nothing in it."""
    with ServerProcess(cache_dir, log=tmp_path_factory.mktemp("server") / "log") as process:
        yield process
