"""Metrics of what was promised and what was kept, by tenant and SLA class.

The labels' values come from the operator's files alone, so there are as many as those have.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from .buckets import TOKEN_BUCKETS, WAIT_BUCKETS
from .record import RequestRecord

LABELS = ("tenant", "class")


class PromiseMetrics:
    """Counts requests that got as far as having a class."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def seconds(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, LABELS, buckets=buckets, registry=registry)

        def count(name: str, text: str, labels: tuple[str, ...] = LABELS) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self._queue = seconds("surefoot_queue_time_seconds", "Until the first step.", WAIT_BUCKETS)
        self._ttft = seconds("surefoot_time_to_first_token_seconds", "Until the first token.", WAIT_BUCKETS)
        self._tpot = seconds(
            "surefoot_time_per_output_token_seconds", "Mean per token after the first.", TOKEN_BUCKETS
        )
        self._promised = count("surefoot_requests_with_target", "Requests of classes that have targets.")
        self._kept = count("surefoot_requests_within_target", "Those whose targets were all met.")
        self._prompt = count("surefoot_prompt_tokens", "Prompt tokens of requests that finished.")
        self._cached = count("surefoot_cached_tokens", "Of those, tokens that were in the prefix cache.")
        self._preemptions = count("surefoot_preemptions", "Times that a request was put back.")
        self._refusals = count(
            "surefoot_refusals", "Good requests that were not taken, by reason.", (*LABELS, "reason")
        )

    def observe(self, record: RequestRecord) -> None:
        """Count a request that is over."""
        if record.promise is None:
            return
        labels = (record.tenant_id or "", record.promise.name)
        if record.refusal is not None:
            self._refusals.labels(*labels, record.refusal).inc()
        if record.within_target is not None:
            self._promised.labels(*labels).inc()
            self._kept.labels(*labels).inc(record.within_target)
        if record.started:
            self._preemptions.labels(*labels).inc(record.num_preemptions)
        if record.timings:
            self._prompt.labels(*labels).inc(record.num_prompt_tokens)
            self._cached.labels(*labels).inc(record.num_cached_tokens)
        for each in record.timings:
            self._queue.labels(*labels).observe(each.queue_s)
            if each.ttft_s is not None:
                self._ttft.labels(*labels).observe(each.ttft_s)
            if each.tpot_s is not None:
                self._tpot.labels(*labels).observe(each.tpot_s)
