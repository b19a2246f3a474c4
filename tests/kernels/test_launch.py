"""Compiling, keeping and running kernels; picking the op set."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from surefoot.kernels.cpu import launch, rowwise
from surefoot.kernels.cpu.launch import Launcher, Stage, cache_key
from surefoot.kernels.cpu.ops import CpuOps
from surefoot.kernels.reference import ReferenceOps
from surefoot.kernels.select import select_ops


def _rms_norm(launcher: Launcher, x: torch.Tensor) -> torch.Tensor:
    tape = launcher.tape([Stage(rowwise.rms_norm)])
    weight, out = torch.ones(x.shape[1]), torch.empty(x.shape)
    launcher.run(
        tape.ctypes.data,
        x.data_ptr(),
        4 * x.stride(0),
        weight.data_ptr(),
        out.data_ptr(),
        *x.shape,
        value=1e-5,
    )
    return out


def test_progress_names_every_kernel(tmp_path: Path) -> None:
    """A first compile reports what it is at, counted up to the total."""
    seen: list[tuple[str, int, int]] = []
    Launcher(tmp_path, 1).compile([rowwise.rms_norm], lambda *step: seen.append(step))
    assert seen == [("run", 0, 2), ("rms_norm", 1, 2), ("", 2, 2)]


def test_machine_code_is_kept_and_found_again(tmp_path: Path) -> None:
    """A second start loads what the first compiled, from one folder named after its inputs, and computes the
    same.
    """
    x = torch.randn(3, 64)
    first = Launcher(tmp_path, 1)
    first.compile([rowwise.rms_norm])
    kept = {p: p.stat().st_mtime_ns for p in (tmp_path / cache_key()).rglob("*.nbc")}
    assert kept
    second = Launcher(tmp_path, 1)
    second.compile([rowwise.rms_norm])
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / cache_key()).rglob("*.nbc")} == kept
    assert torch.equal(_rms_norm(first, x), _rms_norm(second, x))


def test_nothing_is_kept_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cache folder kernels are compiled in memory."""
    monkeypatch.chdir(tmp_path)
    launcher = Launcher(None, 1)
    launcher.compile([rowwise.rms_norm])
    assert _rms_norm(launcher, torch.randn(2, 32)).isfinite().all()
    assert not list(tmp_path.iterdir())


def test_cache_key_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any edit of a kernel source gives another folder: numba does not notice edits of imported files."""
    before = cache_key()
    copy = tmp_path / "launch.py"
    copy.write_text(Path(launch.__file__).read_text() + "\n")
    monkeypatch.setattr(launch, "__file__", str(copy))
    assert cache_key() != before


def test_kernels_run_from_any_thread_beside_torch(cpu_threads: CpuOps) -> None:
    """Calls from another thread, between torch's own parallel ops, give the same bits."""
    x, weight = torch.randn(200, 576), torch.ones(576)
    expected = cpu_threads.rms_norm(x, weight, 1e-5)
    results: list[bool] = []

    def work() -> None:
        for _ in range(5):
            torch.randn(300, 300) @ torch.randn(300, 300)
            results.append(torch.equal(cpu_threads.rms_norm(x, weight, 1e-5), expected))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [True] * 5


def test_every_part_runs_once(kernel_cache: Path) -> None:
    """Each row of a shared stage is written, whatever the number of rows."""
    launcher = Launcher(kernel_cache, 2)
    launcher.compile([rowwise.rms_norm])
    for rows in (1, 2, 3, 63):
        assert _rms_norm(launcher, torch.randn(rows, 33)).isfinite().all()


def test_the_device_picks_the_op_set(kernel_cache: Path) -> None:
    """A CPU gets its kernels, under a name that says for which processor; other devices get the reference."""
    assert select_ops("cpu", cache_dir=kernel_cache, num_threads=1).name.startswith("cpu-")
    assert isinstance(select_ops("meta"), ReferenceOps)
