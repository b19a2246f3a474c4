"""Metrics of cache formats: what requests hold in each, by tenant, and what was demoted.

Labels come from the operator's files and from the formats, so there are as many as those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from surefoot.backends.base import Backend
from surefoot.backends.types import BackendStats
from surefoot.policies.bounds import FORMATS, MIXED

QUANTISED = tuple(each for each in FORMATS[1:] if each != MIXED)
HELD = ("model_name", "tenant", "format")
DEMOTED = ("model_name", "format")

Stats = Sequence[tuple[str, BackendStats]]


class CacheCollector(Collector):
    """Turns the backends' stats of formats into metrics at each scrape."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = backends

    def collect(self) -> Iterator[Metric]:
        """For each backend that knows its model."""
        stats = [(each.models[0].id, each.stats) for each in self._backends if each.models]
        yield from _held(stats)
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


def _demoted(stats: Stats) -> Metric:
    """From the start, at 0, so that a rate has a beginning."""
    family = CounterMetricFamily("surefoot_demoted_tokens", "Tokens that lost bits.", labels=DEMOTED)
    for model, each in stats:
        for name in QUANTISED:
            family.add_metric([model, name], each.demoted_tokens_total.get(name, 0))
    return family
