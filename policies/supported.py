"""What the engine of this version does: the one place to extend when it learns more."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from .bounds import FORMATS, CacheBounds, PlanBounds, Protection, SpeculationBounds


class Supported(Struct, frozen=True, kw_only=True):
    """Proposers and cache formats that are served, and the other keys of `[cache]` that have an effect."""

    proposers: tuple[str, ...]
    formats: tuple[str, ...]
    cache_keys: tuple[str, ...]


SUPPORTED = Supported(
    # `draft` makes drafts where a draft model is loaded, and is not asked elsewhere.
    proposers=("ngram", "suffix", "prediction", "draft"),
    formats=FORMATS,
    cache_keys=("demote", "max_context", "protect.sinks", "protect.recent"),
)


NOT_TO_COME = {
    "cache.protect.important": "bits were not found to do more for tokens that are attended to most than"
    " for the latest; leave the key out, and see 'cache.protect.recent' and the format 'mixed'",
}
"""Keys that no version is expected to serve, and why."""


class Unserved(Struct, frozen=True):
    """A key of a tenant's file whose value asks for what is not served yet."""

    key: str
    message: str


def unserved(bounds: PlanBounds, supported: Supported = SUPPORTED) -> Iterator[Unserved]:
    """Every value of the bounds that this version would have to ignore."""
    yield from _unserved_drafts(bounds.speculation, supported)
    if bounds.cache.format not in supported.formats:
        yield _refusal("cache.format", bounds.cache.format, supported.formats)
    for key, value in _given(bounds.cache).items():
        if key not in supported.cache_keys:
            yield _refusal(f"cache.{key}", value, ())


def _unserved_drafts(speculation: SpeculationBounds, supported: Supported) -> Iterator[Unserved]:
    if speculation.ceiling and not supported.proposers:
        yield _refusal("speculation.max_draft", speculation.max_draft, ("0",))
    elif speculation.ceiling:
        for name in speculation.proposers:
            if name not in supported.proposers:
                yield _refusal("speculation.proposers", name, supported.proposers)


def _given(cache: CacheBounds) -> dict[str, object]:
    values = {"demote": cache.demote, "max_context": cache.max_context} | {
        f"protect.{name}": getattr(cache.protect, name) for name in Protection.__struct_fields__
    }
    return {key: value for key, value in values.items() if value is not None}


def _refusal(key: str, value: object, served: tuple[str, ...]) -> Unserved:
    if key in NOT_TO_COME:
        return Unserved(key, f"'{key}' = {value} is not served: {NOT_TO_COME[key]}")
    instead = f"only {' or '.join(served)} is" if served else "leave the key out"
    return Unserved(key, f"'{key}' = {value} is not served yet by this version; {instead}")
