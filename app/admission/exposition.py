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
from app.admission.throttling import Standing
from app.domain.quota import KEYS
from app.store.decision_log_standing import LogStanding
from app.store.port import Memory


class Exposition(Collector):
    """Counts, and how volumes and the decision log stand, as Prometheus' metric families."""

    def __init__(
        self,
        counts: Counts,
        volumes: Standing | None = None,
        log: LogStanding | None = None,
        memory: Memory | None = None,
    ) -> None:
        self._counts = counts
        self._volumes = volumes
        self._log = log
        self._memory = memory

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
            "fallback",
            "Asks answered by policy: the store was away or full.",
            "reason",
            c.fallbacks,
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
        if self._memory is not None:
            used, most = self._memory
            yield _gauge("store_memory_bytes", "Memory that the store uses.", "", {(): used})
            yield _gauge(
                "store_memory_max_bytes", "Memory that the store may use; 0 without a bound.", "", {(): most}
            )
        yield _gauge(
            "catalog_away", "API processes that decide by the last snapshot.", "", {(): c.catalogs_away}
        )
        yield _counter("access_failures", "Requests refused for want of access.", "reason", c.access_failures)
        yield _counter("clock_corrections", "Clocks behind a bucket's newest time.", "", {(): c.corrections})
        yield _counter(
            "debt_forgiven",
            "Units of token buckets' debts beyond the longest there may be.",
            "",
            {(): c.forgiven},
        )
        yield _counter(
            "log_dropped",
            "Rows of the decision log that this node dropped.",
            "",
            {(): c.log_dropped},
        )
        yield _histogram("decision_seconds", "Time an ask waited for its decision.", c.decision_seconds)
        yield _histogram("store_seconds", "Time of a call to the store.", c.store_seconds)
        yield _histogram("queue_seconds", "Time an ask waited in this node.", c.queue_seconds)
        yield _gauge("queue_asks", "Asks that wait in this node.", "", {(): c.queue_asks})
        yield _counter(
            "shed", "Requests and connections not taken in, for want of time or room.", "cause", c.shed
        )
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
        if self._log is not None:
            yield from _of_log(self._log)
        if self._volumes is not None:
            yield from _of_volumes(self._volumes, c.factor_fallbacks)


def _of_log(standing: LogStanding) -> Iterator[Metric]:
    """How the decision log stands, of which there is one for all nodes."""
    lag_s = standing.lag_ms / 1000
    yield _gauge("log_lag_seconds", "Age of the oldest batch that is in no file yet.", "", {(): lag_s})
    yield _gauge("log_waiting_batches", "Batches that are in no file yet.", "", {(): standing.waiting})
    yield _counter(
        "log_written_rows",
        "Rows that were put into files; those of a batch that a node sent twice count twice.",
        "",
        {(): standing.written},
    )
    yield _counter(
        "log_unreadable_rows",
        "Rows that could not be read and are kept aside.",
        "",
        {(): standing.unreadable},
    )
    yield _counter(
        "log_write_failures",
        "Times that files could not be written, or looked after.",
        "",
        {(): standing.failures},
    )


def _of_volumes(standing: Standing, fallbacks: int) -> Iterator[Metric]:
    """The throttle factor and what makes it; a volume that is gone is gone here too."""
    found, state = standing.in_force, standing.state
    volumes = state.volumes if state else ()
    yield _gauge("throttle_factor", "What scales produce limits; 0 holds them.", "", {(): found.factor})
    held_s: dict[Labels, float] = {("validity",): 0.0, ("fallback",): 0.0}
    if found.held_by:
        held_s[found.held_by,] = max(standing.now_ms - found.held_since_ms, 0) / 1000
    yield _gauge(
        "throttle_factor_held_seconds",
        "How long no observation has made the factor, by what does.",
        "by",
        held_s,
    )
    yield _counter("throttle_factor_fallback", "How often the fallback began to hold.", "", {(): fallbacks})
    yield _counter(
        "volume_limit_violations",
        "Volumes that violated, summed over observations.",
        "",
        {(): state.violations if state else 0},
    )
    brokers = state.active_brokers if state else 0
    yield _gauge("active_brokers", "Brokers that the last observation met.", "", {(): brokers})
    yield _gauge("active_log_dirs", "Volumes that are known.", "", {(): len(volumes)})
    for name, text, sizes in (
        ("available", "Bytes left on a volume.", {(v.broker, v.dir): v.available_bytes for v in volumes}),
        ("total", "Bytes of a volume.", {(v.broker, v.dir): v.total_bytes for v in volumes}),
    ):
        known: dict[Labels, float] = {labels: size for labels, size in sizes.items() if size is not None}
        yield _gauge(f"volume_{name}_bytes", text, "broker dir", known)


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
