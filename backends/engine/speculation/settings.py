"""What speculation is started with."""

from __future__ import annotations

from msgspec import Struct


class SpeculationSettings(Struct, frozen=True, kw_only=True):
    """Of a whole engine; what a request may have is in its plan.

    `max_draft` bounds every plan's. `probe_share` is the share of time that may be spent on drafts that are
    not expected to pay, so that it is noticed when they would. `synthetic_acceptance`, for benchmarks
    alone, accepts position j of a draft with probability `synthetic_acceptance[j]`, whatever the model says.
    """

    max_draft: int = 16
    probe_share: float = 0.005
    synthetic_acceptance: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.max_draft <= 64:
            raise ValueError(f"max_draft must be between 0 and 64, got {self.max_draft}")
        if not 0 <= self.probe_share <= 0.1:
            raise ValueError(f"probe_share must be between 0 and 0.1, got {self.probe_share}")
        for rate in self.synthetic_acceptance or ():
            if not 0 <= rate <= 1:
                raise ValueError(f"a synthetic acceptance must be between 0 and 1, got {rate}")
