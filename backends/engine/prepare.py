"""From a path to a model that can run: what is slow is done once and kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import tokenizers
import torch
from msgspec import Struct
from safetensors.torch import save_file

from surefoot.kernels.base import AnyWeight, Ops
from surefoot.kernels.weights import GroupWeight

from .gguf_file import GgufFile
from .gguf_tokenizer import gguf_tokenizer
from .hf_folder import read_config, read_tokenizer
from .model import Model
from .model_config import ModelConfig
from .model_errors import BadModelFiles, ModelNotFound, UnsupportedModel
from .safetensors_folder import GROUP_MARK, INDEX_FILE, SafetensorsFolder, safetensors_files
from .tokenizer import Tokenizer, TokenizerSpec
from .weight_cache import Progress, cached_folder, sampled_digest
from .weight_mode import WeightMode, convert
from .weights import check_weights

FORMAT = 2
"""Part of a prepared model's key: raise it whenever what is written changes."""

SHARD_BYTES = 1 << 30
"""Prepared weights are written in pieces of about this size, so that memory never holds all of them."""


class LoadedModel(Struct, frozen=True):
    """A model ready to run. `fingerprint` is the same wherever weights, config and mode are."""

    config: ModelConfig
    model: Model
    tokenizer: Tokenizer
    fingerprint: str


def load_model(
    path: Path,
    *,
    mode: WeightMode,
    ops: Ops,
    cache_dir: Path,
    progress: Progress,
    device: torch.device | str = "cpu",
    max_model_len: int | None = None,
) -> LoadedModel:
    """Load a Hugging Face folder or a GGUF file; raises `ModelError`.

    A GGUF file is converted to `mode` once, under `cache_dir`; a folder is read as it is. `max_model_len`
    bounds the positions that the model prepares for (None: what it takes).
    """
    if path.is_dir():
        identity = "".join(sampled_digest(file) for file in safetensors_files(path))
        config, tokenizer, folder = read_config(path), read_tokenizer(path), path
    elif path.is_file():
        identity = sampled_digest(path)
        folder = _prepared(path, identity, mode, cache_dir, progress)
        config, tokenizer = _read_prepared(folder)
    else:
        raise ModelNotFound(f"{path} is neither a folder nor a file")
    if config.head_dim not in ops.head_dims:
        raise UnsupportedModel(
            f"The head dimension is {config.head_dim}; the op set {ops.name} takes {ops.head_dims.start} to"
            f" {ops.head_dims[-1]} in steps of {ops.head_dims.step}"
        )
    if config.max_model_len < config.max_position_embeddings:
        progress(f"Contexts end at {config.max_model_len} tokens, the model's sliding window.")
    with SafetensorsFolder(folder) as source:
        check_weights(config, source.shapes)
        progress(f"Loading the weights of {path.name}.")
        model = Model(config, source, ops, mode=mode, device=device, max_model_len=max_model_len)
    return LoadedModel(config, model, tokenizer, _fingerprint(identity, config, mode))


def _fingerprint(identity: str, config: ModelConfig, mode: WeightMode) -> str:
    digest = hashlib.blake2b(digest_size=6)
    for part in (identity.encode(), msgspec.json.encode(config), mode.value.encode()):
        digest.update(part)
    return digest.hexdigest()


def _prepared(path: Path, identity: str, mode: WeightMode, cache_dir: Path, progress: Progress) -> Path:
    """The folder of a GGUF file's converted form."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise BadModelFiles(f"{path.name} is not a GGUF file")
    stat = path.stat()
    parts = (FORMAT, path.name, stat.st_size, stat.st_mtime_ns, identity, mode)
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
    key = f"{path.stem}-{mode}-{digest}"
    return cached_folder(cache_dir, key, lambda folder: _prepare(path, mode, folder, progress), progress)


def _prepare(path: Path, mode: WeightMode, folder: Path, progress: Progress) -> None:
    progress(f"Preparing {path.name}, which is done once: reading the metadata.")
    gguf = GgufFile(path)
    check_weights(gguf.config, gguf.shapes)
    tokenizer = gguf_tokenizer(gguf.metadata)
    (folder / "config.json").write_bytes(msgspec.json.encode(gguf.config))
    (folder / "tokenizer_spec.json").write_bytes(msgspec.json.encode(tokenizer.spec))
    tokenizer.backend.save(str(folder / "tokenizer.json"), pretty=False)
    _write_weights(gguf, mode, folder, progress)


def _write_weights(gguf: GgufFile, mode: WeightMode, folder: Path, progress: Progress) -> None:
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(_shards(gguf, mode, progress)):
        file_name = f"weights-{number:05}.safetensors"
        save_file(shard, folder / file_name)
        weight_map |= dict.fromkeys(shard, file_name)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def _shards(gguf: GgufFile, mode: WeightMode, progress: Progress) -> Iterator[dict[str, torch.Tensor]]:
    """Matrices as `mode` says, vectors (norms and biases) in float32."""
    shard: dict[str, torch.Tensor] = {}
    quarter = 1
    for done, name in enumerate(gguf.shapes, start=1):
        weight = _converted(gguf, name, mode)
        if isinstance(weight, GroupWeight):
            shard[f"{name}{GROUP_MARK}{weight.kind}"] = weight.data
        else:
            shard[name] = weight
        if 4 * done >= quarter * len(gguf.shapes):
            progress(f"Converting the weights: {25 * quarter} %.")
            quarter += 1
        if sum(tensor.nbytes for tensor in shard.values()) >= SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard


def _converted(gguf: GgufFile, name: str, mode: WeightMode) -> AnyWeight:
    if len(gguf.shapes[name]) == 1:
        return gguf.tensor(name)
    if mode is WeightMode.NATIVE and (groups := gguf.groups(name)) is not None:
        return groups
    return convert(gguf.tensor(name), mode)


def _read_prepared(folder: Path) -> tuple[ModelConfig, Tokenizer]:
    config = msgspec.json.decode((folder / "config.json").read_bytes(), type=ModelConfig)
    spec = msgspec.json.decode((folder / "tokenizer_spec.json").read_bytes(), type=TokenizerSpec)
    return config, Tokenizer(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")), spec)
