"""What all tests share: prepared weights, and a real server over the real model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from filelock import FileLock

from surefoot.backends.catalog import locate_model
from surefoot.backends.engine.backend import EngineParts
from surefoot.backends.engine.start import EngineOptions, load_parts
from surefoot.kernels.select import select_ops

from .server_process import ServerProcess


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    """A command that a test runs in this process sets logging up for a stream that closes with the test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def cache_dir(pytestconfig: pytest.Config) -> Path:
    """Prepared weights and compiled kernels, kept between runs under names that tell what they were made of.

    One process makes them while the others wait.
    """
    folder = pytestconfig.rootpath / ".cache"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "compiling.lock"):
        select_ops("cpu", cache_dir=folder, num_threads=1)
    return folder


def engine_options(cache_dir: Path) -> EngineOptions:
    """SmolLM2-135M as it is served by default; one thread, since test processes share the cores."""
    return EngineOptions(model=locate_model("smollm2"), model_id="smollm2", cache_dir=cache_dir, threads=1)


@pytest.fixture(scope="session")
def parts(cache_dir: Path) -> EngineParts:
    """The default model, loaded once a process."""
    return load_parts(engine_options(cache_dir), print)


@pytest.fixture(scope="session")
def server(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """`surefoot serve` with the real model, for all tests of one process that change nothing in it."""
    with ServerProcess(cache_dir, log=tmp_path_factory.mktemp("server") / "log") as process:
        yield process
