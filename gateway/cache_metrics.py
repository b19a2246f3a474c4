"""Metrics of cache formats: what requests hold in each, by tenant and in all, and what was demoted.

Labels come from the operator's files and from the formats, so there are as many as those.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from surefoot.backends.types import FormatTotal
from surefoot.policies.bounds import FORMATS, MIXED

from .readings import MODEL, Stats
from .record import RequestRecord

STORED = tuple(each for each in FORMATS if each != MIXED)
QUANTISED = STORED[1:]
HELD = (*MODEL, "tenant", "format")
IN_ALL = (*MODEL, "format")


def cache_metrics(stats: Stats) -> Iterator[Metric]:
    """All that are read off the backends' stats."""
    yield from _held(stats)
    yield from _in_all(stats)
    yield _demoted(stats)


def _held(stats: Stats) -> Iterator[Metric]:
    tokens = GaugeMetricFamily("surefoot_format_tokens", "Tokens held, by cache format.", labels=HELD)
    blocks = GaugeMetricFamily("surefoot_format_blocks", "Blocks held, by cache format.", labels=HELD)
    size = GaugeMetricFamily("surefoot_format_bytes", "Bytes of these blocks.", labels=HELD)
    for model, each in stats:
        for held in each.formats:
            labels = [model, held.flow, held.format]
            tokens.add_metric(labels, held.num_tokens)
            blocks.add_metric(labels, held.num_blocks)
            size.add_metric(labels, held.num_blocks * each.block_bytes)
    yield from (tokens, blocks, size)


def _in_all(stats: Stats) -> Iterator[Metric]:
    """Of each format, of one that nobody uses too."""
    tokens = GaugeMetricFamily("surefoot_cache_tokens", "Tokens held, shared ones once.", labels=IN_ALL)
    size = GaugeMetricFamily("surefoot_cache_bytes", "Bytes of blocks, shared ones once.", labels=IN_ALL)
    empty = GaugeMetricFamily("surefoot_cache_fragmentation", "Share of room unused.", labels=IN_ALL)
    for model, each in stats:
        used = {total.format: total for total in each.format_totals}
        for name in STORED:
            total = used.get(name, FormatTotal(format=name))
            tokens.add_metric([model, name], total.num_tokens)
            size.add_metric([model, name], total.num_blocks * each.block_bytes)
            empty.add_metric([model, name], total.fragmentation)
    yield from (tokens, size, empty)


def _demoted(stats: Stats) -> Metric:
    """From the start, at 0, so that a rate has a beginning."""
    family = CounterMetricFamily("surefoot_demoted_tokens", "Tokens that lost bits.", labels=IN_ALL)
    for model, each in stats:
        for name in QUANTISED:
            family.add_metric([model, name], each.demoted_tokens_total.get(name, 0))
    return family


class EndedCacheMetrics:
    """Counts how the tokens of requests lay when these ended, of plans with a quantised format."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tokens = Counter(
            "surefoot_ended_format_tokens",
            "Tokens of requests that finished, by the format that they ended in.",
            ("tenant", "format"),
            registry=registry,
        )
        self._demoted = Counter(
            "surefoot_ended_demoted_tokens",
            "Tokens of requests that finished that lost bits.",
            ("tenant",),
            registry=registry,
        )

    def observe(self, record: RequestRecord) -> None:
        """Count a request that is over."""
        if record.cache is None:
            return
        tenant = record.tenant_id or ""
        for name, num_tokens in record.cache.tokens.items():
            self._tokens.labels(tenant, name).inc(num_tokens)
        self._demoted.labels(tenant).inc(record.cache.num_demoted_tokens)
