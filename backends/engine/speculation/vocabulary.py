"""Whether a draft model speaks the served model's language: a token must mean the same to both."""

from __future__ import annotations

import re

from ..model_errors import DraftMismatch
from ..tokenizer import Tokenizer

_PADDING = re.compile(r"\[(pad|unused)_?\d+\]", re.IGNORECASE)
"""How vocabularies in GGUF files are filled up to the embedding's size, which differs between siblings."""


def check_vocabularies(target: Tokenizer, draft: Tokenizer, target_name: str, draft_name: str) -> None:
    """Raise `DraftMismatch` unless both have the same tokens under the same ids, special ones included.

    Padding may differ.
    """
    ours, theirs = _tokens(target), _tokens(draft)
    for token_id in sorted(ours.keys() | theirs.keys()):
        our, their = ours.get(token_id, "no token"), theirs.get(token_id, "no token")
        if our != their:
            raise DraftMismatch(
                f"{draft_name} cannot draft for {target_name}, their vocabularies differ: token {token_id} is"
                f" {their} in {draft_name} and {our} in {target_name}. Name a smaller model of its family"
            )


def _tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """What each id stands for, in words that tell a special token from one that spells the same."""
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    return {
        token_id: f"special {token!r}" if tokenizer.is_special(token_id) else repr(token)
        for token, token_id in vocabulary.items()
        if not _PADDING.fullmatch(token)
    }
