"""The one list of all metrics: name, help text and labels, built from the counts at scrape time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from app.admission.factor import ThrottlingStatus
from app.admission.metrics.counts import (
    OTHER,
    SHOWN,
    Counts,
    Gauge,
    Gauges,
    Histogram,
    Labels,
    add_gauges,
    by_activity,
)
from app.decision_log.status import LogStatus
from app.domain.quota import KEYS
from app.store.port import Memory


class Exposition(Collector):
    """The counts of all processes, the throttle factor and the decision log, as Prometheus metrics."""

    def __init__(
        self,
        counts: Counts,
        throttling: ThrottlingStatus | None = None,
        log: LogStatus | None = None,
        memory: Memory | None = None,
    ) -> None:
        self._counts = counts
        self._throttling = throttling
        self._log = log
        self._memory = memory

    def collect(self) -> Iterator[Metric]:
        yield from _of_counts(self._counts)
        if self._memory is not None:
            yield from _of_memory(self._memory)
        if self._log is not None:
            yield from _of_log(self._log)
        if self._throttling is not None:
            yield from _of_throttling(self._throttling, self._counts.factor_fallbacks)


def _of_counts(c: Counts) -> tuple[Metric, ...]:
    """The metrics of decisions, and of the processes that make them."""
    return (
        _counter(
            "decisions",
            "Decisions, by outcome, deciding quota and source.",
            c.decisions,
            "decision quota source",
        ),
        _counter(
            "shadow_decisions", "Decisions that shadow quotas would have made.", c.shadows, "decision quota"
        ),
        _counter("unmatched_asks", "Asks to which no quota applied.", c.unmatched),
        _counter("exempt_requests", "Requests exempt from quotas as cluster actions.", c.exempt),
        _counter(
            "fallback",
            "Asks answered by on_store_failure because the store did not answer or was full, by reason.",
            c.fallbacks,
            "reason",
        ),
        _counter(
            "store_failures", "Failed store calls and store examinations, by reason.", c.failures, "reason"
        ),
        _gauge("store_circuit_open", "API processes whose store circuit is open.", c.stores_away),
        _gauge(
            "store_faults",
            "1 per detected store misconfiguration.",
            {(name,): 1 for name in sorted(c.store_faults)},
            "fault",
        ),
        _gauge(
            "catalog_away",
            "API processes that cannot reach the catalog and use the last quotas they read.",
            c.catalogs_away,
        ),
        _counter(
            "access_failures", "Requests refused by access control, by reason.", c.access_failures, "reason"
        ),
        _counter(
            "clock_corrections",
            "Bucket updates for which the clock was behind the bucket's newest time.",
            c.corrections,
        ),
        _counter(
            "debt_forgiven",
            "Token bucket debt forgiven above the maximum debt, in units of the limit.",
            c.forgiven,
        ),
        _counter("leases", "Leases asked for and settled, by outcome.", c.leases, "outcome"),
        _counter(
            "lease_lapsed_units",
            "Units of leases that ended unsettled and count as spent, in the unit of the limit.",
            c.lapsed,
        ),
        _values(
            "leased", "Units that the bucket held for leases when last seen.", c.leased, "quota entity", sum
        ),
        _counter("log_dropped", "Decision log rows dropped by this node.", c.log_dropped),
        _counter(
            "samples_dropped",
            "Samples for the overview that the store did not take; their counts are in the next ones.",
            c.samples_dropped,
        ),
        _histogram("decision_seconds", "Seconds from an ask to its decision.", c.decision_seconds),
        _histogram("store_seconds", "Duration of a store call, in seconds.", c.store_seconds),
        _histogram(
            "queue_seconds", "Seconds an ask waited in this node before it was sent.", c.queue_seconds
        ),
        _gauge("queue_asks", "Asks in this node that wait for a store call.", c.queue_asks),
        _counter("shed", "Requests rejected by load shedding, by cause.", c.shed, "cause"),
        _counter(
            "connections_refused",
            "Connections closed because of a bound (process, address), or without a request in time.",
            c.refused_connections,
            "port reason",
        ),
        _counter(
            "connections_handed_over",
            "Connections handed over to uvicorn's protocol, by a request that was not ordinary.",
            c.connections_handed_over,
        ),
        _gauge("draining", "API processes that are stopping and still serve.", c.draining),
        _counter(
            "shortages",
            "Times that this node was short of a resource: descriptors, threads, memory or disk.",
            c.shortages,
            "resource",
        ),
        _counter(
            "unsent_answers", "Answers that could not be written to their connection.", c.unsent_answers
        ),
        _counter(
            "envoy_requests",
            "Answers of Envoy's rate-limit service, by outcome.",
            c.envoy_requests,
            "outcome",
        ),
        _counter(
            "envoy_unmapped_descriptors",
            "Descriptors of Envoy that named nothing to limit.",
            c.unmapped_descriptors,
        ),
        _counter(
            "envoy_unusable_descriptors",
            "Parts of Envoy's descriptors that cannot be used and were left out, by reason.",
            c.unusable_descriptors,
            "reason",
        ),
        _counter(
            "spans_dropped",
            "Sampled decisions without a span at the collector, by reason.",
            c.spans_dropped,
            "reason",
        ),
        _histogram("script_asks", "Asks per store call.", c.script_asks),
        _values("rate", "Last measured rate, in the unit of the limit.", c.rates, "quota entity", sum),
        _values(
            "tokens",
            "Tokens left in the bucket, negative in debt; the series other shows the minimum.",
            c.tokens,
            "quota entity",
            min,
        ),
        _means(
            "throttle_seconds",
            "Mean of recent throttle times above 0, in seconds.",
            _joined(c.rates, c.tokens),
            "quota entity",
        ),
        _values(
            "producer_ids_remembered", "Producer ids remembered by the filter.", c.remembered, "entity", sum
        ),
        _values(
            "producer_ids_remaining",
            "New producer ids that may pass, below 0 when throttled; the series other shows the minimum.",
            c.remaining,
            "entity",
            min,
        ),
        _values(
            "filter_fill",
            "Fill of the newest filter segment, from 0 to 1; the series other shows the maximum.",
            c.fills,
            "entity",
            max,
        ),
        _counter("local_ids", "Producer ids answered without the store, as the node knew them.", c.local_ids),
        _gauge("known_ids", "Producer ids that the nodes know, each counted once per process.", c.known_ids),
        _counter("renewals", "Asks by which nodes wrote known producer ids to the store again.", c.renewals),
        _values("connection_accept_rate", "New connections per second.", c.accepted, "broker listener", sum),
        _counter(
            "connection_blocked_seconds",
            "Seconds that acceptors were asked to wait before the next connection.",
            c.blocked,
            "listener",
        ),
        _means(
            "connection_throttle_seconds",
            "Mean of recent connection throttle times above 0, in seconds.",
            c.held,
            "listener cause",
        ),
    )


def _of_memory(memory: Memory) -> tuple[Metric, ...]:
    """The metrics of the store's memory."""
    return (
        _gauge("store_memory_bytes", "Memory used by the store, in bytes.", memory.used),
        _gauge("store_memory_max_bytes", "The store's maxmemory in bytes; 0 for no limit.", memory.most),
    )


def _of_log(log: LogStatus) -> tuple[Metric, ...]:
    """The metrics of the decision log, which all nodes share."""
    return (
        _gauge(
            "log_lag_seconds", "Age of the oldest batch not yet in a file, in seconds.", log.lag_ms / 1000
        ),
        _gauge("log_waiting_batches", "Batches not yet written to a file.", log.waiting),
        _counter(
            "log_written_rows",
            "Rows written to files; rows of a batch that was sent twice count twice.",
            log.written,
        ),
        _counter("log_unreadable_rows", "Rows that could not be read and were set aside.", log.unreadable),
        _counter("log_write_failures", "Failed attempts to write or maintain files.", log.failures),
    )


def _of_throttling(now: ThrottlingStatus, fallbacks: int) -> tuple[Metric, ...]:
    """The metrics of the throttle factor and of the volumes it depends on; removed volumes have no series."""
    in_force, state = now.in_force, now.state
    volumes = state.volumes if state else ()
    held_s: dict[Labels, float] = {("validity",): 0.0, ("fallback",): 0.0}
    if in_force.held_by:
        held_s[in_force.held_by,] = max(now.now_ms - in_force.held_since_ms, 0) / 1000
    return (
        _gauge(
            "throttle_factor", "Factor applied to produce limits; 0 holds produce requests.", in_force.factor
        ),
        _gauge(
            "throttle_factor_held_seconds",
            "Seconds the factor has been held without a fresh observation, by reason.",
            held_s,
            "by",
        ),
        _counter("throttle_factor_fallback", "Times the fallback factor came into force.", fallbacks),
        _counter(
            "volume_limit_violations",
            "Volumes that violated a limit, summed over all observations.",
            state.violations if state else 0,
        ),
        _gauge(
            "active_brokers", "Brokers seen by the last observation.", state.active_brokers if state else 0
        ),
        _gauge("active_log_dirs", "Known volumes.", len(volumes)),
        _gauge(
            "volume_available_bytes",
            "Bytes available on the volume.",
            {(v.broker, v.dir): v.available_bytes for v in volumes if v.available_bytes is not None},
            "broker dir",
        ),
        _gauge(
            "volume_total_bytes",
            "Size of the volume in bytes.",
            {(v.broker, v.dir): v.total_bytes for v in volumes if v.total_bytes is not None},
            "broker dir",
        ),
    )


Series = float | Mapping[Labels, float]
"""A value for each label set, or the only value of a metric without labels."""


def _counter(name: str, text: str, samples: Series, labels: str = "") -> Metric:
    return _filled(CounterMetricFamily(f"quotagate_{name}", text, labels=labels.split()), samples)


def _gauge(name: str, text: str, samples: Series, labels: str = "") -> Metric:
    return _filled(GaugeMetricFamily(f"quotagate_{name}", text, labels=labels.split()), samples)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, samples: Series) -> Metric:
    for labels, value in samples.items() if isinstance(samples, Mapping) else (((), samples),):
        family.add_metric(labels, value)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    bounds = (*map(str, histogram.bounds), "+Inf")
    buckets = list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))
    family = HistogramMetricFamily(f"quotagate_{name}", text, labels=())
    family.add_metric((), buckets, histogram.total)
    return family


def _values(
    name: str, text: str, gauges: Gauges, labels: str, join: Callable[[Iterable[float]], float]
) -> Metric:
    known = {values: [g.value for g in group if g.value is not None] for values, group in _shown(gauges)}
    return _gauge(name, text, {values: join(those) for values, those in known.items() if those}, labels)


def _joined(*parts: Gauges) -> Gauges:
    """The gauges of all parts; a quota whose algorithm changed is in both parts for a while."""
    joined: Gauges = {}
    for part in parts:
        add_gauges(joined, part)
    return joined


def _means(name: str, text: str, gauges: Gauges, labels: str) -> Metric:
    groups = _shown({values: gauge for values, gauge in gauges.items() if gauge.throttles})
    means = {
        values: sum(g.throttled for g in group) / sum(g.throttles for g in group) for values, group in groups
    }
    return _gauge(name, text, means, labels)


def _shown(gauges: Gauges) -> Iterator[tuple[Labels, list[Gauge]]]:
    """The ``SHOWN`` most active label sets, then the others together (per quota, if labelled)."""
    ranked = by_activity(gauges)
    for labels in ranked[:SHOWN]:
        yield labels, [gauges[labels]]
    rest: dict[Labels, list[Gauge]] = {}
    for labels in ranked[SHOWN:]:
        kept = labels[:1] if labels[0] in KEYS else (OTHER,) * (len(labels) - 1)
        rest.setdefault((*kept, OTHER), []).append(gauges[labels])
    yield from rest.items()
