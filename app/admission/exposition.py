"""Counts in Prometheus' words: the one list of every metric's name, text and labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from app.admission.counts import OTHER, SHOWN, Counts, Gauge, Gauges, Histogram, Labels, by_activity, take_in
from app.domain.quota import KEYS


class Exposition(Collector):
    """Counts as Prometheus' metric families."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        c = self._counts
        yield _counter(
            "decisions", "Decisions; quota is the one that decided.", "decision quota source", c.decisions
        )
        yield _counter("shadow_decisions", "What shadow quotas would have said.", "decision quota", c.shadows)
        yield _counter("unmatched_asks", "Asks to which no quota applied.", "", {(): c.unmatched})
        yield _counter(
            "exempt_requests", "Requests of cluster actions, exempt from quotas.", "", {(): c.exempt}
        )
        yield _counter(
            "fallback", "Asks answered without the store, as it did not answer.", "reason", c.fallbacks
        )
        yield _counter(
            "store_failures", "Calls to the store, and examinations, that failed.", "reason", c.failures
        )
        yield _gauge(
            "store_circuit_open", "API processes that go without the store.", "", {(): c.stores_away}
        )
        yield _gauge(
            "store_faults",
            "1 for what is wrong with the store's set-up.",
            "fault",
            {(name,): 1 for name in sorted(c.store_faults)},
        )
        yield _gauge(
            "catalog_away", "API processes that decide by the last snapshot.", "", {(): c.catalogs_away}
        )
        yield _counter("access_failures", "Requests refused for want of access.", "reason", c.access_failures)
        yield _counter("clock_corrections", "Clocks behind a bucket's newest time.", "", {(): c.corrections})
        yield _histogram("decision_seconds", "Time an ask waited for its decision.", c.decision_seconds)
        yield _histogram("store_seconds", "Time of a call to the store.", c.store_seconds)
        yield _histogram("script_asks", "Asks that a call to the store carried.", c.script_asks)
        yield _values("rate", "The rate last measured, in the limit's unit.", "quota entity", c.rates, sum)
        yield _values(
            "tokens", "Tokens left, below 0 in debt; of the others the least.", "quota entity", c.tokens, min
        )
        yield _means(
            "throttle_seconds",
            "Mean of the recent throttle times above 0.",
            "quota entity",
            _joined(c.rates, c.tokens),
        )
        yield _values("producer_ids_remembered", "Producer ids remembered.", "entity", c.remembered, sum)
        yield _values(
            "filter_fill", "Part of the filter that is set; of the others the most.", "entity", c.fills, max
        )
        yield _values(
            "connection_accept_rate", "New connections a second.", "broker listener", c.accepted, sum
        )
        yield _counter(
            "connection_blocked_seconds", "Time acceptors were told to wait.", "listener", c.blocked
        )
        yield _means(
            "connection_throttle_seconds", "Mean of the recent waits above 0.", "listener cause", c.held
        )


def _counter(name: str, text: str, labels: str, counts: dict[Labels, float]) -> Metric:
    family = CounterMetricFamily(f"quotagate_{name}", text, labels=labels.split())
    for values, count in counts.items():
        family.add_metric(values, count)
    return family


def _gauge(name: str, text: str, labels: str, values: Mapping[Labels, float]) -> Metric:
    family = GaugeMetricFamily(f"quotagate_{name}", text, labels=labels.split())
    for its_labels, value in values.items():
        family.add_metric(its_labels, value)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(f"quotagate_{name}", text, labels=())
    below, buckets = 0, []
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        below += count
        buckets.append((bound, float(below)))
    family.add_metric((), buckets, histogram.total)
    return family


def _values(
    name: str, text: str, labels: str, gauges: Gauges, join: Callable[[Iterable[float]], float]
) -> Metric:
    family = GaugeMetricFamily(f"quotagate_{name}", text, labels=labels.split())
    for values, group in _shown(gauges):
        known = [gauge.value for gauge in group if gauge.value is not None]
        if known:
            family.add_metric(values, join(known))
    return family


def _joined(*parts: Gauges) -> Gauges:
    """The gauges of several kinds together; a quota that changed its algorithm has both for a while."""
    joined: Gauges = {}
    for part in parts:
        take_in(joined, part)
    return joined


def _means(name: str, text: str, labels: str, gauges: Gauges) -> Metric:
    family = GaugeMetricFamily(f"quotagate_{name}", text, labels=labels.split())
    for values, group in _shown({labels: gauge for labels, gauge in gauges.items() if gauge.throttles}):
        family.add_metric(values, sum(g.throttled for g in group) / sum(g.throttles for g in group))
    return family


def _shown(gauges: Gauges) -> Iterator[tuple[Labels, list[Gauge]]]:
    """The most active label sets, then the rest as ``other``: for each quota, or for all."""
    ranked = by_activity(gauges)
    for labels in ranked[:SHOWN]:
        yield labels, [gauges[labels]]
    rest: dict[Labels, list[Gauge]] = {}
    for labels in ranked[SHOWN:]:
        kept = labels[:1] if labels[0] in KEYS else (OTHER,) * (len(labels) - 1)
        rest.setdefault((*kept, OTHER), []).append(gauges[labels])
    yield from rest.items()
