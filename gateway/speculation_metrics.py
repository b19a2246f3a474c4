"""Metrics of drafts: vLLM's, by position, and ours, by tenant and proposer.

vLLM has no such series on a server without speculation; here they are there from the start, at 0. Labels come
from the operator's files and from the proposers' names, so there are as many as those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest

from msgspec import Struct
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from surefoot.backends.types import DraftStats

from .readings import MODEL, Reading, Stats, families

SOURCE = (*MODEL, "tenant", "proposer")
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


class DraftReading(Struct, frozen=True):
    """A count of drafts: under vLLM's name for a model, under ours for a tenant and proposer."""

    name: str
    text: str
    read: Callable[[DraftStats], int]


DRAFTS = (
    DraftReading("drafts", "Drafts that were verified.", lambda d: d.num_drafts),
    DraftReading("draft_tokens", "Tokens of drafts.", lambda d: d.num_draft_tokens),
    DraftReading("accepted_tokens", "Draft tokens that were accepted.", lambda d: d.num_accepted_tokens),
)
COUNTERS = (
    Reading("surefoot_drafting_seconds", "Seconds in drafting.", lambda s: s.speculation.drafting_s_total),
    Reading("surefoot_drafted_steps", "Steps that verified drafts.", lambda s: s.speculation.steps_total),
    Reading("surefoot_drafted_step_seconds", "Seconds in them.", lambda s: s.speculation.step_s_total),
    Reading(
        "surefoot_drafted_step_plain_seconds",
        "Seconds that they would have taken without drafts, by prediction.",
        lambda s: s.speculation.plain_s_total,
    ),
    Reading(
        "surefoot_drafted_step_tokens",
        "Tokens that they gave.",
        lambda s: s.speculation.realised_tokens_total,
    ),
    Reading(
        "surefoot_drafted_step_expected_tokens",
        "Tokens that they were expected to give.",
        lambda s: s.speculation.expected_tokens_total,
    ),
    Reading(
        "surefoot_drafted_step_plain_tokens",
        "Tokens that they would have given without drafts.",
        lambda s: s.speculation.plain_tokens_total,
    ),
)
GAUGES = (
    Reading(
        "surefoot_speculation_expected_gain",
        "Tokens per second that drafts were expected to add since the start; 0.1 is 10 %.",
        lambda s: s.speculation.expected_gain,
    ),
    Reading(
        "surefoot_speculation_realised_gain",
        "Tokens per second that drafts added since the start; 0.1 is 10 %.",
        lambda s: s.speculation.realised_gain,
    ),
    Reading(
        "surefoot_synthetic_acceptance",
        "1 where acceptance is made up for a benchmark.",
        lambda s: float(s.speculation.is_synthetic),
    ),
)


def speculation_metrics(stats: Stats) -> Iterator[Metric]:
    """All of them."""
    yield from _by_model(stats)
    yield from _by_source(stats)
    yield from families(CounterMetricFamily, COUNTERS, stats)
    yield from families(GaugeMetricFamily, GAUGES, stats)


def _by_model(stats: Stats) -> Iterator[Metric]:
    """vLLM's."""
    for reading in DRAFTS:
        family = CounterMetricFamily(f"vllm:spec_decode_num_{reading.name}", reading.text, labels=MODEL)
        for model, each in stats:
            family.add_metric([model], sum(map(reading.read, each.speculation.drafts)))
        yield family
    family = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted draft tokens, by their position in the draft.",
        labels=(*MODEL, "position"),
    )
    for model, each in stats:
        for position, count in enumerate(_sums(drafts.accepted_at for drafts in each.speculation.drafts)):
            family.add_metric([model, str(position)], count)
    yield family


def _by_source(stats: Stats) -> Iterator[Metric]:
    """Ours, and how long the drafts were."""
    for reading in DRAFTS:
        counter = CounterMetricFamily(f"surefoot_{reading.name}", reading.text, labels=SOURCE)
        for model, each in stats:
            for drafts in each.speculation.drafts:
                counter.add_metric([model, drafts.flow, drafts.proposer], reading.read(drafts))
        yield counter
    lengths = HistogramMetricFamily("surefoot_draft_length", "Tokens of a draft, as chosen.", labels=SOURCE)
    for model, each in stats:
        for drafts in each.speculation.drafts:
            lengths.add_metric(
                [model, drafts.flow, drafts.proposer], _buckets(drafts), drafts.num_draft_tokens
            )
    yield lengths


def _buckets(drafts: DraftStats) -> list[tuple[str, float]]:
    """A draft is at most so long if it has no token at that place."""
    longer = {bound: sum(drafts.drafted_at[bound : bound + 1]) for bound in LENGTHS}
    counts = [(str(float(bound)), float(drafts.num_drafts - longer[bound])) for bound in LENGTHS]
    return [*counts, ("+Inf", float(drafts.num_drafts))]


def _sums(counts: Iterable[tuple[int, ...]]) -> list[int]:
    return [sum(each) for each in zip_longest(*counts, fillvalue=0)]
