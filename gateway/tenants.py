"""Who is asking: one TOML file per tenant, found by the key that a request carries.

    id = "acme"
    key_hashes = ["sha256:5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef"]
    models = ["smollm2-135m-instruct"]     # without it: all

    [limits]                               # each may be left out
    max_concurrent_requests = 16
    max_tokens = 1024
    max_n = 4

How a file is read stands in `tenant_files`, and all that it may have in docs/policies.md.

Only hashes are stored. Keys are 256 random bits, so a single SHA-256 is enough: the slow, salted hashes that
passwords need make guessing costly, and nobody guesses 256 bits. It also lets a key be found by its hash in a
dictionary, in the same time for one tenant and for thousands; what that time may tell is about a hash, from
which no key follows.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from surefoot.policies.bounds import (
    FORMATS,
    CacheBounds,
    Format,
    PlanBounds,
    ScheduleBounds,
    SpeculationBounds,
    more_precise,
)

from .errors import InvalidKey, InvalidValue, Unsupported
from .hints import CacheWish

KEY_PREFIX = "sf-"
Limit = Annotated[int, Meta(ge=1)]
KeyHash = Annotated[str, Meta(pattern="^sha256:[0-9a-f]{64}$")]


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


class TenantKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key that may expire. `label` is for people: whose it is, or what it is for."""

    hash: KeyHash
    expires: Annotated[datetime, Meta(tz=True)] | None = None
    label: str = ""


class TenantValues(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a tenant may and should have: the part of its file that `defaults.toml` can say for all."""

    models: tuple[str, ...] | None = None
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    policy: str = "baseline"
    reproducible: bool = False
    classes: TenantClasses = TenantClasses()
    limits: TenantLimits = TenantLimits()
    speculation: SpeculationBounds = SpeculationBounds()
    cache: CacheBounds = CacheBounds()
    schedule: ScheduleBounds = ScheduleBounds()

    @property
    def bounds(self) -> PlanBounds:
        """What a policy may choose from."""
        return PlanBounds(
            speculation=self.speculation,
            cache=self.cache,
            schedule=self.schedule,
            reproducible=self.reproducible,
        )


class Tenant(TenantValues, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file. `id` names the tenant in logs and metrics. `key_hashes` are those of keys without an end."""

    id: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    key_hashes: tuple[KeyHash, ...] = ()
    keys: tuple[TenantKey, ...] = ()

    @property
    def all_keys(self) -> tuple[TenantKey, ...]:
        """Its keys, those without an end first."""
        return (*(TenantKey(hash=each) for each in self.key_hashes), *self.keys)

    def may_use(self, model_id: str) -> bool:
        """Whether the tenant has access to a model."""
        return self.models is None or model_id in self.models

    def check_n(self, n: int) -> None:
        """Raise `InvalidValue` if `n` choices are too many."""
        limit = self.limits.max_n
        if limit is not None and n > limit:
            raise InvalidValue(f"'n' is {n}, more than your limit of {limit}.", "n")

    def check_speculation(self, is_asked: bool) -> None:
        """Raise `Unsupported` if a request has a wish for its drafts, and may not have one."""
        if is_asked and not self.speculation.per_request:
            raise Unsupported(
                "'speculation' is not for your requests to choose: your tenant's file does not have"
                " 'speculation.per_request = true'.",
                "speculation",
            )

    def check_cache(self, wish: CacheWish | None) -> None:
        """Raise `Unsupported` for a wish that the file does not let a request have, `InvalidValue` for one
        that goes beyond it: fewer bits, less protection, demotion by pressure, or a longer context.
        """
        if wish is None:
            return
        limits = self.cache
        if not limits.per_request:
            raise Unsupported(
                "'cache' is not for your requests to choose: your tenant's file does not have"
                " 'cache.per_request = true'.",
                "cache",
            )
        if wish.format is not None and more_precise(wish.format, limits.format) != wish.format:
            raise InvalidValue(
                f"'cache.format' is '{wish.format}', less precise than your limit of '{limits.format}'.",
                "cache.format",
            )
        least = limits.plan(limits.format)
        for name, number in wish.protection.wanted.items():
            if number < (limit := getattr(least, name)):
                raise InvalidValue(
                    f"'cache.protect.{name}' is {number}, less than your limit of {limit}.",
                    f"cache.protect.{name}",
                )
        if wish.demote == "pressure" != least.demote:
            raise InvalidValue(
                "'cache.demote' is 'pressure', but by your tenant's file tokens are demoted at once.",
                "cache.demote",
            )
        longest = limits.max_context
        if wish.max_context is not None and longest is not None and wish.max_context > longest:
            raise InvalidValue(
                f"'cache.max_context' is {wish.max_context}, more than your limit of {longest}.",
                "cache.max_context",
            )


LOCAL_TENANT = Tenant(id="local", key_hashes=())
"""Everybody, where there are no tenant files."""


def local_tenant(max_draft: int, cache_format: Format = FORMATS[0]) -> Tenant:
    """`LOCAL_TENANT`, with drafts of up to so many tokens from the request itself (0 for none), and its cache
    in this format. Its requests may ask for less of either.
    """
    tenant = LOCAL_TENANT
    if max_draft:
        drafts = SpeculationBounds(max_draft=max_draft, proposers=("prediction", "ngram"), per_request=True)
        tenant = replace(tenant, policy="fixed", speculation=drafts)
    if cache_format != FORMATS[0]:
        cache = CacheBounds(format=cache_format, per_request=True)
        tenant = replace(tenant, policy="fixed", cache=cache)
    return tenant


class Grant(Struct, frozen=True):
    """Whom a key lets in, and until when (a Unix time, None for always)."""

    tenant: Tenant
    expires_s: float | None


class Tenants:
    """All tenants, by their keys. Without any, everybody is `local`.

    `replace` puts others in their place at any moment, from any thread: a request sees the ones or the
    others. `keys_required` is decided once, so that no replacement can open the server to everybody.
    """

    def __init__(
        self,
        tenants: Sequence[Tenant] = (),
        *,
        keys_required: bool | None = None,
        local: Tenant = LOCAL_TENANT,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._by_hash = _grants(tenants)
        self.keys_required = bool(tenants) if keys_required is None else keys_required
        """Whether requests must carry a key."""
        self.local = local
        self._now = now

    def replace(self, tenants: Sequence[Tenant]) -> None:
        """From now on these are the tenants. What runs keeps the tenant that it began with."""
        self._by_hash = _grants(tenants)

    def authenticate(self, authorization: str | None) -> Tenant:
        """The tenant of an `Authorization` header. Raises `InvalidKey`."""
        if not self.keys_required:
            return self.local
        grant = self._by_hash.get(hash_key(bearer_key(authorization)))
        if grant is None:
            raise InvalidKey("Incorrect API key.")
        if grant.expires_s is not None and grant.expires_s <= self._now():
            ended = datetime.fromtimestamp(grant.expires_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            raise InvalidKey(f"This API key expired on {ended}.")
        return grant.tenant


def new_key() -> tuple[str, str]:
    """A key, to be shown once, and its hash for a tenant file."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    return key, hash_key(key)


def hash_key(key: str) -> str:
    """The form in which a tenant file has a key."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def bearer_key(authorization: str | None) -> str:
    """The key in an `Authorization` header. Raises `InvalidKey` where there is none."""
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise InvalidKey("No API key: send it in the header 'Authorization: Bearer <key>'.")
    return key.strip()


def _grants(tenants: Sequence[Tenant]) -> Mapping[str, Grant]:
    return {
        key.hash: Grant(tenant, key.expires.timestamp() if key.expires else None)
        for tenant in tenants
        for key in tenant.all_keys
    }
