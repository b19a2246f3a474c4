"""What speculation is started with."""

from __future__ import annotations

from msgspec import Struct


class SpeculationSettings(Struct, frozen=True, kw_only=True):
    """Of a whole engine; what a request may have is in its plan.

    `max_draft` bounds every plan's. `probe_share` is the share of time that may be spent on drafts that are
    not expected to pay, so that it is noticed when they would. A row of a draft has to be expected to bring
    `min_gain` more than it costs (0.03 is 3 %): both are estimates, and the best of several estimates is
    mostly one that errs upwards. `synthetic_acceptance`, for benchmarks alone, accepts position j of a draft
    with probability `synthetic_acceptance[j]`, whatever the model says.
    A draft model's cache has `draft_cache_bytes` (None: as many tokens as the served model's), and it catches
    up with at most `max_catch_up` tokens a step.
    """

    max_draft: int = 16
    probe_share: float = 0.005
    min_gain: float = 0.03
    synthetic_acceptance: tuple[float, ...] | None = None
    draft_cache_bytes: int | None = None
    max_catch_up: int = 64

    def __post_init__(self) -> None:
        if not 0 <= self.max_draft <= 64:
            raise ValueError(f"max_draft must be between 0 and 64, got {self.max_draft}")
        if not 0 <= self.probe_share <= 0.1:
            raise ValueError(f"probe_share must be between 0 and 0.1, got {self.probe_share}")
        if not 0 <= self.min_gain <= 1:
            raise ValueError(f"min_gain must be between 0 and 1, got {self.min_gain}")
        for rate in self.synthetic_acceptance or ():
            if not 0 <= rate <= 1:
                raise ValueError(f"a synthetic acceptance must be between 0 and 1, got {rate}")
        for name in ("draft_cache_bytes", "max_catch_up"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, got {value}")
