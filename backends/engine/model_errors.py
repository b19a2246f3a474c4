"""Why a model cannot be served. All are raised at start, before any request.

ModelError
├── ModelNotFound       nothing that can be read lies at the path
├── UnsupportedModel    a model we cannot run; the message ends with what we can
├── BadModelFiles       a model we could run, but its files are incomplete, damaged or contradictory
├── CacheFolderError    prepared weights cannot be kept in the cache folder
├── DraftMismatch       a draft model whose tokens are not those of the model that it is to draft for
└── DeviceNotFound      the device that was asked for is not there
"""

from __future__ import annotations

SUPPORTED = (
    "Supported are decoders of the Llama family (model types llama, mistral, qwen2, qwen3 and smollm3: Llama "
    "2 and 3, SmolLM2 and 3, Mistral, Qwen2.5, Qwen3) with SiLU and rope type default, linear, llama3 "
    "or yarn, from a Hugging Face folder (safetensors, tokenizer.json) or a GGUF file."
)


class ModelError(Exception):
    """The root."""


class ModelNotFound(ModelError):
    """Nothing that can be read lies at the path."""


class UnsupportedModel(ModelError):
    """A model we cannot run."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}. {SUPPORTED}")


class BadModelFiles(ModelError):
    """The model's files are incomplete, damaged or contradictory."""


class CacheFolderError(ModelError):
    """Prepared weights cannot be kept in the cache folder."""


class DraftMismatch(ModelError):
    """A draft model's tokens are not those of the model that it is to draft for."""


class DeviceNotFound(ModelError):
    """The device that was asked for is not there."""
