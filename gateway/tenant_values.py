"""What holds for a tenant, value by value, and where each comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from .tenant_files import TenantFile
from .tenants import Tenant, TenantValues
from .toml_lines import has_path, line_of

BUILT_IN = "built-in"


class EffectiveValue(Struct, frozen=True):
    """One key with the value that holds. `origin` is a file and its line, or `built-in`."""

    key: str
    value: Any
    origin: str


def effective_values(tenant: Tenant, *files: TenantFile | None) -> list[EffectiveValue]:
    """Everything but keys. The first of the files (None for one that is not there) that has a key says it."""
    own = {name: getattr(tenant, name) for name in ("id", *TenantValues.__struct_fields__)}
    return [EffectiveValue(key, value, _origin(key, files)) for key, value in _flat(own)]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Struct):
            yield from _flat(asdict(value), f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _origin(key: str, files: tuple[TenantFile | None, ...]) -> str:
    path = tuple(key.split("."))
    for file in files:
        if file is not None and has_path(file.values, path):
            return f"{file.path.name}:{line_of(file.text, path)}"
    return BUILT_IN
