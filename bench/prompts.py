"""What is asked: synthetic prompts of a wanted length in tokens, or those of a file."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from .errors import BadArgument, BenchError
from .lengths import Length
from .words import sentence


class Prompt(Struct, frozen=True, kw_only=True):
    """One prompt: text or chat messages, and the output length if the prompt has its own."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None

    def body(self, chat: bool) -> dict[str, Any]:
        """Its part of a request's body. The text endpoint takes texts alone."""
        if chat:
            return {"messages": self.messages or [{"role": "user", "content": self.text}]}
        assert self.text is not None
        return {"prompt": self.text}


class Prompts(Protocol):
    """A source of prompts. The prompt of an index is always the same, whatever was asked for before."""

    def prompt(self, index: int) -> Prompt:
        """The prompt of request `index`."""


class Calibration(Struct, frozen=True, kw_only=True):
    """How many tokens the server counts: `overhead` for any prompt (its template), and for each word."""

    overhead: float
    tokens_per_word: float

    def num_words(self, num_tokens: int) -> int:
        """Words that come closest to that many tokens; one at least."""
        return max(1, round((num_tokens - self.overhead) / self.tokens_per_word))


def calibrate(few: tuple[int, int], many: tuple[int, int]) -> Calibration:
    """From two counts of (words sent, prompt tokens that the server counted)."""
    (words_a, tokens_a), (words_b, tokens_b) = few, many
    tokens_per_word = (tokens_b - tokens_a) / (words_b - words_a)
    if tokens_per_word <= 0:
        raise BenchError(
            f"the server counts {tokens_a} prompt tokens for {words_a} words and {tokens_b} for {words_b}:"
            " prompts of a given length cannot be made from that"
        )
    return Calibration(overhead=tokens_a - words_a * tokens_per_word, tokens_per_word=tokens_per_word)


class SyntheticPrompts:
    """Random words, as many as make the length drawn."""

    def __init__(self, length: Length, seed: int, calibration: Calibration) -> None:
        self._length = length
        self._seed = seed
        self._calibration = calibration

    def prompt(self, index: int) -> Prompt:
        """The prompt of request `index`."""
        random = Random(f"prompt-{self._seed}-{index}")
        return Prompt(text=sentence(random, self._calibration.num_words(self._length.draw(random))))


class GivenPrompts:
    """The prompts of a file, in its order, again and again."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self._prompts = prompts

    def prompt(self, index: int) -> Prompt:
        """The prompt of request `index`."""
        return self._prompts[index % len(self._prompts)]


def read_prompts(file: Path, *, chat: bool = True) -> GivenPrompts:
    """Read a file: with the ending .jsonl a JSON value per line, else plain text, a prompt per line.

    A JSON value is a text, or an object with `prompt` (text) or `messages`, and, if wanted, `max_tokens`.
    `BadArgument` if there is no such file, or if a line is of no use to the endpoint.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadArgument(f"--prompts {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadArgument(f"--prompts {file} is not UTF-8: byte {error.start}") from error
    read = _json_prompt if file.suffix == ".jsonl" else _text_prompt
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompts.append(read(line))
            except msgspec.MsgspecError as error:
                raise BadArgument(f"--prompts {file}, line {number}: {error}") from error
            if prompts[-1].messages and not chat:
                raise BadArgument(
                    f"--prompts {file}, line {number}: a conversation, which only the chat endpoint takes"
                )
    if not prompts:
        raise BadArgument(f"--prompts {file} has no prompts")
    return GivenPrompts(prompts)


class JsonPrompt(Struct, forbid_unknown_fields=False):
    """An object in a prompt file. Exactly one of `prompt` and `messages`."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected either `prompt` or `messages`")


def _json_prompt(line: str) -> Prompt:
    value = msgspec.json.decode(line, type=str | JsonPrompt)
    if isinstance(value, str):
        return Prompt(text=value)
    return Prompt(text=value.prompt, messages=value.messages, max_tokens=value.max_tokens)


def _text_prompt(line: str) -> Prompt:
    return Prompt(text=line)
