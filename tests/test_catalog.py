"""Names and paths of models."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.backends.catalog import default_model_id, locate_model
from surefoot.backends.engine.model_errors import ModelNotFound


def test_a_name_is_the_packaged_file() -> None:
    """The packaged model's name stands for its GGUF file, wherever it is installed."""
    path = locate_model("smollm2")
    assert path.is_file()
    assert path.read_bytes()[:4] == b"GGUF"


def test_a_path_is_itself(tmp_path: Path) -> None:
    """A folder or file that is there stands for itself."""
    assert locate_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["smollm3", "Qwen/Qwen3-0.6B", "/no/such.gguf"])
def test_nothing_there(model: str) -> None:
    """What is neither a name nor a path is refused with itself and with what would do."""
    with pytest.raises(ModelNotFound, match=rf"{model}.*smollm2.*Nothing is downloaded"):
        locate_model(model)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2", "smollm2"),
        ("/models/Qwen3-0.6B", "Qwen3-0.6B"),
        ("/models/Qwen3-0.6B/", "Qwen3-0.6B"),
        ("/models/tiny.Q4_K_M.gguf", "tiny.Q4_K_M"),
    ],
)
def test_default_model_id(model: str, name: str) -> None:
    """A model is called by its name, its folder's name, or its file's name without `.gguf`."""
    assert default_model_id(model) == name
