"""What becomes of the documented request fields that no code here acts on.

OpenAI documents more fields than a model server has a use for. Each of them is in exactly one place:
honoured (a field of the request with a meaning in `schemas.py`), `INERT` (it cannot change the answer, so it
is accepted), or in `NEUTRAL` (it would change the answer: only the values that ask for nothing are accepted,
all others are refused by name). A test compares this with the fields that the openai package knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from .errors import Unsupported

INERT = frozenset(
    {
        "metadata",  # labels for the caller's own records
        "parallel_tool_calls",  # no tools, so none at once
        "prompt_cache_options",  # hints for caching; the answer is the same
        "prompt_cache_retention",
        "safety_identifier",  # who the caller's user is
        "user",
    }
)

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""The values that ask for nothing, beside null, which is one for every field."""


def refuse_unsupported(values: Mapping[str, Any]) -> None:
    """Raise `Unsupported` for the first field of `NEUTRAL` whose value asks for something."""
    for name in sorted(NEUTRAL.keys() & values.keys()):
        value, neutral = values[name], NEUTRAL[name]
        if value is not None and not any(type(value) is type(each) and value == each for each in neutral):
            accepted = " or ".join(msgspec.json.encode(each).decode() for each in neutral)
            but = f"; only {accepted} is accepted" if neutral else ""
            raise Unsupported(f"'{name}' is not supported by this server{but}.", name)
