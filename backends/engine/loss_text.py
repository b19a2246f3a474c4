"""The text that a loss is measured on: given files, or what every installation has."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from itertools import chain, zip_longest
from pathlib import Path

from .loss_errors import LossError

PROSE = (
    "transformers",
    "torch",
    "litestar",
    "structlog",
    "cyclopts",
    "uvicorn",
    "httpx",
    "safetensors",
    "numpy",
)
"""Distributions that Surefoot depends on, whose descriptions and licences are English text."""

CODE = (
    "argparse",
    "calendar",
    "contextlib",
    "csv",
    "dataclasses",
    "difflib",
    "enum",
    "fractions",
    "heapq",
    "inspect",
    "mailbox",
    "pathlib",
    "random",
    "shutil",
    "statistics",
    "textwrap",
    "threading",
    "zipfile",
)
"""Modules of Python's standard library."""

EXCERPT_CHARS = 4000
"""So much of a document comes before the next one, so that a short measurement sees many documents."""


def read_text(files: Sequence[Path]) -> str:
    """The files one after the other; without any, prose and code of this installation in turns.

    The same versions give the same text. `LossError` for a file that cannot be read.
    """
    return "\n\n".join(_read(file) for file in files) if files else default_text()


def default_text() -> str:
    """Excerpts of all documents, then the next excerpt of each, until all have been taken whole."""
    documents = default_documents()
    starts = range(0, max(map(len, documents), default=0), EXCERPT_CHARS)
    excerpts = (document[start : start + EXCERPT_CHARS] for start in starts for document in documents)
    return "\n\n".join(excerpt for excerpt in excerpts if excerpt)


def default_documents() -> list[str]:
    """Prose and code of this installation in turns, each document whole."""
    pairs = zip_longest(_prose(), _code())
    return [document for document in chain.from_iterable(pairs) if document]


def read_documents(files: Sequence[Path]) -> list[str]:
    """Each file whole, or the default documents; for what long contexts are measured on."""
    return [_read(file) for file in files] if files else default_documents()


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise LossError(f"the text {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise LossError(f"the text {file} is not UTF-8: byte {error.start}") from error


def _prose() -> Iterator[str]:
    for name in PROSE:
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        yield str(found.metadata.json.get("description", ""))
        licences = (file for file in found.files or () if file.stem == "LICENSE" and len(file.parts) <= 3)
        for file in licences:
            yield Path(str(file.locate())).read_text(encoding="utf-8", errors="replace")


def _code() -> Iterator[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    for name in CODE:
        # A later Python may make a package of a module.
        for file in (folder / f"{name}.py", folder / name / "__init__.py"):
            if file.is_file():
                yield file.read_text(encoding="utf-8", errors="replace")
