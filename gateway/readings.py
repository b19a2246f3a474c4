"""Metrics that are read off the backends' stats at each scrape, one sample a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from surefoot.backends.types import BackendStats

MODEL = ("model_name",)

Stats = Sequence[tuple[str, BackendStats]]
"""Each model that is known, with its backend's stats."""


class Reading(Struct, frozen=True):
    """A metric, and how it is read."""

    name: str
    text: str
    read: Callable[[BackendStats], float]


def families(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily], readings: Sequence[Reading], stats: Stats
) -> Iterator[Metric]:
    """One for each reading."""
    for reading in readings:
        family = kind(reading.name, reading.text, labels=MODEL)
        for model, each in stats:
            family.add_metric([model], reading.read(each))
        yield family
