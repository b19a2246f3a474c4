"""A run's figures from its records. Definitions: docs/benchmarking.md."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct

from .latencies import Latencies
from .records import RequestRecord


class Distribution(Struct, frozen=True, kw_only=True):
    """Count, mean, extremes and percentiles."""

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Goodput(Struct, frozen=True, kw_only=True):
    """Good requests that kept the limits; a limit of None is none."""

    max_ttft_s: float | None
    max_tpot_s: float | None
    num_good: int
    fraction_good: float
    requests_per_s: float


class Summary(Struct, frozen=True, kw_only=True):
    """The run's figures. Latencies in seconds, None where no request gave one.

    `duration_s` reaches from the first request sent to the last token received, over the good requests, and
    is what rates are divided by.
    """

    num_ok: int
    num_failed: int
    errors: dict[str, int]
    duration_s: float
    mean_concurrency: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    all_counted_by_server: bool
    tokens_per_chunk: float
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    itl_s: Distribution | None
    e2e_s: Distribution | None
    prompt_tokens: Distribution | None
    output_tokens: Distribution | None
    send_lag_s: Distribution | None
    goodput: Goodput | None


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Between the two nearest ranks in a straight line, as numpy does unless told otherwise."""
    rank = (len(ordered) - 1) * percent / 100
    low, high = math.floor(rank), math.ceil(rank)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """Of the values that are there; None if none is."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    return Distribution(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        min=ordered[0],
        p50=percentile(ordered, 50),
        p90=percentile(ordered, 90),
        p95=percentile(ordered, 95),
        p99=percentile(ordered, 99),
        max=ordered[-1],
    )


def summarise(
    records: Sequence[RequestRecord], max_ttft_s: float | None = None, max_tpot_s: float | None = None
) -> Summary:
    """The figures of a run. Failed requests count as errors and nowhere else."""
    good = [(record, record.latencies) for record in records if record.latencies is not None]
    seconds = _duration(good)
    num_prompt = sum(record.num_prompt_tokens or 0 for record, _ in good)
    num_output = sum(record.num_output_tokens for record, _ in good)
    num_chunks = sum(record.num_chunks for record, _ in good)
    return Summary(
        num_ok=len(good),
        num_failed=len(records) - len(good),
        errors=dict(Counter(record.error for record in records if record.error is not None)),
        duration_s=seconds,
        mean_concurrency=_rate(math.fsum(latencies.e2e_s for _, latencies in good), seconds),
        requests_per_s=_rate(len(good), seconds),
        output_tokens_per_s=_rate(num_output, seconds),
        total_tokens_per_s=_rate(num_prompt + num_output, seconds),
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        all_counted_by_server=all(record.counted_by_server for record, _ in good),
        tokens_per_chunk=_rate(num_output, num_chunks),
        ttft_s=distribution(latencies.ttft_s for _, latencies in good),
        tpot_s=distribution(latencies.tpot_s for _, latencies in good),
        itl_s=distribution(gap for _, latencies in good for gap in latencies.itl_s),
        e2e_s=distribution(latencies.e2e_s for _, latencies in good),
        prompt_tokens=distribution(record.num_prompt_tokens for record, _ in good),
        output_tokens=distribution(record.num_output_tokens for record, _ in good),
        send_lag_s=distribution(
            record.start_s - record.scheduled_s for record in records if record.scheduled_s is not None
        ),
        goodput=_goodput([latencies for _, latencies in good], max_ttft_s, max_tpot_s, seconds),
    )


def _duration(good: Sequence[tuple[RequestRecord, Latencies]]) -> float:
    if not good:
        return 0.0
    first = min(record.start_s for record, _ in good)
    return max(record.start_s + latencies.e2e_s for record, latencies in good) - first


def _goodput(
    good: Sequence[Latencies], max_ttft_s: float | None, max_tpot_s: float | None, seconds: float
) -> Goodput | None:
    if max_ttft_s is None and max_tpot_s is None:
        return None
    num_good = sum(
        _within(latencies.ttft_s, max_ttft_s) and _within(latencies.tpot_s, max_tpot_s) for latencies in good
    )
    return Goodput(
        max_ttft_s=max_ttft_s,
        max_tpot_s=max_tpot_s,
        num_good=num_good,
        fraction_good=_rate(num_good, len(good)),
        requests_per_s=_rate(num_good, seconds),
    )


def _within(value: float | None, limit: float | None) -> bool:
    return value is None or limit is None or value <= limit


def _rate(amount: float, per: float) -> float:
    return amount / per if per else 0.0
