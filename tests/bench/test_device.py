"""The device benchmark, as far as a CPU can tell: its checks, its report, its processes and its arguments."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from surefoot.backends.engine.weights import expected_shapes
from surefoot.bench.device import CHECK_SECONDS, MAX_SECONDS, TIMINGS, Report, main, run
from surefoot.bench.device_checks import CHECKS, check_rowwise
from surefoot.bench.device_kernels import time_decoding, time_prefill
from surefoot.bench.device_loads import Shape, decode_load
from surefoot.bench.device_model import LLAMA_8B, SLIM, layer_matrices, step_bytes
from surefoot.bench.device_rows import Check, Fault, Part, Ratio, Row, Timing
from surefoot.bench.device_sections import Apart, Section, rows_of
from surefoot.bench.device_setup import REFERENCE, Setup
from surefoot.kernels.layout import FORMATS, FULL
from surefoot.kernels.reference import ReferenceOps

CPU = torch.device("cpu")
MATRICES = ("q, k and v", "o", "gate and up", "down")


def test_reference_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--reference` checks first, then times every shape and format, prints a table at the end, and stores
    what it found.
    """
    assert main(["--reference", "--output", str(tmp_path / "report.json")]) == 0
    report = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Report)
    checks = [row for part in report.parts for row in part.rows if isinstance(row, Check)]
    lines = capsys.readouterr().out.splitlines()
    (verdict,) = (number for number, line in enumerate(lines) if line.startswith("VERDICT"))
    assert lines[verdict].endswith(f"{len(checks)} checks passed")
    printed = [row.line for part in report.parts for row in part.rows]
    assert [line for line in lines if line in printed] == printed
    assert lines.index(checks[-1].line) < verdict < lines.index(report.parts[-1].rows[0].line)
    assert lines[-len(report.parts) :] == [part.line for part in report.parts]
    names = {row.name for part in report.parts for row in part.rows}
    assert names >= {
        *("rotate", "bytes of (4, 4)", "attention over (8, 4)", "lse of past of (8, 8)", "bits alone"),
        *("prompt over (16, 16) and (4, 4)", "present", "mass over (4, 4)", "sample", "missing tokens"),
        *("graphs of steps", "steps of a model", "waits in steps", "the largest step"),
        *(f"decode 100 x {batch}, ({f.k_bits}, {f.v_bits})" for batch in (1, 3) for f in FORMATS),
        *("prefill 50, torch", "prefill 50, ours"),
        *(f"{name} of 3 rows, {who}" for name in MATRICES for who in ("library", "batch-invariant")),
        "layer of 3 rows, batch-invariant",
        *(f"{who} x 2, token to token" for who in ("engine", "engine with drafts", "transformers")),
        *("the engine beside generate x 2", "tokens in 4 bits beside 16, 100 x 3"),
    }


def test_everything_is_in_a_section() -> None:
    """Sections have names of their own, which are those of processes."""
    names = [section.name for section in (*CHECKS, *TIMINGS)]
    assert sorted(set(names)) == sorted(names)


class _Faulty(ReferenceOps):
    """Norms that are off by 3 %."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return super().rms_norm(x, weight, eps) * 1.03


class _FaultySetup(Setup):
    """Whose norms are faulty."""

    def ops(self) -> ReferenceOps:
        return _Faulty()


def _like(kind: type[Setup], setup: Setup) -> Setup:
    return kind(**{name: getattr(setup, name) for name in setup.__struct_fields__})


def _two(setup: Setup) -> Iterator[Row]:
    yield Check(name="first", error=0.0, limit=0.0)
    yield Check(name="second", error=0.0, limit=0.0)


def _breaks(setup: Setup) -> Iterator[Row]:
    yield Check(name="before", error=0.0, limit=0.0)
    raise RuntimeError("no such kernel\nand more")


class _InThere:
    """A function to be called by whoever unpickles this."""

    def __init__(self, function: Callable[..., object], argument: object) -> None:
        self._call = function, (argument,)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object]]:
        return self._call

    def __call__(self, setup: Setup) -> Iterator[Row]:
        raise NotImplementedError


def test_a_failed_check_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A faulty op is named, and the verdict says what its timings are worth."""
    section = Section("rows", check_rowwise)
    report = run(_like(_FaultySetup, REFERENCE), None, [section], [Section("prefill", time_prefill)])
    assert [row.name for row in report.parts[0].rows if not row.is_good] == ["rms_norm", "add_rms_norm"]
    assert not report.is_good
    assert "2 of 7 checks failed: believe no timing" in capsys.readouterr().out
    assert len(report.parts[1].rows) == 2


def test_an_exception_ends_its_section_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """What was found before is kept, the exception is a row, and the other sections run."""
    report = run(REFERENCE, None, [Section("broken", _breaks), Section("whole", _two)], [])
    broken, whole = report.parts[:2]
    assert [row.name for row in broken.rows] == ["before", "broken"]
    assert broken.rows[1] == Fault(name="broken", what="RuntimeError: no such kernel")
    assert [row.name for row in whole.rows] == ["first", "second"]
    assert "1 of 4 checks failed" in capsys.readouterr().out
    assert not report.is_good


@pytest.mark.parametrize(
    ("work", "limit_s", "what"),
    [
        (_InThere(os._exit, 3), 90.0, "ended with status 3"),
        (_InThere(time.sleep, 600.0), 0.1, "stopped, as the time was up"),
    ],
)
def test_a_process_that_dies_or_hangs(work: _InThere, limit_s: float, what: str) -> None:
    """A process that dies, or has to be stopped, is a row of its section."""
    apart = Apart(Section("work", work), REFERENCE)
    apart.begin()
    assert list(apart.rows(time.monotonic() + limit_s)) == [Fault(name="work", what=what)]


def test_a_process_finds_what_this_one_does() -> None:
    """A section gives the same rows in a process of its own."""
    section = Section("rows", check_rowwise)
    apart = Apart(section, REFERENCE)
    apart.begin()
    assert list(apart.rows(time.monotonic() + 90.0)) == list(rows_of(section, REFERENCE))


def test_a_layer_is_what_the_model_has() -> None:
    """The matrices that are timed have the numbers of a layer's weights."""
    shapes = {n: s for n, s in expected_shapes(LLAMA_8B).items() if n.startswith("model.layers.0.")}
    assert set(layer_matrices(LLAMA_8B)) == set(MATRICES)
    assert sum(map(math.prod, layer_matrices(LLAMA_8B).values())) == sum(
        math.prod(shape) for shape in shapes.values() if len(shape) == 2
    )


def test_a_verdict_takes_no_more_than_a_minute() -> None:
    """Checks have a minute, the printing of what they found included, and all of it five."""
    assert CHECK_SECONDS < 60.0
    assert MAX_SECONDS < 300.0


def test_a_step_reads_the_weights_and_the_cache() -> None:
    """The floor is every matrix but the embedding, a row of that a token, and the tokens of the cache."""
    alone, two = (step_bytes(LLAMA_8B, batch, 1000, torch.bfloat16) for batch in (1, 2))
    assert two - alone == 2 * 4096 + 1000 * 32 * 2 * 8 * 128 * 2
    assert 15.0e9 < alone < 15.2e9


def test_what_is_checked_has_the_kernels_of_what_is_timed() -> None:
    """The model whose steps are checked is as wide as the one that is timed, so nothing is compiled twice."""
    fields = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps")
    assert [getattr(SLIM, name) for name in fields] == [getattr(LLAMA_8B, name) for name in fields]


def test_what_is_no_number_is_no_success() -> None:
    """An error that is NaN fails its check."""
    assert not Check(name="x", error=float("nan"), limit=1.0).is_good
    assert Check(name="x", error=0.0, limit=0.0).is_good


def test_without_a_gpu_it_says_so() -> None:
    """Where torch sees no GPU the program ends at once and names the way that remains."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "surefoot.bench.device"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
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
    assert load.past.block_table.shape == (2, 16)
    assert load.past.block_table[:, :7].flatten().sort().values.tolist() == list(range(14))


def test_a_bar_holds_for_large_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate has a bar where one call reads as much as the bar asks for, else it is only reported."""
    shape = replace(REFERENCE.shape, batches=(1, 8))
    monkeypatch.setattr("surefoot.bench.device_kernels.BAR_BYTES", 101 * shape.layout.bytes_per_token(FULL))
    rows = [row for row in time_decoding(replace(REFERENCE, shape=shape)) if isinstance(row, Timing)]
    least = {row.name: row.least for row in rows}
    assert least["decode 100 x 1, (16, 16)"] is None
    assert least["decode 100 x 8, (16, 16)"] == 0.85
    assert least["decode 100 x 8, (4, 4)"] == 0.7


def test_lines_say_what_is_good() -> None:
    """A rate is useful bytes a second, its share that of the copy's; both, and ratios, with their bars."""
    timing = Timing(name="decode", seconds=0.002, amount=4e9, unit="B", baseline=4e12)
    assert timing.line.split() == ["decode", "2000.0", "us", "2000.00", "GB/s", "50.0", "%"]
    assert replace(timing, least=0.4).line.split()[0] == "ok"
    assert replace(timing, least=0.6).line.split()[-5:] == ["50.0", "%", "of", "60", "%"]
    ratio = Ratio(name="ours", ratio=2.0, least=3.0)
    assert ratio.line.split() == ["LOW", "ours", "2.00", "x", "of", "3.0"]
    part = Part(name="all", seconds=1.0, rows=[timing, ratio, Fault(name="x", what="y")])
    assert (part.num_bad, part.num_low) == (1, 1)
