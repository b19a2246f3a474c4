"""The device benchmark, as far as a CPU can tell: its checks, its report and its arguments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from surefoot.bench.device import Report, Timing, main, run
from surefoot.bench.device_checks import Check
from surefoot.bench.device_engine import SMALL_LOAD
from surefoot.bench.device_loads import SMALL, Shape, decode_load
from surefoot.bench.device_model import LLAMA_8B, step_bytes
from surefoot.kernels.layout import FORMATS, FULL
from surefoot.kernels.reference import ReferenceOps

CPU = torch.device("cpu")


def test_reference_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--reference` checks first, then times every shape and format, and stores what it printed."""
    assert main(["--reference", "--output", str(tmp_path / "report.json")]) == 0
    report = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Report)
    lines = capsys.readouterr().out.splitlines()
    verdict = lines.index(f"VERDICT: {len(report.checks)} checks passed")
    assert verdict == len(report.checks) + 1
    assert lines[verdict + 2 :] == [timing.line for timing in report.timings]
    decodes = len(SMALL.contexts) * len(SMALL.batches) * len(FORMATS)
    served = 3 * len(SMALL_LOAD.batches)
    assert len(report.timings) == served + decodes + 2 * len(SMALL.prompts)
    assert report.is_whole
    assert {timing.name for timing in report.timings[:served]} >= {
        "engine x 1, token to token",
        "engine with drafts x 2, token to token",
        "transformers x 2, token to token",
    }
    assert {check.name for check in report.checks} >= {
        "rotate",
        "bytes of (4, 4)",
        "attention over (8, 4)",
        "graphs of steps",
        "waits in steps",
    }


class _Faulty(ReferenceOps):
    """Norms that are off by 3 %."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return super().rms_norm(x, weight, eps) * 1.03


def test_nothing_is_timed_after_a_failed_check(capsys: pytest.CaptureFixture[str]) -> None:
    """A faulty op is named, and no number is printed that somebody might believe."""
    report = run(_Faulty(), CPU, SMALL, SMALL_LOAD)
    assert [check.name for check in report.checks if not check.is_good] == ["rms_norm"]
    assert report.timings == []
    assert capsys.readouterr().out.endswith(f"VERDICT: 1 of {len(report.checks)} checks failed\n")


def test_it_stops_in_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """When the time is up nothing further is timed, and the report says that it is not whole."""
    monkeypatch.setattr("surefoot.bench.device.MAX_SECONDS", 0.0)
    report = run(ReferenceOps(), CPU, SMALL, SMALL_LOAD)
    assert len(report.timings) == 1
    assert not report.is_whole
    assert "stopped after" in capsys.readouterr().out


def test_a_step_reads_the_weights_and_the_cache() -> None:
    """The floor is every matrix but the embedding, a row of that a token, and the tokens of the cache."""
    alone, two = (step_bytes(LLAMA_8B, batch, 1000, torch.bfloat16) for batch in (1, 2))
    assert two - alone == 2 * 4096 + 1000 * 32 * 2 * 8 * 128 * 2
    assert 15.0e9 < alone < 15.2e9


def test_what_is_no_number_is_no_success() -> None:
    """An error that is NaN fails its check."""
    assert not Check(name="x", error=float("nan"), limit=1.0).is_good
    assert Check(name="x", error=0.0, limit=0.0).is_good


def test_without_a_gpu_it_says_so() -> None:
    """Where torch sees no GPU the program ends at once and names the way that remains."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "surefoot.bench.device"],
        env={"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "torch sees no GPU; --reference runs on a CPU" in done.stderr


def test_a_timing_reads_more_than_caches_hold() -> None:
    """Small contexts are read in as many layers of their own as it takes, and no byte counts twice."""
    shape = Shape(num_heads=2, num_kv_heads=1, head_dim=64, min_bytes=1 << 20)
    load = decode_load(shape, FULL, batch=2, context=100, device=CPU)
    assert load.useful_bytes == len(load.cache) * 2 * 100 * 256
    assert (1 << 20) <= load.useful_bytes < (1 << 20) + 2 * 100 * 256
    assert load.cache[0].numel() == 2 * 7 * 16 * 256


def test_a_line_has_rate_and_share() -> None:
    """A rate is useful bytes a second, its share that of the copy's."""
    timing = Timing(name="decode", seconds=0.002, amount=4e9, unit="B", baseline=4e12)
    assert timing.line.split() == ["decode", "2000.0", "us", "2000.00", "GB/s", "50.0", "%"]
