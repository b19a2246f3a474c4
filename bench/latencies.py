"""What one request's arrival times mean. The definitions, and whose they are: docs/benchmarking.md."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct


class Latencies(Struct, frozen=True, kw_only=True):
    """Seconds. `itl_s` has one gap fewer than there were chunks; `tpot_s` is None below two tokens."""

    ttft_s: float
    tpot_s: float | None
    itl_s: tuple[float, ...]
    e2e_s: float


def measure(start: float, chunks: Sequence[float], last: float, num_output_tokens: int) -> Latencies:
    """From the time a request was sent, the times its chunks of text came, and the time of its last token.

    `last` is at or after the last chunk: the event with the finish reason, which servers send with the last
    token, also when that token has no text.
    """
    first = chunks[0]
    return Latencies(
        ttft_s=first - start,
        tpot_s=(last - first) / (num_output_tokens - 1) if num_output_tokens > 1 else None,
        itl_s=tuple(later - earlier for earlier, later in pairwise(chunks)),
        e2e_s=last - start,
    )
