from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from surefoot.backends.catalog import locate_model
from surefoot.backends.engine.gguf_file import GgufFile
from surefoot.backends.engine.gguf_tokenizer import gguf_tokenizer
from surefoot.backends.engine.model_errors import BadModelFiles, CacheFolderError, ModelNotFound
from surefoot.backends.engine.prepare import LoadedModel, load_model
from surefoot.backends.engine.weight_cache import cached_folder, sampled_digest
from surefoot.backends.engine.weight_mode import WeightMode
from surefoot.kernels.reference import ReferenceOps

from .tiny_models import our_logits, random_tokens, tiny_hf_model, write_gguf


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    """A tiny model's GGUF file."""
    path = tmp_path / "tiny [v1].gguf"
    write_gguf(path, tiny_hf_model("llama"))
    return path


def _load(
    path: Path, cache_dir: Path, mode: WeightMode = WeightMode.FLOAT32
) -> tuple[LoadedModel, list[str]]:
    messages: list[str] = []
    loaded = load_model(path, mode=mode, ops=ReferenceOps(), cache_dir=cache_dir, progress=messages.append)
    return loaded, messages


def _prepared(messages: list[str]) -> bool:
    return any(message.startswith("Preparing") for message in messages)


def _folders(cache_dir: Path) -> list[Path]:
    return [path for path in cache_dir.iterdir() if path.is_dir()]


def test_the_second_start_finds_what_the_first_prepared(gguf_path: Path, tmp_path: Path) -> None:
    """Preparing happens once; the second start gives the same model, tokenizer and fingerprint."""
    first, first_messages = _load(gguf_path, tmp_path / "cache")
    second, second_messages = _load(gguf_path, tmp_path / "cache")
    assert _prepared(first_messages)
    assert not _prepared(second_messages)
    assert first.fingerprint == second.fingerprint
    assert first.config == second.config
    assert first.tokenizer.spec == second.tokenizer.spec
    assert second.tokenizer.encode("the <|im_end|>") == first.tokenizer.encode("the <|im_end|>")
    token_ids = random_tokens(20)
    assert torch.equal(our_logits(first.model, token_ids), our_logits(second.model, token_ids))


def test_each_dtype_and_file_has_its_own_folder(gguf_path: Path, tmp_path: Path) -> None:
    """Another dtype, a changed file or a touched one is prepared anew; fingerprints follow what is served."""
    cache_dir = tmp_path / "cache"
    first, _ = _load(gguf_path, cache_dir)
    narrow, messages = _load(gguf_path, cache_dir, WeightMode.BFLOAT16)
    assert _prepared(messages)
    assert narrow.fingerprint != first.fingerprint
    stat = gguf_path.stat()
    os.utime(gguf_path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**10))
    touched, messages = _load(gguf_path, cache_dir)
    assert _prepared(messages)
    assert touched.fingerprint == first.fingerprint
    write_gguf(gguf_path, tiny_hf_model("llama-tied"))
    changed, messages = _load(gguf_path, cache_dir)
    assert _prepared(messages)
    assert changed.fingerprint != first.fingerprint
    assert len(_folders(cache_dir)) == 4


def _cut(folder: Path) -> None:
    file = folder / "weights-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _overwrite(folder: Path) -> None:
    file = folder / "weights-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 4096] = bytes(4096)
    file.write_bytes(content)


def _lose_a_file(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _empty_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b"")


@pytest.mark.parametrize("damage", [_cut, _overwrite, _lose_a_file, _empty_the_manifest])
def test_a_damaged_folder_is_made_again(
    damage: Callable[[Path], None], gguf_path: Path, tmp_path: Path
) -> None:
    """A cut, overwritten or missing file is noticed; the model is prepared again and is right."""
    cache_dir = tmp_path / "cache"
    first, _ = _load(gguf_path, cache_dir)
    (folder,) = _folders(cache_dir)
    damage(folder)
    second, messages = _load(gguf_path, cache_dir)
    assert any("damaged" in message for message in messages)
    assert _prepared(messages)
    token_ids = random_tokens(20)
    assert torch.equal(our_logits(first.model, token_ids), our_logits(second.model, token_ids))
    assert _folders(cache_dir) == [folder]
    assert not _prepared(_load(gguf_path, cache_dir)[1])


def test_what_a_killed_process_left_is_cleared(gguf_path: Path, tmp_path: Path) -> None:
    """A partial folder of a process that was killed is never taken for a model, and is removed."""
    cache_dir = tmp_path / "cache"
    _load(gguf_path, cache_dir)
    (folder,) = _folders(cache_dir)
    folder.rename(cache_dir / f".{folder.name}.abc")
    assert _prepared(_load(gguf_path, cache_dir)[1])
    assert _folders(cache_dir) == [folder]


def test_a_failed_preparation_leaves_nothing(tmp_path: Path) -> None:
    """An error while preparing is raised, and leaves no folder behind."""

    def fail(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise OSError("No space left on device")

    with pytest.raises(CacheFolderError, match="No space"):
        cached_folder(tmp_path, "key", fail, lambda message: None)
    assert _folders(tmp_path) == []


_CHILD = """
import sys
from pathlib import Path
from surefoot.backends.engine.prepare import load_model
from surefoot.backends.engine.weight_mode import WeightMode
from surefoot.kernels.reference import ReferenceOps
sys.stdin.read(1)
messages = []
loaded = load_model(
    Path(sys.argv[1]),
    mode=WeightMode.FLOAT32,
    ops=ReferenceOps(),
    cache_dir=Path(sys.argv[2]),
    progress=messages.append,
)
print(sum(message.startswith("Preparing") for message in messages), loaded.fingerprint)
"""


def test_a_cache_folder_of_no_use(tmp_path: Path) -> None:
    """A folder that cannot be made is refused by name and setting, before anything is built."""
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CacheFolderError, match=rf"in {folder}: .* in the setting cache_dir"):
            cached_folder(folder, "key", lambda _: pytest.fail("built"), lambda _: None)


def test_concurrent_processes_prepare_once_and_agree(gguf_path: Path, tmp_path: Path) -> None:
    """Of two processes that start together one prepares, the other waits, and both serve the same model."""
    command = [sys.executable, "-P", "-c", _CHILD, str(gguf_path), str(tmp_path / "cache")]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    outputs = [""] * 2

    def finish(index: int) -> None:
        outputs[index] = children[index].communicate("x")[0]

    threads = [threading.Thread(target=finish, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts, fingerprints = zip(*(output.split() for output in outputs), strict=True)
    assert sorted(counts) == ["0", "1"]
    assert fingerprints[0] == fingerprints[1]


def test_concurrent_threads_build_once(tmp_path: Path) -> None:
    """While one builds, the others wait for it and say so."""
    building, waiting = threading.Event(), threading.Event()
    builds: list[Path] = []

    def build(folder: Path) -> None:
        building.set()
        assert waiting.wait(60)
        (folder / "content").write_bytes(b"x")
        builds.append(folder)

    results: list[Path] = []
    first = threading.Thread(
        target=lambda: results.append(cached_folder(tmp_path, "key", build, lambda message: None))
    )
    first.start()
    assert building.wait(60)
    results.append(cached_folder(tmp_path, "key", build, lambda message: waiting.set()))
    first.join()
    assert len(builds) == 1
    assert results == [tmp_path / "key"] * 2


def test_a_folder_is_read_as_it_is(gguf_path: Path, tmp_path: Path) -> None:
    """A Hugging Face folder needs no preparing, and its fingerprint names weights and dtype."""
    folder, cache_dir = tmp_path / "hf", tmp_path / "cache"
    reference = tiny_hf_model("llama")
    reference.save_pretrained(folder)
    gguf_tokenizer(GgufFile(gguf_path).metadata).backend.save(str(folder / "tokenizer.json"))
    loaded, messages = _load(folder, cache_dir)
    assert not _prepared(messages)
    assert not cache_dir.exists()
    assert _load(folder, cache_dir)[0].fingerprint == loaded.fingerprint
    assert _load(folder, cache_dir, WeightMode.BFLOAT16)[0].fingerprint != loaded.fingerprint
    from_gguf, _ = _load(gguf_path, cache_dir)
    token_ids = random_tokens(20)
    torch.testing.assert_close(our_logits(loaded.model, token_ids), our_logits(from_gguf.model, token_ids))


def test_a_sliding_window_is_announced(gguf_path: Path, tmp_path: Path) -> None:
    """A model that is served up to its window only says so at start."""
    folder = tmp_path / "hf"
    tiny_hf_model("mistral-window").save_pretrained(folder)
    gguf_tokenizer(GgufFile(gguf_path).metadata).backend.save(str(folder / "tokenizer.json"))
    loaded, messages = _load(folder, tmp_path / "cache")
    assert loaded.config.max_model_len == 256
    assert any("256 tokens" in message for message in messages)


def test_large_models_are_written_in_shards(
    gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prepared weights over the shard size lie in several files, which load as one model."""
    whole, _ = _load(gguf_path, tmp_path / "cache")
    monkeypatch.setattr("surefoot.backends.engine.prepare.SHARD_BYTES", 100_000)
    sharded, _ = _load(gguf_path, tmp_path / "other")
    (folder,) = _folders(tmp_path / "other")
    names = json.loads((folder / "model.safetensors.index.json").read_bytes())["weight_map"]
    assert len(set(names.values())) > 2
    token_ids = random_tokens(20)
    assert torch.equal(our_logits(whole.model, token_ids), our_logits(sharded.model, token_ids))


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    """A path that is nothing, and a file that is no GGUF, are refused."""
    with pytest.raises(ModelNotFound, match="neither"):
        _load(tmp_path / "nothing", tmp_path)
    (tmp_path / "text.gguf").write_text("hello", encoding="utf-8")
    with pytest.raises(BadModelFiles, match=r"text\.gguf is not a GGUF file"):
        _load(tmp_path / "text.gguf", tmp_path)


def test_the_digest_sees_every_end(tmp_path: Path) -> None:
    """The digest of a file changes with its size, its first and its last byte."""
    path = tmp_path / "file"
    seen = set()
    for content in (
        b"",
        b"a",
        b"b",
        bytes(200_000),
        bytes(199_999),
        b"a" + bytes(199_999),
        bytes(199_999) + b"a",
    ):
        path.write_bytes(content)
        seen.add(sampled_digest(path))
    assert len(seen) == 7


def test_the_real_model_only_loads_at_its_second_start(cache_dir: Path) -> None:
    """SmolLM2-135M needs nothing but reading once it is prepared."""
    path = locate_model("smollm2")
    _load(path, cache_dir)
    loaded, messages = _load(path, cache_dir)
    assert messages == [f"Loading the weights of {path.name}."]
    assert loaded.tokenizer.vocab_size == loaded.config.vocab_size == 49152
