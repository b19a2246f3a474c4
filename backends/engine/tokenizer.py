"""Text to token ids and back, a token at a time too."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tokenizers
from msgspec import Struct, field
from transformers.utils.chat_template_utils import render_jinja_template

from surefoot.backends.errors import InvalidPrompt

from .model_errors import UnsupportedModel

SPM_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""How SentencePiece spells a space."""


class TokenizerSpec(Struct, frozen=True, kw_only=True):
    """What is known about a tokenizer beside its `tokenizer.json`.

    `special_tokens` are named as templates name them (`bos_token`, `eos_token`, ...).
    """

    chat_template: str | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()


class Tokenizer:
    """A byte-level BPE or a SentencePiece vocabulary. Everything may be called from any thread."""

    def __init__(self, backend: tokenizers.Tokenizer, spec: TokenizerSpec) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.spec = spec
        self.eos_token_ids = frozenset(spec.eos_token_ids)
        added = backend.get_added_tokens_decoder()
        self._bytes = {token_id: token.content.encode() for token_id, token in added.items()}
        """Of added tokens, and of all others that were asked for: a model's output repeats itself."""
        self.max_token_chars = max(len(token) for token in backend.get_vocab(with_added_tokens=True))
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # The pickled state of one part is its JSON; writing and reading that of the whole takes 0.2 s more.
        decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        self._spelling = _spelling(decoder)
        self._strips_space = _strips_leading_space(decoder)

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, special ones included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens that are spelled out in it count as such, as in transformers.

        `add_special_tokens` puts those before the text that the model expects at the start of a document;
        a rendered chat brings its own.
        """
        try:
            # The batch form lets other Python threads run meanwhile, `encode` does not.
            encoded = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encoded[0].ids)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidPrompt(
                "the text has half of a surrogate pair, which is not a character", "prompt"
            ) from error

    def render_chat(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt that the model's own template makes of a conversation, up to the assistant's turn."""
        if self.spec.chat_template is None:
            raise InvalidPrompt(
                "this model has no chat template: it completes text, it does not chat", "messages"
            )
        # Templates test whether a key is there; OpenAI clients send null for what they leave out.
        present = [
            {key: value for key, value in message.items() if value is not None} for message in messages
        ]
        variables: dict[str, Any] = {"add_generation_prompt": True, **self.spec.special_tokens}
        try:
            result: Any = render_jinja_template(
                conversations=[present], chat_template=self.spec.chat_template, **variables
            )
        except Exception as error:  # a template is a program of the model's author and may raise anything
            raise InvalidPrompt(
                f"the model's chat template refuses these messages: {error}", "messages"
            ) from error
        conversations, _ = result
        return str(conversations[0])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, maybe part of a character; a special one stands for its name."""
        if (known := self._bytes.get(token_id)) is not None:
            return known
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        return self._bytes.setdefault(token_id, self._spelling(token))

    def token_text(self, token_id: int) -> str:
        """A token alone as text, U+FFFD where its bytes are no character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of tokens, special ones skipped."""
        detokenizer = self.detokenizer()
        pieces = [detokenizer.push(token_id) for token_id in token_ids]
        return "".join(pieces) + detokenizer.flush()

    def spell(self, token_ids: Iterable[int]) -> str:
        """The text of tokens with special ones spelled out, as the tokens' own texts make it up."""
        return b"".join(self.token_bytes(token_id) for token_id in token_ids).decode("utf-8", "replace")

    def detokenizer(self, *, continues: bool = False) -> Detokenizer:
        """A fresh `Detokenizer`. With `continues` its text goes on where other text ended."""
        return Detokenizer(self, strip_space=self._strips_space and not continues)

    def is_special(self, token_id: int) -> bool:
        """Whether a token structures the conversation and has no text of its own."""
        return token_id in self._special_ids


class Detokenizer:
    """Turns one choice's tokens into text as they come. All pieces together are the `decode` of all tokens.

    A character whose bytes have not all arrived is held back; bytes that can no longer become one are U+FFFD.
    `strip_space` drops the space that SentencePiece puts before the first word of a text.
    """

    def __init__(self, tokenizer: Tokenizer, *, strip_space: bool) -> None:
        self._tokenizer = tokenizer
        self._strip_space = strip_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes, often none."""
        if self._tokenizer.is_special(token_id):
            return ""
        return self._stripped(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """What is left at the end: U+FFFD if the last character is incomplete."""
        return self._stripped(self._decoder.decode(b"", True))

    def _stripped(self, text: str) -> str:
        if not self._strip_space or not text:
            return text
        self._strip_space = False
        return text.removeprefix(" ")


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return steps


def _spelling(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    """How the vocabulary spells bytes."""
    kinds = [step["type"] for step in _decoder_steps(decoder)]
    if "ByteLevel" in kinds:
        return _byte_level_spelling()
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return _spm_bytes
    known = "not byte-level BPE or SentencePiece"
    raise UnsupportedModel(f"The tokenizer decodes by {', '.join(kinds) or 'nothing'}, {known}")


def _byte_level_spelling() -> Callable[[str], bytes]:
    alphabet = {char: byte for byte, char in enumerate(byte_level_alphabet())}

    def spelling(token: str) -> bytes:
        codes = [alphabet.get(char) for char in token]
        # A token that the alphabet cannot spell is plain text, as in tokenizers.
        return token.encode() if None in codes else bytes(code for code in codes if code is not None)

    return spelling


def _spm_bytes(token: str) -> bytes:
    """SentencePiece spells a byte that is no token of its own as `<0xE2>`."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace(SPM_SPACE, " ").encode()


def _strips_leading_space(decoder: dict[str, Any] | None) -> bool:
    for step in _decoder_steps(decoder):
        if step["type"] == "Strip" and step["content"] == " " and step["start"] > 0:
            return True
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return True
    return False


def byte_level_alphabet() -> list[str]:
    """GPT-2's character for each byte: printable Latin-1 is itself, the rest moves above U+00FF in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 0x100 + moved.index(byte)) for byte in range(256)]
