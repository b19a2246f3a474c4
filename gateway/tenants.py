"""Who is asking: one TOML file per tenant, found by the key that a request carries.

    id = "acme"
    key_hashes = ["sha256:5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef"]
    models = ["smollm2-135m-instruct"]     # without it: all

    [limits]                               # each may be left out
    max_concurrent_requests = 16
    requests_per_minute = 600
    tokens_per_minute = 100_000
    max_tokens = 1024
    max_n = 4

    [classes]                              # of gateway/sla.py; likewise
    default = "standard"
    allowed = ["standard", "batch"]        # without it: all
    reserved = "interactive"               # what `service_tier: scale` means

Only hashes are stored. Keys are 256 random bits, so a single SHA-256 is enough: the slow, salted hashes that
passwords need make guessing costly, and nobody guesses 256 bits. It also lets a key be found by its hash in a
dictionary, in the same time for one tenant and for thousands; what that time may tell is about a hash, from
which no key follows.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import fields

from .decode import did_you_mean
from .errors import InvalidKey, InvalidValue

KEY_PREFIX = "sf-"
ID_WORDS = (
    "1 to 64 lower-case letters, digits, dots, underscores and hyphens, the first of them a letter or a digit"
)
HASH_WORDS = "what `surefoot key new` prints: 'sha256:' and 64 lower-case hexadecimal digits"
Limit = Annotated[int, Meta(ge=1)]


class TenantFileError(ValueError):
    """A tenant file cannot be used; the message names the file."""


class TenantLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a tenant's requests may ask for; None is no limit."""

    max_concurrent_requests: Limit | None = None
    max_tokens: Limit | None = None
    max_n: Limit | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None


class TenantClasses(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which SLA classes a tenant's requests get. `allowed` None is all; `reserved` is what `scale` means."""

    default: str = "standard"
    allowed: tuple[str, ...] | None = None
    reserved: str | None = None


class Tenant(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file. `id` names the tenant in logs and metrics."""

    id: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    key_hashes: Annotated[
        tuple[Annotated[str, Meta(pattern="^sha256:[0-9a-f]{64}$")], ...], Meta(min_length=1)
    ]
    models: tuple[str, ...] | None = None
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    classes: TenantClasses = TenantClasses()
    limits: TenantLimits = TenantLimits()

    def may_use(self, model_id: str) -> bool:
        """Whether the tenant has access to a model."""
        return self.models is None or model_id in self.models

    def check_n(self, n: int) -> None:
        """Raise `InvalidValue` if `n` choices are too many."""
        limit = self.limits.max_n
        if limit is not None and n > limit:
            raise InvalidValue(f"'n' is {n}, more than your limit of {limit}.", "n")


LOCAL_TENANT = Tenant(id="local", key_hashes=())
"""Everybody, where there are no tenant files."""


class Tenants:
    """All tenants, by their keys. Without any, everybody is `LOCAL_TENANT`."""

    def __init__(self, tenants: Sequence[Tenant] = ()) -> None:
        self.everyone = tuple(tenants)
        self._by_hash = {key_hash: tenant for tenant in tenants for key_hash in tenant.key_hashes}

    @property
    def keys_required(self) -> bool:
        """Whether requests must carry a key."""
        return bool(self._by_hash)

    def authenticate(self, authorization: str | None) -> Tenant:
        """The tenant of an `Authorization` header. Raises `InvalidKey`."""
        if not self.keys_required:
            return LOCAL_TENANT
        tenant = self._by_hash.get(hash_key(bearer_key(authorization)))
        if tenant is None:
            raise InvalidKey("Incorrect API key.")
        return tenant


def new_key() -> tuple[str, str]:
    """A key, to be shown once, and its hash for a tenant file."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    return key, hash_key(key)


def bearer_key(authorization: str | None) -> str:
    """The key in an `Authorization` header. Raises `InvalidKey`."""
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise InvalidKey("No API key: send it in the header 'Authorization: Bearer <key>'.")
    return key.strip()


def hash_key(key: str) -> str:
    """The form in which a tenant file has a key."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def load_tenants(folder: Path) -> Tenants:
    """Read every `*.toml` in a folder. Raises `TenantFileError`, also where there is none."""
    if not folder.is_dir():
        raise TenantFileError(f"{folder}: no such folder")
    files = [(path, _load(path)) for path in sorted(folder.glob("*.toml"))]
    if not files:
        # Whoever names a folder means to ask for keys; to serve everybody would be a surprise.
        raise TenantFileError(
            f"{folder}: no tenant file (*.toml) in this folder. Make a key with `surefoot key new` and put"
            f" its line, with an id, into {folder / 'NAME.toml'}; or name no folder, to serve this machine"
            " alone, without keys"
        )
    _refuse_twice([(tenant.id, path) for path, tenant in files], "the id")
    _refuse_twice([(each, path) for path, tenant in files for each in tenant.key_hashes], "the key hash")
    return Tenants([tenant for _, tenant in files])


def _load(path: Path) -> Tenant:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        return msgspec.convert(raw, Tenant)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TenantFileError(f"{path}: {error}") from error
    except msgspec.ValidationError as error:
        raise TenantFileError(f"{path}: {_explain(str(error))}") from None


def _explain(problem: str) -> str:
    if match := re.fullmatch(r"Object contains unknown field `(.*?)`( - at `\$\.limits`)?", problem):
        return _explain_unknown(match[1], within_limits=bool(match[2]))
    if match := re.fullmatch(r"Expected `str` matching regex .* - at `\$\.(id|key_hashes\[\d+\])`", problem):
        return f"'{match[1]}' must be {ID_WORDS if match[1] == 'id' else HASH_WORDS}"
    return problem.replace("Object missing required field", "missing key").replace("`$.", "`")


def _explain_unknown(name: str, *, within_limits: bool) -> str:
    limits = [each.name for each in fields(TenantLimits)]
    if within_limits:
        return f"unknown key 'limits.{name}'.{did_you_mean(name, limits)}"
    if name in limits:
        return f"unknown key '{name}'. It belongs under [limits]."
    return f"unknown key '{name}'.{did_you_mean(name, [each.name for each in fields(Tenant)])}"


def _refuse_twice(named: Sequence[tuple[str, Path]], what: str) -> None:
    seen: dict[str, Path] = {}
    for name, path in named:
        if name in seen:
            raise TenantFileError(f"{path}: {what} '{name}' is also in {seen[name]}")
        seen[name] = path
