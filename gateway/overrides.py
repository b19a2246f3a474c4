"""Plans that operators force on tenants for a while. Kept in memory: a restart forgets them."""

from __future__ import annotations

from msgspec import Struct

from .clock import Clock


class Override(Struct, frozen=True, kw_only=True):
    """What is forced, by whom (the label of an admin key), and for how many seconds from now."""

    plan: str
    by: str
    expires_in_s: float


class Overrides:
    """At most one for each tenant."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends: dict[str, tuple[Override, float]] = {}

    def set(self, tenant_id: str, override: Override) -> None:
        """Force a plan from now on, in place of the one before."""
        self._ends[tenant_id] = (override, self._clock.monotonic() + override.expires_in_s)

    def clear(self, tenant_id: str) -> bool:
        """Force nothing; says whether something was forced."""
        was_forced = self.get(tenant_id) is not None
        self._ends.pop(tenant_id, None)
        return was_forced

    def get(self, tenant_id: str) -> Override | None:
        """What is forced now, with the seconds that are left of it."""
        found = self._ends.get(tenant_id)
        if found is None:
            return None
        override, ends = found
        left_s = ends - self._clock.monotonic()
        if left_s <= 0:
            del self._ends[tenant_id]
            return None
        return Override(plan=override.plan, by=override.by, expires_in_s=left_s)
