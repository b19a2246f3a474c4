"""What another policy would have done with recorded observations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from .base import Decision, Observation, Policy


class RecordError(ValueError):
    """A line of a log cannot be used; the message has its number."""


class Recorded(Struct, frozen=True):
    """One line: what was observed, and the plan that was served, None where the line does not say."""

    observation: Observation
    plan: str | None


class Replay(Struct, frozen=True):
    """How many requests there were, and those that would have had another plan, by (before, after)."""

    num_requests: int
    changes: dict[tuple[str, str], int]
    reasons: dict[tuple[str, str], str]
    """Of the first request of each change."""


def read_records(lines: Iterable[bytes]) -> Iterator[Recorded]:
    """Observations of a log, in JSON lines: events `request.planned`, or observations as they are.

    Other events are passed over, and so are lines that begin no object: what a server tells people at its
    start stands in the same stream. Raises `RecordError`.
    """
    for number, line in enumerate(lines, 1):
        if not line.startswith(b"{"):
            continue
        try:
            event = msgspec.json.decode(line, type=dict[str, Any])
            raw = event if "tenant_id" in event else event.get("observation")
            if raw is not None:
                yield Recorded(msgspec.convert(raw, Observation), event.get("plan"))
        except msgspec.MsgspecError as error:
            raise RecordError(f"line {number}: {error}") from error


def replay(records: Iterable[Recorded], serving: Policy, other: str | None) -> Replay:
    """Ask `serving` again with the policy named `other` (None: with each tenant's own, as it is now)."""
    num_requests = 0
    changes: Counter[tuple[str, str]] = Counter()
    reasons: dict[tuple[str, str], str] = {}
    for each in records:
        num_requests += 1
        before, after = _before(each, serving), _after(each, serving, other)
        if before != after.plan.name:
            changes[before, after.plan.name] += 1
            reasons.setdefault((before, after.plan.name), after.reason)
    return Replay(num_requests, dict(changes.most_common()), reasons)


def _before(each: Recorded, serving: Policy) -> str:
    return each.plan or serving.decide(each.observation).plan.name


def _after(each: Recorded, serving: Policy, other: str | None) -> Decision:
    return serving.decide(replace(each.observation, policy=other or each.observation.policy))
