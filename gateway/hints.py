"""Request fields that choose among what a tenant may have: of drafts, and of the cache's precision."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, structs

from surefoot.policies.bounds import FORMATS, MAX_DRAFT, MOMENTS

from .errors import InvalidValue, shortened
from .limits import MAX_COUNT, Range, check_range
from .messages import read_content

DRAFT_LENGTH = Range(low=0, high=MAX_DRAFT)
CONTEXT = Range(low=1, high=MAX_COUNT)
PROTECTED = Range(low=0, high=MAX_COUNT)


class Prediction(Struct, forbid_unknown_fields=True, kw_only=True):
    """OpenAI's: text that much of the answer may repeat."""

    type: str
    content: str | list[dict[str, Any]]

    def read(self) -> str:
        """The text. Raises an `InvalidRequest`."""
        if self.type != "content":
            raise InvalidValue(
                f"'prediction.type' must be 'content', but it is '{shortened(self.type)}'.", "prediction.type"
            )
        return read_content(self.content, "prediction.content")


class SpeculationWish(Struct, forbid_unknown_fields=True, kw_only=True):
    """How much of what its plan drafts a request wants at most."""

    enabled: bool | None = None
    max_draft: int | None = None

    @property
    def ceiling(self) -> int | None:
        """The longest draft, None for as long as the plan says."""
        return 0 if self.enabled is False else self.max_draft

    def check(self) -> None:
        """Raise `InvalidValue` for a length that no plan has."""
        if self.max_draft is not None:
            check_range("speculation.max_draft", self.max_draft, DRAFT_LENGTH)


class ProtectWish(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fewest of a context's first and latest tokens that a request wants to keep all bits."""

    sinks: int | None = None
    recent: int | None = None

    @property
    def wanted(self) -> dict[str, int]:
        """What it has a wish for."""
        return {name: value for name, value in structs.asdict(self).items() if value is not None}


class CacheWish(Struct, forbid_unknown_fields=True, kw_only=True):
    """What a request wants of its cache: the least precise format, the least protection, when tokens are
    demoted, and the longest context.
    """

    format: str | None = None
    protect: ProtectWish | None = None
    demote: str | None = None
    max_context: int | None = None

    @property
    def protection(self) -> ProtectWish:
        """What is to be protected, if anything."""
        return self.protect or ProtectWish()

    def check(self) -> None:
        """Raise `InvalidValue` for what no plan has."""
        for param, value, known in (("format", self.format, FORMATS), ("demote", self.demote, MOMENTS)):
            if value is not None and value not in known:
                raise InvalidValue(
                    f"'cache.{param}' must be one of {', '.join(known)}, but it is '{shortened(value)}'.",
                    f"cache.{param}",
                )
        for name, number in self.protection.wanted.items():
            check_range(f"cache.protect.{name}", number, PROTECTED)
        if self.max_context is not None:
            check_range("cache.max_context", self.max_context, CONTEXT)
