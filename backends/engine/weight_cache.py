"""Prepared models on disk: what is slow to convert is converted once, and found again at the next start.

A prepared model is a folder that appears whole or not at all: it is written under another name, synced and
renamed. `manifest.json` has the size and digest of every file; a folder that does not match is built anew.
A lock file lets concurrent processes build a model once.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from .model_errors import CacheFolderError

Progress = Callable[[str], None]

_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16


class FileRecord(Struct, frozen=True):
    """One file's size and `sampled_digest`."""

    size: int
    digest: str


class Manifest(Struct, frozen=True):
    """The files of a prepared model."""

    files: dict[str, FileRecord]


def sampled_digest(path: Path) -> str:
    """A digest of a file's size and of 64 evenly spaced pieces, its beginning and end among them.

    4 MiB are read of a file of any size, so that a start is quick. It tells files apart and notices cut and
    overwritten ones, but not every single bit.
    """
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    last = max(size - _SAMPLE_BYTES, 0)
    with path.open("rb") as file:
        for i in range(_SAMPLES if last else 1):
            file.seek(last * i // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def cached_folder(cache_dir: Path, key: str, build: Callable[[Path], None], progress: Progress) -> Path:
    """The folder of `key` under `cache_dir`, made by `build(empty_folder)` if it is not there or damaged.

    One that is there is only read. Raises `CacheFolderError`.
    """
    folder = cache_dir / key
    if _is_whole(folder):
        return folder
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        _make(folder, build, progress)
    except OSError as error:
        raise CacheFolderError(
            f"the weights cannot be prepared in {cache_dir}: {error}. Name a folder that can be written, with"
            " room for them, in the setting cache_dir"
        ) from error
    return folder


def _make(folder: Path, build: Callable[[Path], None], progress: Progress) -> None:
    cache_dir, key = folder.parent, folder.name
    with _locked(cache_dir / f"{key}.lock", progress):
        if _is_whole(folder):
            return
        if folder.exists():
            progress(f"The prepared model {key} is damaged and is made again.")
        _remove_leftovers(cache_dir, key)
        partial = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=cache_dir))
        try:
            build(partial)
            _seal(partial)
            if folder.exists():
                folder.rename(partial.with_suffix(".damaged"))
            partial.rename(folder)
        finally:
            _remove_leftovers(cache_dir, key)


def _remove_leftovers(cache_dir: Path, key: str) -> None:
    """Partial and damaged folders, of this process or of one that was killed; only the lock's holder may."""
    for leftover in cache_dir.glob(f".{glob.escape(key)}.*"):
        shutil.rmtree(leftover)


def _seal(folder: Path) -> None:
    """Write the manifest, and see to it that all of the folder is on disk before it gets its name."""
    paths = sorted(folder.iterdir())
    files = {path.name: FileRecord(path.stat().st_size, sampled_digest(path)) for path in paths}
    (folder / "manifest.json").write_bytes(msgspec.json.encode(Manifest(files)))
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _is_whole(folder: Path) -> bool:
    try:
        manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)
        return all(
            (folder / name).stat().st_size == record.size and sampled_digest(folder / name) == record.digest
            for name, record in manifest.files.items()
        )
    except (OSError, msgspec.MsgspecError):
        return False


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("Waiting for another process that prepares the same model.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
