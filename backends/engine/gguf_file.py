"""A GGUF file: its metadata, and its tensors under our names and in our order of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from msgspec import Struct

from surefoot.kernels.weights import BLOCK_BYTES, GroupWeight

from .gguf_config import config_from_gguf
from .model_config import ModelConfig
from .model_errors import BadModelFiles, UnsupportedModel
from .weights import layer_prefix

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FREQ_FACTORS = "rope_freqs.weight"

_INTERLEAVED_FAMILIES = ("llama", "smollm3")
"""Families whose GGUF files rotate neighbouring dimensions: the rows of q and k are in another order."""


class RawTensor(Struct, frozen=True):
    """A tensor as the file stores it, with rows in our order.

    `kind` is ggml's name of the type (Q4_1, Q8_0, F32, ...), `shape` counts elements; `data` is uint8
    `[rows, bytes of a row]` for quantised kinds, else the numbers themselves.
    """

    kind: str
    shape: tuple[int, ...]
    data: np.ndarray[Any, Any]


class GgufFile:
    """A mapped file. Opening it parses all metadata, which takes seconds for a large vocabulary."""

    def __init__(self, path: Path) -> None:
        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
            raise BadModelFiles(f"{path.name} is not a complete GGUF file: {error}") from error
        self.metadata: Mapping[str, Any] = _Metadata(reader)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._freq_factors = tensors.pop(_FREQ_FACTORS, None)
        self._tensors: dict[str, ReaderTensor] = {_our_name(name): tensor for name, tensor in tensors.items()}
        self.shapes = {name: _shape(tensor) for name, tensor in self._tensors.items()}
        factors = () if self._freq_factors is None else tuple(self._freq_factors.data.tolist())
        self.config: ModelConfig = config_from_gguf(self.metadata, self.shapes, factors)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor in float32, dequantised."""
        raw, kind = self.raw(name), self._tensors[name].tensor_type
        try:
            return torch.from_numpy(np.array(dequantize(raw.data, kind), dtype=np.float32).reshape(raw.shape))
        except NotImplementedError as error:
            raise UnsupportedModel(f"{name} has the type {raw.kind}, which cannot be dequantised") from error

    def groups(self, name: str) -> GroupWeight | None:
        """The tensor in the groups that it is stored in, if they are of a kind that op sets take."""
        raw = self.raw(name)
        kind = raw.kind.lower()
        if kind not in BLOCK_BYTES or len(raw.shape) != 2:
            return None
        return GroupWeight(kind=kind, data=torch.from_numpy(np.array(raw.data)))

    def raw(self, name: str) -> RawTensor:
        """The tensor as it is stored. Quantised groups lie within rows, so they survive the reordering."""
        tensor = self._tensors[name]
        data = tensor.data
        if (order := self._row_order(name)) is not None:
            data = data[order]
        return RawTensor(tensor.tensor_type.name, self.shapes[name], data)

    def _row_order(self, name: str) -> np.ndarray[Any, Any] | None:
        """Our row i is the file's row `order[i]`; None where they agree."""
        if self.config.family not in _INTERLEAVED_FAMILIES:
            return None
        if ".q_proj." in name:
            num_heads = self.config.num_heads
        elif ".k_proj." in name:
            num_heads = self.config.num_kv_heads
        else:
            return None
        rows = np.arange(num_heads * self.config.head_dim)
        return rows.reshape(num_heads, self.config.head_dim // 2, 2).swapaxes(1, 2).ravel()


class _Metadata(Mapping[str, Any]):
    """The file's key-value pairs, each decoded when it is asked for (a vocabulary is large)."""

    def __init__(self, reader: GGUFReader) -> None:
        self._fields = reader.fields

    def __getitem__(self, key: str) -> Any:
        return self._fields[key].contents()

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


def _our_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; the check names those that stay."""
    stem, _, suffix = name.rpartition(".")
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdecimal() and parts[2] in _LAYER_NAMES:
        return f"{layer_prefix(int(parts[1]))}{_LAYER_NAMES[parts[2]]}.{suffix}"
    return f"{_NAMES[stem]}.{suffix}" if stem in _NAMES else name


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    """ggml names the fastest dimension first."""
    return tuple(int(size) for size in reversed(tensor.shape))
