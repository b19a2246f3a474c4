"""What is kept of each request."""

from __future__ import annotations

from msgspec import Struct

from .latencies import Latencies


class RequestRecord(Struct, frozen=True, kw_only=True):
    """One request of the run, times in seconds.

    `start_s` and `scheduled_s` (when an open loop wanted to send it) count from the run's start, the others
    from `start_s`.

    `error` is None for a good request; else it is what
    errors are counted by, `error_message` says more, and the request is in no latency or throughput.
    `latencies` is None for a request that failed.
    """

    index: int
    start_s: float
    scheduled_s: float | None = None
    end_s: float
    num_prompt_tokens: int | None = None
    num_output_tokens: int = 0
    counted_by_server: bool = False
    num_chunks: int = 0
    finish_reason: str | None = None
    error: str | None = None
    error_message: str | None = None
    latencies: Latencies | None = None
