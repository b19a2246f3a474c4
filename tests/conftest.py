"""What all tests share: prepared weights, and a real server over the real model."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import structlog
import torch
from filelock import FileLock

from surefoot.backends.catalog import locate_model
from surefoot.backends.engine.backend import EngineParts
from surefoot.backends.engine.start import EngineOptions, load_parts
from surefoot.kernels.select import select_ops

from .server_process import ServerProcess


def pytest_configure() -> None:
    """How long an example or its making takes is no fact of the product. Nothing else of the profile changes,
    which is another one in CI.
    """
    hypothesis.settings.register_profile(
        "any-speed",
        parent=hypothesis.settings(),
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("any-speed")


@pytest.fixture(scope="session", autouse=True)
def plain_environment() -> Iterator[None]:
    """Everything runs on this machine's CPU and as nobody has set it: without GPUs, proxies and settings of a
    server, on a wide terminal without colours. torch has one thread: several that meet at barriers take many
    times as long where other tests have the cores.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in [*os.environ]:
            if name.startswith("SUREFOOT_") or name.lower().endswith("_proxy") or name == "FORCE_COLOR":
                patch.delenv(name)
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
            patch.setenv(name, "")
        patch.setenv("COLUMNS", "200")
        patch.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        yield


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
