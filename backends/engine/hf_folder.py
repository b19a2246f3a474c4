"""A Hugging Face model folder: config and tokenizer. Its weights are a `SafetensorsFolder`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from .hf_config import config_from_hf
from .model_config import ModelConfig
from .model_errors import BadModelFiles
from .tokenizer import Tokenizer, TokenizerSpec

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_config(folder: Path) -> ModelConfig:
    """The model's shape."""
    return config_from_hf(_read_json(folder, "config.json"))


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer, the chat template, and every token that ends an answer.

    The ends are those of `generation_config.json` (else of `config.json`) and the tokenizer's own.
    """
    try:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception for whatever it cannot read
        raise BadModelFiles(f"{folder.name}/tokenizer.json cannot be read: {error}") from error
    settings = _read_json(folder, "tokenizer_config.json", optional=True)
    special_tokens = {name: text for name in _SPECIAL_TOKENS if (text := _token_text(settings.get(name)))}
    generation, config = (
        _read_json(folder, "generation_config.json", optional=True),
        _read_json(folder, "config.json"),
    )
    ends = _eos_ids(generation) or _eos_ids(config)
    if (own_end := backend.token_to_id(special_tokens.get("eos_token", ""))) is not None:
        ends |= {own_end}
    spec = TokenizerSpec(
        chat_template=_chat_template(folder, settings),
        special_tokens=special_tokens,
        eos_token_ids=tuple(sorted(ends)),
    )
    return Tokenizer(backend, spec)


def _read_json(folder: Path, name: str, *, optional: bool = False) -> dict[str, Any]:
    path = folder / name
    if optional and not path.exists():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadModelFiles(f"{folder.name}/{name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise BadModelFiles(f"{folder.name}/{name} is not a JSON object")
    return content


def _token_text(token: Any) -> str | None:
    """A special token is written as a string, or as an object with its `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _eos_ids(settings: dict[str, Any]) -> set[int]:
    given = settings.get("eos_token_id")
    ids = given if isinstance(given, list) else [given]
    return {token_id for token_id in ids if isinstance(token_id, int)}


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """A file of its own in newer folders; in older ones a setting, one template or a list of named ones."""
    own_file = folder / "chat_template.jinja"
    if own_file.exists():
        return own_file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
