"""What `/metrics` says.

Names are vLLM's (`vllm:`, with its label `model_name`) where vLLM has the metric, since people own dashboards
for those; the rest starts with `surefoot_`. Each server has its own registry.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from surefoot.backends.base import Backend
from surefoot.backends.types import BackendState, BackendStats, Chunk, PromptEcho

from .buckets import LAG_BUCKETS, NUM_TOKENS_BUCKETS, REQUEST_BUCKETS, TOKEN_BUCKETS, WAIT_BUCKETS
from .cache_metrics import EndedCacheMetrics, cache_metrics
from .promise_metrics import PromiseMetrics
from .readings import MODEL, Reading, families
from .record import RequestRecord
from .speculation_metrics import speculation_metrics

# Litestar adds the charset itself.
CONTENT_TYPE = CONTENT_TYPE_LATEST.partition("; charset")[0]


GAUGES = (
    Reading("vllm:num_requests_running", "Requests that are being computed.", lambda s: s.num_running),
    Reading("vllm:num_requests_waiting", "Requests that wait for their first step.", lambda s: s.num_waiting),
    Reading("vllm:kv_cache_usage_perc", "Share of the cache's blocks in use; 1 is all.", lambda s: _usage(s)),
    Reading("surefoot_cache_blocks", "Blocks that the cache has.", lambda s: s.num_blocks),
    Reading("surefoot_cache_blocks_used", "Blocks that requests hold.", lambda s: s.num_blocks_used),
    Reading("surefoot_cache_blocks_free", "Blocks that nobody holds.", lambda s: _num_free(s)),
    Reading("surefoot_cache_blocks_cached", "Free blocks with a prefix.", lambda s: s.num_blocks_cached),
    Reading("surefoot_cache_block_bytes", "Bytes of a block, in any format.", lambda s: s.block_bytes),
    Reading("surefoot_step_sequences", "Sequences of the last step.", lambda s: s.last_step_sequences),
    Reading("surefoot_step_tokens", "Tokens of the last step.", lambda s: s.last_step_tokens),
)
COUNTERS = (
    Reading("vllm:prompt_tokens", "Prompt tokens of requests.", lambda s: s.prompt_tokens_total),
    Reading("vllm:generation_tokens", "Output tokens.", lambda s: s.output_tokens_total),
    Reading("vllm:num_preemptions", "Requests put back for want of blocks.", lambda s: s.preemptions_total),
    Reading("vllm:prefix_cache_queries", "Tokens looked up.", lambda s: s.prefix_cache_queries_total),
    Reading("vllm:prefix_cache_hits", "Tokens found in the cache.", lambda s: s.prefix_cache_hits_total),
    Reading(
        "surefoot_prefix_cache_evictions",
        "Cached blocks given to other tokens.",
        lambda s: s.prefix_cache_evictions_total,
    ),
    Reading("surefoot_engine_steps", "Steps of the engine.", lambda s: s.steps_total),
    Reading("surefoot_batched_sequences", "Sequences, over all steps.", lambda s: s.step_sequences_total),
    Reading("surefoot_batched_tokens", "Tokens that steps ran.", lambda s: s.step_tokens_total),
    Reading("surefoot_batched_tokens_budget", "Tokens that steps allowed.", lambda s: s.step_budget_total),
    Reading("surefoot_step_predicted_seconds", "Predicted steps.", lambda s: s.step_predicted_s_total),
    Reading("surefoot_step_seconds", "Seconds in steps.", lambda s: s.step_measured_s_total),
    Reading("surefoot_engine_restarts", "Restarts of a failed engine.", lambda s: s.engine_restarts_total),
)


class Metrics:
    """All metrics of one server."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(BackendCollector(backends))
        registry.register(LoopCollector())

        def histogram(
            name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = MODEL
        ) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=registry)

        self._ttft = histogram("vllm:time_to_first_token_seconds", "Until the first token.", WAIT_BUCKETS)
        self._gaps = GapCollector("vllm:inter_token_latency_seconds", "Between pieces of output.")
        registry.register(self._gaps)
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds",
            "A request's mean per token after the first.",
            TOKEN_BUCKETS,
        )
        self._queue = histogram("vllm:request_queue_time_seconds", "Until the first step.", WAIT_BUCKETS)
        self._prefill = histogram(
            "vllm:request_prefill_time_seconds", "From the first step to the first token.", WAIT_BUCKETS
        )
        self._decode = histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last.", REQUEST_BUCKETS
        )
        self._num_prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens.", NUM_TOKENS_BUCKETS)
        self._num_output = histogram("vllm:request_generation_tokens", "Output tokens.", NUM_TOKENS_BUCKETS)
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Whole request.", REQUEST_BUCKETS)
        self._lag = histogram(
            "surefoot_event_loop_lag_seconds", "How late the event loop is.", LAG_BUCKETS, ()
        )
        self._success = Counter(
            "vllm:request_success",
            "Choices that ended, by reason.",
            (*MODEL, "finished_reason"),
            registry=registry,
        )
        self._promises = PromiseMetrics(registry)
        self._ended_cache = EndedCacheMetrics(registry)
        self._requests = Counter(
            "surefoot_requests", "HTTP requests.", ("tenant", "route", "method", "status"), registry=registry
        )

    def render(self) -> bytes:
        """Everything in Prometheus's text format (`CONTENT_TYPE`)."""
        return generate_latest(self._registry)

    def register(self, collector: Collector) -> None:
        """Add metrics that somebody else keeps."""
        self._registry.register(collector)

    def gap_meter(self, model: str) -> GapMeter:
        """Something that measures the time between pieces of output of one request."""
        return GapMeter(self._gaps.gaps(model))

    def observe_lag(self, seconds: float) -> None:
        """Note how late the event loop woke up."""
        self._lag.observe(seconds)

    def observe_request(self, record: RequestRecord) -> None:
        """Count a request that is over."""
        # Routes and methods that do not exist are the client's invention: one label for all of them.
        known = record.route is not None
        labels = (record.tenant_id or "", record.route or "unknown", record.method if known else "unknown")
        self._requests.labels(*labels, str(record.status)).inc()
        self._promises.observe(record)
        self._ended_cache.observe(record)
        if record.model is None or not record.started:
            return
        for reason in record.end_reasons:
            self._success.labels(record.model, reason).inc()
        self._e2e.labels(record.model).observe(record.elapsed_s)
        self._num_prompt.labels(record.model).observe(record.num_prompt_tokens)
        self._num_output.labels(record.model).observe(record.num_output_tokens)
        for each in record.timings:
            self._queue.labels(record.model).observe(each.queue_s)
            if each.ttft_s is not None:
                self._ttft.labels(record.model).observe(each.ttft_s)
                self._prefill.labels(record.model).observe(each.ttft_s - each.queue_s)
                self._decode.labels(record.model).observe(each.total_s - each.ttft_s)
            if each.tpot_s is not None:
                self._tpot.labels(record.model).observe(each.tpot_s)


class Gaps:
    """Seconds between pieces of output, counted in `TOKEN_BUCKETS`.

    Observed for every token, and always on the event loop: without the locks of prometheus_client, and with
    a search where that walks through the buckets, an observation costs a tenth.
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(TOKEN_BUCKETS) + 1)
        self.sum_s = 0.0

    def observe(self, gap_s: float) -> None:
        """Count one."""
        self._counts[bisect_left(TOKEN_BUCKETS, gap_s)] += 1
        self.sum_s += gap_s

    def buckets(self) -> list[tuple[str, float]]:
        """Each bound, as Prometheus writes it, with the number of gaps up to it."""
        bounds = [*(str(float(bound)) for bound in TOKEN_BUCKETS), "+Inf"]
        return list(zip(bounds, accumulate(self._counts), strict=True))


class GapMeter:
    """Observes the time between one chunk of a choice and the next."""

    def __init__(self, gaps: Gaps) -> None:
        self._gaps = gaps
        self._last_s: dict[tuple[int, int], float] = {}

    def observe(self, prompt: int, event: PromptEcho | Chunk) -> None:
        """Call when the event comes in; an echo is not output, nor is the bare end of a choice."""
        if isinstance(event, PromptEcho) or not event.token_ids:
            return
        now, key = time.perf_counter(), (prompt, event.index)
        if (last := self._last_s.get(key)) is not None:
            self._gaps.observe(now - last)
        self._last_s[key] = now


class GapCollector(Collector):
    """The gaps of every model as one histogram."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self._gaps: dict[str, Gaps] = {}

    def gaps(self, model: str) -> Gaps:
        """Those of one model."""
        return self._gaps.setdefault(model, Gaps())

    def collect(self) -> Iterator[Metric]:
        """One family, one histogram per model."""
        family = HistogramMetricFamily(self._name, self._text, labels=MODEL)
        for model, gaps in self._gaps.items():
            family.add_metric([model], gaps.buckets(), gaps.sum_s)
        yield family


class BackendCollector(Collector):
    """Turns the backends' stats into metrics at each scrape."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = backends

    def collect(self) -> Iterator[Metric]:
        """Of each backend that knows its model."""
        known = [backend for backend in self._backends if backend.models]
        stats = [(backend.models[0].id, backend.stats) for backend in known]
        yield from families(GaugeMetricFamily, GAUGES, stats)
        yield from families(CounterMetricFamily, COUNTERS, stats)
        yield from speculation_metrics(stats)
        yield from cache_metrics(stats)
        ready = GaugeMetricFamily("surefoot_backend_ready", "1 while requests can be taken.", labels=MODEL)
        for backend in known:
            ready.add_metric([backend.models[0].id], backend.status.state is BackendState.READY)
        yield ready
        refused = CounterMetricFamily(
            "surefoot_engine_refusals", "Requests that were not let in, by reason.", labels=(*MODEL, "reason")
        )
        for model, each in stats:
            for reason, count in each.refusals_total.items():
                refused.add_metric([model, reason], count)
        yield refused


class LoopCollector(Collector):
    """What the event loop has cost. A scrape is answered on the event loop, so this thread is its thread."""

    def collect(self) -> Iterator[Metric]:
        """One counter."""
        yield CounterMetricFamily(
            "surefoot_event_loop_cpu_seconds",
            "CPU time of the event loop's thread.",
            value=time.thread_time(),
        )


def _num_free(stats: BackendStats) -> int:
    return stats.num_blocks - stats.num_blocks_used


def _usage(stats: BackendStats) -> float:
    return stats.num_blocks_used / stats.num_blocks if stats.num_blocks else 0.0
