"""From a request's body to a Struct, or to an error that says what is wrong with it and where."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import TypeVar

import msgspec

from .errors import InvalidType, InvalidValue, MalformedJson, MissingField, UnknownField, shortened

T = TypeVar("T", bound=msgspec.Struct)

# The forms of msgspec's messages; tests/gateway/test_errors.py holds each of them. An unknown field's name is
# the client's, of any length, so messages are cut at fixed words and not searched with patterns.
_UNKNOWN = "Object contains unknown field `"
_MISSING = "Object missing required field `"
_PATH = " - at `$"
_ANY_VALUE = "[...]"
# Programs leave one where they cut a text in the middle of an emoji. Near the end of a body msgspec takes it
# for the end of the data.
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u)")
_HALF_PAIR_BYTES = 12
_AT_BYTE = re.compile(r"(?P<what>.*) \(byte (?P<offset>\d+)\)")

ELSEWHERE = {
    "cache_salt": "prompt_cache_key",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "priority": "service_tier",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
}
"""Names that other servers, or the other endpoint, have for a field. Spelling alone would lead astray."""

LONGEST_SLIP = 64
"""Longer names are no slips of the pen; to compare one of megabytes would take seconds."""


def decode(body: bytes, shape: type[T]) -> T:
    """Decode JSON into `shape`. Raises an `InvalidRequest` whose `param` is a path: `messages[0].content`."""
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as error:
        raise _wrong_shape(str(error), shape) from None
    except msgspec.DecodeError as error:
        raise MalformedJson(_where_it_breaks(body, str(error))) from None
    except RecursionError:
        raise MalformedJson("The body is nested too deeply.") from None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A sentence that names the nearest of `names`, with a space before it; empty if none is near."""
    nearest = get_close_matches(name, list(names), n=1) if len(name) <= LONGEST_SLIP else []
    return f" Did you mean '{nearest[0]}'?" if nearest else ""


def _where_it_breaks(body: bytes, problem: str) -> str:
    if not body.strip():
        return "The body is empty: send a JSON object."
    offset = len(body)
    if match := _AT_BYTE.fullmatch(problem):
        problem, offset = match["what"], int(match["offset"])
        # msgspec names the byte after the first that is too many.
        offset -= problem.endswith("trailing characters")
    else:
        try:
            body.decode()
        except UnicodeDecodeError as error:
            offset = error.start
        if half := _HALF_PAIR.search(body, max(0, len(body) - _HALF_PAIR_BYTES)):
            problem, offset = "half of a surrogate pair stands alone", half.start()
    before = body[:offset]
    line, column = before.count(b"\n") + 1, offset - (before.rfind(b"\n") + 1) + 1
    place = f"at line {line}, column {column} (byte {offset} of {len(body)})"
    problem = problem.removeprefix("JSON is malformed: ")
    return f"The body is not valid JSON: {problem[0].lower()}{problem[1:]} {place}."


def _wrong_shape(problem: str, shape: type[msgspec.Struct]) -> Exception:
    path, of_values = "", ""
    if _PATH in problem:
        problem, _, path = problem.rpartition(_PATH)
        path = path.removesuffix("`").removeprefix(".")
        of_values = "a value of " if path.endswith(_ANY_VALUE) else ""
        path = shortened(path.removesuffix(_ANY_VALUE))
    if problem.startswith(_UNKNOWN):
        name = shortened(problem.removeprefix(_UNKNOWN).removesuffix("`"))
        # Only the top level's names are at hand; deeper objects have few fields.
        hint = "" if path else _hint(name, shape.__struct_fields__)
        param = _join(path, name)
        return UnknownField(f"Unknown parameter: '{param}'.{hint}", param)
    if problem.startswith(_MISSING):
        param = _join(path, problem.removeprefix(_MISSING).removesuffix("`"))
        return MissingField(f"Missing required parameter: '{param}'.", param)
    what = problem[0].lower() + problem[1:]
    if not problem.startswith("Expected"):
        return InvalidValue(f"Invalid value for '{path}': {what}.", path or None)
    if not path:
        return InvalidType(f"Invalid body: {what}.")
    return InvalidType(f"Invalid type for {of_values}'{path}': {what}.", path)


def _hint(name: str, known: Collection[str]) -> str:
    meant = ELSEWHERE.get(name)
    return f" Did you mean '{meant}'?" if meant in known else did_you_mean(name, known)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
