"""What an engine is started with."""

from __future__ import annotations

from msgspec import Struct

from .speculation.settings import SpeculationSettings


class EngineSettings(Struct, frozen=True, kw_only=True):
    """Limits of one engine. Checked when built; a bad value raises `ValueError` with the value and the limit.

    `cache_bytes` may be None on a GPU: what a profiling pass leaves; `max_model_len` bounds prompt and output
    of a sequence (None: what the model takes; the whole cache bounds it too); `max_batched_tokens` is a
    step's token budget; `max_prefill_chunk` bounds one sequence's share of it (None: the whole budget);
    `max_waiting` bounds requests that wait beyond `max_sequences`, and `max_waiting_s` the predicted seconds
    of what waits, each counted per priority with what goes before it; `headroom` is the share of sequences
    and blocks that is kept for the higher priorities; with `prefix_cache` requests share the blocks of a
    common beginning; `watchdog_s` is how long one step may take before the engine counts as hung.
    """

    cache_bytes: int | None
    max_model_len: int | None = None
    max_sequences: int = 64
    max_batched_tokens: int = 512
    max_prefill_chunk: int | None = None
    max_waiting: int = 1024
    prefix_cache: bool = True
    max_waiting_s: float = 600.0
    headroom: float = 0.1
    speculation: SpeculationSettings = SpeculationSettings()
    watchdog_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("cache_bytes", "max_sequences", "max_batched_tokens", "max_waiting_s", "watchdog_s"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        if not 0 <= self.headroom < 1:
            raise ValueError(f"headroom is a share, 0 or more and below 1, got {self.headroom}")
        if self.max_batched_tokens < self.max_sequences:
            raise ValueError(
                f"max_batched_tokens ({self.max_batched_tokens}) must be at least max_sequences"
                f" ({self.max_sequences}): each running sequence decodes one token a step"
            )
        for name in ("max_model_len", "max_prefill_chunk"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, got {value}")
