"""SLA classes: what is promised to a request, and how OpenAI's `service_tier` names them.

Three are built in. A TOML file (the setting `classes`) adds others, or replaces one of these, whole:

    [interactive]
    priority = 200           # a higher one runs first
    ttft_target_s = 0.3      # until the first token; without it nothing is promised
    tpot_target_s = 0.05     # per token after the first; likewise
    tier = "priority"        # what answers call the class; `default` without this line

The engine hears of priority and targets only. A tenant's file says which classes its requests may have
(`TenantClasses`); what a client asks for beyond that is lowered, never refused.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import fields

from .decode import did_you_mean
from .errors import InvalidValue, shortened
from .tenant_files import ID_WORDS
from .tenants import TenantClasses

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
Target = Annotated[float, Meta(gt=0, le=86400)]


class ClassesError(ValueError):
    """A file of classes cannot be used; the message names it."""


class SlaClass(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What requests of one class are promised, in seconds; None is no promise."""

    priority: Annotated[int, Meta(ge=-1000, le=1000)]
    ttft_target_s: Target | None = None
    tpot_target_s: Target | None = None
    tier: Literal["priority", "default", "flex"] = "default"

    @property
    def has_targets(self) -> bool:
        """Whether anything is promised."""
        return self.ttft_target_s is not None or self.tpot_target_s is not None


INTERACTIVE, STANDARD, BATCH = "interactive", "standard", "batch"
DEFAULT_CLASSES: Mapping[str, SlaClass] = {
    # A person waits: half a second seems prompt, and ten tokens a second outrun a reader.
    INTERACTIVE: SlaClass(priority=200, ttft_target_s=0.5, tpot_target_s=0.1, tier="priority"),
    STANDARD: SlaClass(priority=100, ttft_target_s=5.0, tpot_target_s=0.25),
    BATCH: SlaClass(priority=0, tier="flex"),
}
CLASS_OF_TIER: Mapping[str, str | None] = {
    "auto": None,
    "default": None,
    "fast": INTERACTIVE,
    "flex": BATCH,
    "priority": INTERACTIVE,
    "scale": None,
}
"""What `service_tier` may say. None is the tenant's default class; `scale` is its reserved one, if any."""


class Promise(Struct, frozen=True):
    """The class that a request got, and the tier that its answer names."""

    name: str
    sla: SlaClass
    tier: str


class Classes:
    """All classes of one server."""

    def __init__(self, classes: Mapping[str, SlaClass] = DEFAULT_CLASSES) -> None:
        self._classes = {**DEFAULT_CLASSES, **classes}

    @property
    def by_name(self) -> Mapping[str, SlaClass]:
        """Each class under its name."""
        return self._classes

    @property
    def names(self) -> Collection[str]:
        """What a tenant's file may name."""
        return self._classes.keys()

    def promise(self, service_tier: str | None, tenant: TenantClasses) -> Promise:
        """What a request gets that asks for a tier. The tier must have passed `check_tier`."""
        if service_tier == "scale" and tenant.reserved is not None:
            return Promise(tenant.reserved, self._classes[tenant.reserved], "scale")
        asked = CLASS_OF_TIER[service_tier or "auto"] or tenant.default
        name = self._clamped(asked, tenant)
        return Promise(name, self._classes[name], self._classes[name].tier)

    def _clamped(self, asked: str, tenant: TenantClasses) -> str:
        """The class itself if the tenant may have it, or the nearest below that it may, or its default."""
        if tenant.allowed is None or asked in tenant.allowed:
            return asked
        limit = self._classes[asked].priority
        below = [name for name in tenant.allowed if self._classes[name].priority <= limit]
        return max(below, key=lambda name: self._classes[name].priority, default=tenant.default)


def check_tier(service_tier: str | None) -> None:
    """Raise `InvalidValue` for a tier that nobody knows."""
    if service_tier is not None and service_tier not in CLASS_OF_TIER:
        known = ", ".join(f"'{tier}'" for tier in CLASS_OF_TIER)
        raise InvalidValue(
            f"'service_tier' must be one of {known}, but it is '{shortened(service_tier)}'.", "service_tier"
        )


def load_classes(path: Path | None) -> Classes:
    """Read a file of classes; without one, those that every server has. Raises `ClassesError`."""
    if path is None:
        return Classes()
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ClassesError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ClassesError(f"{path}: {error}") from error
    return Classes({name: _read_class(path, name, table) for name, table in raw.items()})


def _read_class(path: Path, name: str, table: object) -> SlaClass:
    if not isinstance(table, dict):
        raise ClassesError(
            f"{path}: '{shortened(name)}' stands in no class: keys follow a line such as [{STANDARD}]"
        )
    if not NAME.fullmatch(name):
        raise ClassesError(f"{path}: [{shortened(name)}]: the name of a class must be {ID_WORDS}")
    try:
        return msgspec.convert(table, SlaClass)
    except msgspec.ValidationError as error:
        raise ClassesError(f"{path}: [{name}]: {_explain(str(error))}") from None


def _explain(problem: str) -> str:
    if match := re.fullmatch(r"Object contains unknown field `(.*)`", problem, re.DOTALL):
        hint = did_you_mean(match[1], [each.name for each in fields(SlaClass)])
        return f"unknown key '{shortened(match[1])}'.{hint}"
    return problem.replace("Object missing required field", "missing key").replace("`$.", "`")
