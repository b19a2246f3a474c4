"""Kernels that are not there yet are compiled by a process of its own, which keeps the memory it took."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from surefoot.kernels.compile import compile_apart, main
from surefoot.kernels.cpu.launch import cache_key

Steps = list[tuple[str, int, int]]


def _python_is(path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a shell script run in place of Python."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_another_process_fills_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told which folder, its progress is passed on, and it has ended when `compile_apart` returns."""
    script = f'echo run 0 2; echo linear 1 2; echo "$@" > {tmp_path}/told'
    _python_is(tmp_path / "python", script, monkeypatch)
    seen: Steps = []
    compile_apart(tmp_path / "cache", lambda *step: seen.append(step))
    assert seen == [("run", 0, 2), ("linear", 1, 2)]
    assert (tmp_path / "told").read_text() == f"-P -m surefoot.kernels.compile {tmp_path}/cache\n"


def test_a_folder_with_kernels_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later start needs no other process, nor does one that cannot keep anything."""
    _python_is(tmp_path / "python", "echo run 0 1", monkeypatch)
    (tmp_path / cache_key()).mkdir()
    (tmp_path / "file").touch()
    seen: Steps = []
    for folder in (tmp_path, tmp_path / "file" / "folder"):
        compile_apart(folder, lambda *step: seen.append(step))
    assert seen == []


def test_a_process_that_fails_leaves_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is said or raised: who needs kernels meets the same error."""
    _python_is(tmp_path / "python", "echo run 0 2; echo trouble >&2; exit 1", monkeypatch)
    seen: Steps = []
    compile_apart(tmp_path / "cache", lambda *step: seen.append(step))
    assert seen == [("run", 0, 2)]
    assert capfd.readouterr().err == ""


def test_every_kernel_is_reported_once(kernel_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The process says what it is at, a line a kernel, counted up."""
    main(kernel_cache)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][0] == "run"
    assert "linear" in [name for name, _, _ in lines]
    assert [int(done) for _, done, _ in lines] == list(range(len(lines)))
    assert {int(total) for _, _, total in lines} == {len(lines)}
