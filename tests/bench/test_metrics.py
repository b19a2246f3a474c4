"""The definitions, on times that can be added up by hand. Powers of two: the sums are exact."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from surefoot.bench.latencies import Latencies, measure
from surefoot.bench.metrics import Distribution, distribution, percentile, summarise
from surefoot.bench.records import RequestRecord


def record(
    start: float, chunks: list[float], num_tokens: int, scheduled: float | None = None
) -> RequestRecord:
    """A good request sent at `start` whose chunks came at these times of the run; 10 prompt tokens."""
    return RequestRecord(
        index=0,
        start_s=start,
        scheduled_s=scheduled,
        end_s=chunks[-1] - start,
        num_prompt_tokens=10,
        num_output_tokens=num_tokens,
        counted_by_server=True,
        num_chunks=len(chunks),
        latencies=measure(start, chunks, chunks[-1], num_tokens),
    )


def failed(kind: str) -> RequestRecord:
    """A request that failed."""
    return RequestRecord(
        index=0,
        start_s=0.0,
        end_s=100.0,
        num_prompt_tokens=1000,
        num_output_tokens=7,
        num_chunks=7,
        error=kind,
        error_message="no",
    )


def test_a_requests_latencies() -> None:
    """TTFT ends at the first chunk, TPOT spreads the rest over the other tokens, ITL has every gap."""
    assert measure(1.0, [1.5, 1.75, 2.5], 2.5, 3) == Latencies(
        ttft_s=0.5, tpot_s=0.5, itl_s=(0.25, 0.75), e2e_s=1.5
    )


def test_chunks_of_several_tokens() -> None:
    """With 9 tokens in 3 chunks TPOT is per token, while ITL still has the two gaps between chunks."""
    assert measure(0.0, [1.0, 2.0, 3.0], 3.0, 9) == Latencies(
        ttft_s=1.0, tpot_s=0.25, itl_s=(1.0, 1.0), e2e_s=3.0
    )


def test_a_last_token_without_text() -> None:
    """A last token that only the finish reason tells of counts in TPOT and end to end, and is no gap."""
    assert measure(0.0, [1.0, 1.5], 2.0, 3) == Latencies(ttft_s=1.0, tpot_s=0.5, itl_s=(0.5,), e2e_s=2.0)


def test_one_token_has_no_tpot() -> None:
    """TPOT needs two tokens."""
    assert measure(0.0, [1.0], 1.0, 1) == Latencies(ttft_s=1.0, tpot_s=None, itl_s=(), e2e_s=1.0)


def test_percentiles_lie_between_the_nearest_ranks() -> None:
    """Percentiles interpolate in a straight line, like numpy's default."""
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], 50) == 3.0
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], 90) == pytest.approx(4.6)
    assert percentile([1.0, 3.0], 25) == 1.5
    assert percentile([7.0], 99) == 7.0


def test_distributions_pass_over_what_is_missing() -> None:
    """A None is no value, and without values there is no distribution."""
    assert distribution([None, 4.0, 2.0]) == Distribution(
        count=2, mean=3.0, min=2.0, p50=3.0, p90=3.8, p95=3.9, p99=3.98, max=4.0
    )
    assert distribution([None]) is None


def test_rates_are_over_the_time_from_first_sent_to_last_received() -> None:
    """Tokens and requests are divided by the span of the good requests; failed ones count as errors alone."""
    good = [record(1.0, [2.0, 3.0], 2), record(2.0, [3.0, 5.0], 4)]
    summary = summarise([*good, failed("timeout"), failed("http_500"), failed("timeout")])
    assert summary.duration_s == 4.0
    assert summary.requests_per_s == 0.5
    assert summary.output_tokens_per_s == 1.5
    assert summary.total_tokens_per_s == 6.5
    assert summary.mean_concurrency == 1.25
    assert summary.tokens_per_chunk == 1.5
    assert (summary.num_ok, summary.num_failed) == (2, 3)
    assert summary.errors == {"timeout": 2, "http_500": 1}
    assert summary.ttft_s is not None
    assert (summary.ttft_s.count, summary.ttft_s.mean) == (2, 1.0)


def test_tokens_are_those_of_good_requests() -> None:
    """Prompts and answers are counted over good requests; one that was not counted by the server shows."""
    good = [record(0.0, [1.0, 2.0], 2), replace(record(0.0, [1.0, 2.0], 6), counted_by_server=False)]
    summary = summarise([*good, failed("timeout")])
    assert (summary.num_prompt_tokens, summary.num_output_tokens, summary.tokens_per_chunk) == (20, 8, 2.0)
    assert summary.prompt_tokens is not None
    assert summary.output_tokens is not None
    assert (summary.prompt_tokens.count, summary.prompt_tokens.max) == (2, 10)
    assert (summary.output_tokens.count, summary.output_tokens.max) == (2, 6)
    assert not summary.all_counted_by_server
    assert summarise(good[:1]).all_counted_by_server


def test_itl_is_pooled_and_tpot_is_per_request() -> None:
    """ITL's percentiles are over all gaps of all requests, TPOT's over requests."""
    summary = summarise([record(0.0, [1.0, 2.0, 3.0, 4.0], 4), record(0.0, [1.0, 5.0], 2)])
    assert summary.itl_s is not None
    assert summary.tpot_s is not None
    assert (summary.itl_s.count, summary.itl_s.mean, summary.itl_s.max) == (4, 1.75, 4.0)
    assert (summary.tpot_s.count, summary.tpot_s.mean) == (2, 2.5)


def test_goodput_counts_requests_within_all_limits() -> None:
    """A request is good if it keeps every limit given; one without TPOT keeps that of TPOT."""
    records = [record(0.0, [1.0, 1.5], 2), record(0.0, [2.0, 2.5], 2), record(0.0, [1.0, 4.0], 2)]
    summary = summarise([*records, record(0.0, [1.0], 1)], max_ttft_s=1.0, max_tpot_s=0.5)
    assert summary.goodput is not None
    assert summary.goodput.num_good == 2
    assert summary.goodput.fraction_good == 0.5
    assert summary.goodput.requests_per_s == 0.5
    assert summarise(records).goodput is None


def test_how_late_an_open_loop_sent() -> None:
    """Send lag is the time from the planned arrival to the request."""
    summary = summarise([record(1.25, [2.0], 1, scheduled=1.0), record(2.0, [3.0], 1, scheduled=2.0)])
    assert summary.send_lag_s is not None
    assert summary.send_lag_s.max == 0.25


def test_a_run_without_good_requests_has_no_figures() -> None:
    """With errors alone every rate is 0 and there are no latencies."""
    summary = summarise([failed("connect")], max_ttft_s=1.0)
    assert (summary.num_ok, summary.requests_per_s, summary.ttft_s) == (0, 0.0, None)
