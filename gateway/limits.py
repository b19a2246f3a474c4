"""Ranges of request values, checked by one table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from .errors import InvalidValue

MAX_N = 128
MAX_PROMPTS = 128
MAX_SEQUENCES = 128
"""Prompts times choices of one request."""
MAX_TOKEN_IDS = 1_000_000
"""More would hold up the event loop, and no model has such a context."""
MAX_TOKEN_RULES = 1024
"""Entries of `logit_bias` or `stop_token_ids`: they cost time at every token. OpenAI allows about 300."""
MAX_STOPS = 4
MAX_CHAT_LOGPROBS = 20
MAX_TEXT_LOGPROBS = 5
MAX_COUNT = 2**31 - 1


class Range(Struct, frozen=True, kw_only=True):
    """`low` to `high`, both allowed unless `above_low`; None is no limit."""

    low: float
    high: float | None = None
    above_low: bool = False

    def __contains__(self, value: float) -> bool:
        if self.high is not None and value > self.high:
            return False
        return value > self.low if self.above_low else value >= self.low

    def __str__(self) -> str:
        if self.high is None:
            return f"greater than {self.low:g}" if self.above_low else f"at least {self.low}"
        if self.above_low:
            return f"greater than {self.low} and at most {self.high}"
        return f"between {self.low} and {self.high}"


RANGES = {
    "temperature": Range(low=0, high=2),
    "top_p": Range(low=0, high=1, above_low=True),
    "min_p": Range(low=0, high=1),
    "top_k": Range(low=-1, high=MAX_COUNT),
    "presence_penalty": Range(low=-2, high=2),
    "frequency_penalty": Range(low=-2, high=2),
    # Beyond these a logit over it, or times it, could leave float32.
    "repetition_penalty": Range(low=0.01, high=100),
    "seed": Range(low=-(2**63), high=2**63 - 1),
    "max_completion_tokens": Range(low=1, high=MAX_COUNT),
    "min_tokens": Range(low=0, high=MAX_COUNT),
    "n": Range(low=1, high=MAX_N),
    "best_of": Range(low=1, high=MAX_N),
    "top_logprobs": Range(low=0, high=MAX_CHAT_LOGPROBS),
}
MAX_TOKENS = RANGES["max_completion_tokens"]
MAX_TOKENS_WITH_ECHO = Range(low=0, high=MAX_COUNT)
"""An echo without output scores the prompt."""
TOKEN_ID = Range(low=0, high=MAX_COUNT)
BIAS = Range(low=-100, high=100)


def check_range(name: str, value: float, allowed: Range) -> None:
    """Raise `InvalidValue`, with the value and the limit, if it is not allowed."""
    if value not in allowed:
        raise InvalidValue(f"'{name}' must be {allowed}, but it is {value}.", name)


def check_token_rules(name: str, num_rules: int) -> None:
    """Raise `InvalidValue` if a field has more rules for tokens than a step has time for."""
    if num_rules > MAX_TOKEN_RULES:
        raise InvalidValue(f"'{name}' has {num_rules} entries, more than {MAX_TOKEN_RULES}.", name)


def check_token_ids(name: str, token_ids: Sequence[Any]) -> None:
    """Raise `InvalidValue` if there are too many, or not all are numbers in range.

    No loop of ours: a million of them are checked in a few hundredths of a second.
    """
    if len(token_ids) > MAX_TOKEN_IDS:
        raise InvalidValue(f"'{name}' has {len(token_ids)} token ids, more than {MAX_TOKEN_IDS}.", name)
    if not set(map(type, token_ids)) <= {int}:
        raise InvalidValue(f"'{name}' must be token ids throughout, as it begins with one.", name)
    if token_ids:
        check_range(name, min(token_ids), TOKEN_ID)
        check_range(name, max(token_ids), TOKEN_ID)
