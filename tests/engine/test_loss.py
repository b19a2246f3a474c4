from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from surefoot.backends.catalog import locate_model
from surefoot.backends.engine.backend import EngineParts
from surefoot.backends.engine.loss import (
    LossReport,
    LossSettings,
    Scores,
    compare,
    cut_windows,
    report_text,
    score,
)
from surefoot.backends.engine.loss_errors import LossError
from surefoot.backends.engine.loss_text import EXCERPT_CHARS, default_text, read_text
from surefoot.backends.engine.prepare import load_model
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.engine.weight_mode import WeightMode
from surefoot.kernels.reference import ReferenceOps

from .harness import MIB
from .tiny_models import hf_logits, tiny_hf_model, write_gguf

SETTINGS = EngineSettings(cache_bytes=64 * MIB, max_batched_tokens=64)


@pytest.fixture
def tiny_parts(tmp_path: Path) -> EngineParts:
    """A tiny random model with a byte-level vocabulary, in float32 with a float32 cache."""
    write_gguf(tmp_path / "tiny.gguf", tiny_hf_model("llama"))
    ops = ReferenceOps()
    loaded = load_model(
        tmp_path / "tiny.gguf",
        mode=WeightMode.FLOAT32,
        ops=ops,
        cache_dir=tmp_path / "cache",
        progress=lambda message: None,
    )
    return EngineParts(loaded=loaded, ops=ops, cache_dtype=torch.float32)


def _windows(parts: EngineParts, num_tokens: int, window: int) -> list[tuple[int, ...]]:
    settings = LossSettings(num_tokens=num_tokens, window=window)
    return cut_windows(parts.loaded.tokenizer, default_text(), settings)


def _score(parts: EngineParts, windows: Sequence[tuple[int, ...]]) -> Scores:
    return score(parts, SETTINGS, windows, WeightMode.FLOAT32, lambda message: None)


def test_the_maths_by_hand() -> None:
    """The loss pairs tokens; its standard error is that of the windows' means."""
    reference = Scores(torch.tensor([[-1.0, -2.0], [-3.0, -2.0]]).double(), torch.tensor([[1, 2], [3, 4]]), 2)
    measured = Scores(torch.tensor([[-1.5, -2.5], [-2.0, -3.0]]).double(), torch.tensor([[1, 2], [3, 5]]), 4)
    found = compare(measured, reference)
    assert found.loss == 0.25  # the mean of 0.5, 0.5, -1 and 1
    assert found.standard_error == pytest.approx(math.sqrt(0.125 / 2))  # of 0.5 and 0
    assert found.max_difference == 1.0
    assert found.equal_argmax == 0.75
    assert (measured.nats_per_token, measured.tokens_per_s) == (2.25, 1.0)


def test_scores_are_those_of_transformers(tiny_parts: EngineParts) -> None:
    """Windows that take several steps are scored as one forward pass of transformers scores them."""
    windows = _windows(tiny_parts, num_tokens=300, window=111)
    scores = _score(tiny_parts, windows)
    model = tiny_hf_model("llama")
    for number, window in enumerate(windows):
        token_ids = torch.tensor(window)
        want = hf_logits(model, token_ids).double().log_softmax(-1)[:-1]
        torch.testing.assert_close(
            scores.logprobs[number], want.gather(1, token_ids[1:, None])[:, 0], rtol=0, atol=2e-5
        )
        assert scores.argmax[number].tolist() == want.argmax(-1).tolist()


def test_no_loss_against_itself(tiny_parts: EngineParts) -> None:
    """A model against itself loses exactly nothing."""
    windows = _windows(tiny_parts, num_tokens=300, window=111)
    found = compare(_score(tiny_parts, windows), _score(tiny_parts, windows))
    assert (found.loss, found.standard_error, found.max_difference, found.equal_argmax) == (0, 0, 0, 1)


def test_progress_is_told(tiny_parts: EngineParts) -> None:
    """The last sentence says that all tokens are done."""
    messages: list[str] = []
    score(tiny_parts, SETTINGS, _windows(tiny_parts, 100, 63), WeightMode.INT8, messages.append)
    assert messages[-1].startswith("Scoring with int8 weights: 124 of 124 tokens, ")


def test_native_weights_lose_little(parts: EngineParts, cache_dir: Path) -> None:
    """The real model in the file's own groups is near its float32 form on 1,022 tokens."""
    exact = load_model(
        locate_model("smollm2"),
        mode=WeightMode.FLOAT32,
        ops=parts.ops,
        cache_dir=cache_dir,
        progress=lambda message: None,
    )
    windows = _windows(parts, num_tokens=1000, window=512)
    reference = _score(EngineParts(loaded=exact, ops=parts.ops, cache_dtype=parts.cache_dtype), windows)
    found = compare(_score(parts, windows), reference)
    assert abs(found.loss) < 0.02
    assert found.equal_argmax > 0.93
    assert 1.0 < reference.nats_per_token < 4.0


def test_windows(tiny_parts: EngineParts) -> None:
    """There are enough windows for the tokens asked for, two at least; they are the text in order."""
    tokenizer, text = tiny_parts.loaded.tokenizer, "abcdefghij" * 10
    windows = cut_windows(tokenizer, text, LossSettings(num_tokens=19, window=11))
    assert tokenizer.decode(windows[0] + windows[1]) == text[:22]
    assert len(cut_windows(tokenizer, text, LossSettings(num_tokens=20, window=11))) == 2
    assert len(cut_windows(tokenizer, text, LossSettings(num_tokens=21, window=11))) == 3
    assert len(cut_windows(tokenizer, text, LossSettings(num_tokens=1, window=50))) == 2
    with pytest.raises(LossError, match="the text has 100 tokens, but 10 windows of 11 tokens take 110"):
        cut_windows(tokenizer, text, LossSettings(num_tokens=100, window=11))


def test_windows_must_fit_the_context(tiny_parts: EngineParts) -> None:
    """A window as long as the context is refused, with both lengths."""
    with pytest.raises(LossError, match=r"windows of 512 tokens are too long.* context of 512"):
        _score(tiny_parts, _windows(tiny_parts, num_tokens=1, window=512))


@pytest.mark.parametrize(("field", "value"), [("window", 1), ("num_tokens", 0)])
def test_numbers_of_no_use(field: str, value: int) -> None:
    """A window that scores nothing and a count of no tokens are refused, with the value."""
    with pytest.raises(LossError, match=f"got {value}"):
        LossSettings(**{field: value})


def test_the_default_text() -> None:
    """It is long enough, the same each time, and has prose and code from its beginning."""
    text = default_text()
    assert text == default_text()
    assert len(text) > 400_000
    beginning = text[: 5 * EXCERPT_CHARS]
    assert "Transformers" in beginning
    assert "import " in beginning


def test_given_text(tmp_path: Path) -> None:
    """Files are read in the order given; one that is not there or not text is named."""
    (tmp_path / "a").write_text("one", encoding="utf-8")
    (tmp_path / "b").write_text("zwölf", encoding="utf-8")
    (tmp_path / "c").write_bytes(b"ab\xff")
    assert read_text([tmp_path / "b", tmp_path / "a"]) == "zwölf\n\none"
    with pytest.raises(LossError, match="missing cannot be read: No such file"):
        read_text([tmp_path / "missing"])
    with pytest.raises(LossError, match="c is not UTF-8: byte 2"):
        read_text([tmp_path / "c"])


def _surefoot_loss(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("surefoot")
    return subprocess.run([program, "loss", *arguments], capture_output=True, text=True, check=False)


def test_the_command(cache_dir: Path, tmp_path: Path) -> None:
    """`loss` prints JSON on stdout and its progress on stderr; float32 loses nothing, in a table too."""
    text = tmp_path / "text"
    text.write_text(default_text()[:2000], encoding="utf-8")
    arguments = ["--weights", "fp32", "--text", text, "--tokens", "100", "--window", "63", "--threads", "1"]
    done = _surefoot_loss(*arguments, "--cache-dir", cache_dir, "--json")
    assert done.returncode == 0, done.stderr
    assert "Scoring with fp32 weights: 124 of 124 tokens" in done.stderr
    report = msgspec.json.decode(done.stdout, type=LossReport)
    assert (report.loss, report.equal_argmax, report.num_tokens) == (0.0, 1.0, 124)
    assert "0.00000 nats per token, standard error 0.00000" in report_text(report)


def test_the_commands_errors(cache_dir: Path, tmp_path: Path) -> None:
    """A missing file and too little text get one sentence and exit status 2."""
    (tmp_path / "short").write_text("Too short.", encoding="utf-8")
    missing = _surefoot_loss("--text", tmp_path / "missing", "--cache-dir", cache_dir)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr.endswith("missing cannot be read: No such file or directory\n")
    short = _surefoot_loss("--text", tmp_path / "short", "--cache-dir", cache_dir, "--threads", "1")
    assert (short.returncode, short.stdout) == (2, "")
    assert "but 20 windows of 1024 tokens take 20480: give more text" in short.stderr
    assert "Traceback" not in missing.stderr + short.stderr


def test_the_commands_help() -> None:
    """The help has lines that can be typed, and the settings that matter here."""
    done = _surefoot_loss("--help")
    assert done.returncode == 0
    assert "\n    surefoot loss --weights int8 --json\n" in done.stdout
    assert {"--text", "--tokens", "--window", "--model", "--threads"} <= set(done.stdout.split())
    assert "--port" not in done.stdout
