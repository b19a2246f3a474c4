"""Reading tenant files: from TOML to a `Tenant`, or to a sentence with the file, the line and the key.

`defaults.toml` in the same folder says what holds for every tenant that does not say otherwise; tables are
merged key by key.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import Struct

from surefoot.policies.bounds import FORMATS, MOMENTS, Proposer

from .decode import did_you_mean
from .errors import shortened
from .tenants import Tenant, TenantLimits, TenantValues
from .toml_lines import line_of

DEFAULTS = "defaults.toml"
ID_WORDS = (
    "1 to 64 lower-case letters, digits, dots, underscores and hyphens, the first of them a letter or a digit"
)
HASH_WORDS = "what `surefoot key new` prints: 'sha256:' and 64 lower-case hexadecimal digits"
CHOICES: Mapping[str, Collection[str]] = {
    "cache.format": FORMATS,
    "cache.demote": MOMENTS,
    "speculation.proposers": get_args(Proposer),
}
WHY_NOT_IMPORTANT = (
    "bits were not found to do more for tokens that are attended to most than for the latest; leave the key"
    " out, and see 'cache.protect.recent' and the format 'mixed'"
)
KEYS = ("key_hashes", "keys")
"""Where a key may stand by mistake: no message repeats what does."""
Where = tuple[str | int, ...]


class Problem(Struct, frozen=True):
    """Why a file cannot be used. `line` is None where the fault is not on one line, or not in this file."""

    file: str
    line: int | None
    message: str

    def __str__(self) -> str:
        return (
            f"{self.file}: {self.message}"
            if self.line is None
            else f"{self.file}:{self.line}: {self.message}"
        )


class TenantFileError(ValueError):
    """Tenant files cannot be used; the message names the first of them, `problems` has all."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(str(problems[0]))
        self.problems = problems


class TenantFile(Struct, frozen=True):
    """A file as it stands, without the defaults."""

    path: Path
    text: str
    values: dict[str, Any]


class KnownNames(Struct, frozen=True):
    """What a file may name: policies, and SLA classes."""

    policies: Collection[str]
    classes: Collection[str]


def read_file(path: Path) -> TenantFile:
    """Read TOML. Raises `TenantFileError`."""
    try:
        text = path.read_text(encoding="utf-8")
        return TenantFile(path, text, tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        place = re.fullmatch(r"(.*) \(at line (\d+), (column \d+)\)", str(error))
        at_end = len(text.splitlines()) or None
        message, line = (f"{place[1]} at {place[3]}", int(place[2])) if place else (str(error), at_end)
        raise TenantFileError(Problem(str(path), line, f"not TOML: {message}")) from None
    except OSError as error:
        raise TenantFileError(Problem(str(path), None, error.strerror or str(error))) from None
    except UnicodeDecodeError:
        raise TenantFileError(Problem(str(path), None, "not UTF-8")) from None


def check_defaults(file: TenantFile, known: KnownNames) -> None:
    """Refuse defaults that no tenant could have. Raises `TenantFileError`."""
    for name in ("id", "key_hashes", "keys"):
        if name in file.values:
            raise _error(file, (name,), f"'{name}' belongs in a tenant's own file")
    _check(_convert(file, file.values, TenantValues), file, known)


def make_tenant(file: TenantFile, defaults: Mapping[str, Any], known: KnownNames) -> Tenant:
    """The tenant of a file. Raises `TenantFileError`, also for what this version does not serve."""
    tenant: Tenant = _convert(file, merge(defaults, file.values), Tenant)
    if not tenant.all_keys:
        raise _error(file, ("key_hashes",), f"no key: it needs 'key_hashes' with {HASH_WORDS}")
    if len({key.hash for key in tenant.all_keys}) < len(tenant.all_keys):
        raise _error(file, ("key_hashes",), "a key hash is there twice")
    _check(tenant, file, known)
    return tenant


def merge(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A tenant's own values over the defaults, table by table."""
    merged = {**defaults, **own}
    for key in defaults.keys() & own.keys():
        if isinstance(defaults[key], dict) and isinstance(own[key], dict):
            merged[key] = merge(defaults[key], own[key])
    return merged


def _check(values: TenantValues, file: TenantFile, known: KnownNames) -> None:
    _check_name(file, ("policy",), "policy", values.policy, known.policies)
    for key in ("default", "allowed", "reserved"):
        named = getattr(values.classes, key)
        for name in (named,) if isinstance(named, str) else named or ():
            _check_name(file, ("classes", key), "SLA class", name, known.classes)
    allowed = values.classes.allowed
    if allowed is not None and values.classes.default not in allowed:
        message = f"'classes.default' is '{values.classes.default}', which is not in 'classes.allowed'"
        raise _error(file, ("classes", "default"), message)
    if (important := values.cache.protect.important) is not None:
        message = f"'cache.protect.important' = {important} is not served: {WHY_NOT_IMPORTANT}"
        raise _error(file, ("cache", "protect", "important"), message)


def _check_name(file: TenantFile, where: Where, what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        hint = did_you_mean(name, known) or f" Known are: {', '.join(sorted(known))}."
        raise _error(file, where, f"there is no {what} '{name}'.{hint}")


def _convert(file: TenantFile, values: Mapping[str, Any], shape: type[Any]) -> Any:
    try:
        return msgspec.convert(values, shape)
    except msgspec.ValidationError as error:
        where, message = _explain(str(error), shape, values)
        raise _error(file, where, message) from None


def _error(file: TenantFile, where: Where, message: str) -> TenantFileError:
    line = line_of(file.text, where)
    while line is None and len(where) > 1:  # Of a key that is missing, the table that it is missing from.
        where = where[:-1]
        line = line_of(file.text, where)
    return TenantFileError(Problem(str(file.path), line, message))


def _explain(problem: str, shape: type[Any], values: Mapping[str, Any]) -> tuple[Where, str]:
    """Where msgspec found a fault in the values, and what is wrong in our words."""
    problem, _, at = problem.partition(" - at `$")
    where = _read_path(at.removesuffix("`"))
    if match := re.fullmatch(r"Object contains unknown field `(.*)`", problem, re.DOTALL):
        return (*where, match[1]), _explain_unknown(where, match[1], shape)
    if match := re.fullmatch(r"Object missing required field `(.*)`", problem):
        return (*where, match[1]), f"missing key '{_path_text((*where, match[1]))}'"
    return where, _explain_value(where, problem[0].lower() + problem[1:], values)


def _explain_value(where: Where, problem: str, values: Mapping[str, Any]) -> str:
    name, is_pattern = _path_text(where), problem.startswith("expected `str` matching regex")
    if where[0] in KEYS:
        return f"'{name}' must be {HASH_WORDS}" if is_pattern else f"'{name}': {problem}"
    # What msgspec says it got is a type.
    expected = problem.partition(", got ")[0]
    key = _path_text(tuple(part for part in where if isinstance(part, str)))
    if is_pattern:
        expected = f"expected {ID_WORDS}"
    elif key in CHOICES:
        expected = f"expected one of {', '.join(CHOICES[key])}"
    return f"'{name}': {expected}, but it is {_shown(_value_at(values, where))}"


def _value_at(values: Any, where: Where) -> Any:
    """What stands at a place that there is."""
    for part in where:
        values = values[part]
    return values


def _shown(value: Any) -> str:
    """As TOML has it, more or less."""
    return str(value) if isinstance(value, float) else shortened(msgspec.json.encode(value).decode())


def _explain_unknown(where: Where, name: str, shape: type[Any]) -> str:
    inner = shape
    for part in where:
        if isinstance(part, str):
            inner = _struct_of(get_type_hints(inner)[part])
    known = inner.__struct_fields__
    limits = TenantLimits.__struct_fields__
    if not where and name in limits:
        return f"unknown key '{name}'. It belongs under [limits]."
    hint = did_you_mean(name, known) or f" Known are: {', '.join(known)}."
    return f"unknown key '{_path_text((*where, name))}'.{hint}"


def _struct_of(hint: Any) -> Any:
    """The struct that a type holds: itself, or what it is a tuple of."""
    return next((each for each in getattr(hint, "__args__", ()) if hasattr(each, "__struct_fields__")), hint)


def _read_path(text: str) -> Where:
    """From `.keys[0].hash` to ("keys", 0, "hash")."""
    parts = re.findall(r"\.([^.\[]+)|\[(\d+)\]", text)
    return tuple(int(place) if place else name for name, place in parts)


def _path_text(where: Where) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where)
    return text.removeprefix(".")
