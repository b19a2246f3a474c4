"""The messages of a chat: text in, text out; what is not text is refused by its place."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from .errors import InvalidType, InvalidValue, MissingField, Unsupported, shortened

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""What each role is called in the models' templates, which know no developers."""
TOOL_ROLES = ("tool", "function")
# OpenAI's client sends an answer's message back with all of these, null where there is nothing.
NEUTRAL_FIELDS = ("name", "annotations", "audio", "refusal", "function_call", "tool_calls", "tool_call_id")
# A hint for OpenAI's cache; it cannot change an answer.
TEXT_PART_FIELDS = {"type", "text", "prompt_cache_breakpoint"}


class Message(Struct, forbid_unknown_fields=True, kw_only=True):
    """One message as sent. Fields of type Any must be null (or, for the lists, empty)."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: Any = None
    annotations: Any = None
    audio: Any = None
    refusal: Any = None
    function_call: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None


def read_messages(messages: list[Message]) -> tuple[dict[str, Any], ...]:
    """Messages as `ChatPrompt` wants them. Raises an `InvalidRequest` that names the place."""
    if not messages:
        raise InvalidValue("'messages' must not be empty.", "messages")
    return tuple(_read(message, f"messages[{i}]") for i, message in enumerate(messages))


def _read(message: Message, place: str) -> dict[str, Any]:
    if message.role in TOOL_ROLES:
        raise Unsupported(
            f"'{place}.role' is '{message.role}': tools are not supported by this server.", f"{place}.role"
        )
    if message.role not in ROLES:
        known = ", ".join(f"'{role}'" for role in ROLES)
        raise InvalidValue(
            f"'{place}.role' must be one of {known}, but it is '{shortened(message.role)}'.", f"{place}.role"
        )
    for name in NEUTRAL_FIELDS:
        if getattr(message, name) not in (None, []):
            raise Unsupported(f"'{place}.{name}' is not supported by this server.", f"{place}.{name}")
    return {"role": ROLES[message.role], "content": read_content(message.content, f"{place}.content")}


def read_content(content: str | list[dict[str, Any]] | None, place: str) -> str:
    """A text, or the text of its parts. Raises an `InvalidRequest` that names the place."""
    if isinstance(content, str):
        return content
    if content is None:
        raise MissingField(f"Missing required parameter: '{place}'.", place)
    if not content:
        raise InvalidValue(f"'{place}' must not be an empty list.", place)
    return "".join(_read_part(part, f"{place}[{j}]") for j, part in enumerate(content))


def _read_part(part: dict[str, Any], place: str) -> str:
    kind = part.get("type")
    if kind != "text":
        its_type = f"of type '{shortened(kind)}'" if isinstance(kind, str) else "of no type"
        raise Unsupported(f"'{place}' is {its_type}: only 'text' is supported by this server.", place)
    if unknown := sorted(part.keys() - TEXT_PART_FIELDS):
        param = f"{place}.{shortened(unknown[0])}"
        raise Unsupported(f"'{param}' is not supported by this server.", param)
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidType(f"Invalid type for '{place}.text': expected `str`.", f"{place}.text")
    return text
