"""The one list of all metrics: name, help text and labels, built from the counts at scrape time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from app.admission.counts import (
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
from app.admission.throttling import ThrottlingStatus
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
        c = self._counts
        yield _counter(
            "decisions",
            "Decisions, by outcome, deciding quota and source.",
            "decision quota source",
            c.decisions,
        )
        yield _counter(
            "shadow_decisions", "Decisions that shadow quotas would have made.", "decision quota", c.shadows
        )
        yield _counter("unmatched_asks", "Asks to which no quota applied.", "", {(): c.unmatched})
        yield _counter(
            "exempt_requests", "Requests exempt from quotas as cluster actions.", "", {(): c.exempt}
        )
        yield _counter(
            "fallback",
            "Asks answered by on_store_failure because the store did not answer or was full, by reason.",
            "reason",
            c.fallbacks,
        )
        yield _counter(
            "store_failures", "Failed store calls and store examinations, by reason.", "reason", c.failures
        )
        yield _gauge(
            "store_circuit_open", "API processes whose store circuit is open.", "", {(): c.stores_away}
        )
        yield _gauge(
            "store_faults",
            "1 per detected store misconfiguration.",
            "fault",
            {(name,): 1 for name in sorted(c.store_faults)},
        )
        if self._memory is not None:
            used, most = self._memory
            yield _gauge("store_memory_bytes", "Memory used by the store, in bytes.", "", {(): used})
            yield _gauge(
                "store_memory_max_bytes", "The store's maxmemory in bytes; 0 for no limit.", "", {(): most}
            )
        yield _gauge(
            "catalog_away",
            "API processes that cannot reach the catalog and use the last quotas they read.",
            "",
            {(): c.catalogs_away},
        )
        yield _counter(
            "access_failures", "Requests refused by access control, by reason.", "reason", c.access_failures
        )
        yield _counter(
            "clock_corrections",
            "Bucket updates for which the clock was behind the bucket's newest time.",
            "",
            {(): c.corrections},
        )
        yield _counter(
            "debt_forgiven",
            "Token bucket debt forgiven above the maximum debt, in units of the limit.",
            "",
            {(): c.forgiven},
        )
        yield _counter("log_dropped", "Decision log rows dropped by this node.", "", {(): c.log_dropped})
        yield _histogram("decision_seconds", "Seconds from an ask to its decision.", c.decision_seconds)
        yield _histogram("store_seconds", "Duration of a store call, in seconds.", c.store_seconds)
        yield _histogram(
            "queue_seconds", "Seconds an ask waited in this node before it was sent.", c.queue_seconds
        )
        yield _gauge("queue_asks", "Asks in this node that wait for a store call.", "", {(): c.queue_asks})
        yield _counter(
            "shed", "Requests and connections rejected by load shedding, by cause.", "cause", c.shed
        )
        yield _histogram("script_asks", "Asks per store call.", c.script_asks)
        yield _values("rate", "Last measured rate, in the unit of the limit.", "quota entity", c.rates, sum)
        yield _values(
            "tokens",
            "Tokens left in the bucket, negative in debt; the series other shows the minimum.",
            "quota entity",
            c.tokens,
            min,
        )
        yield _means(
            "throttle_seconds",
            "Mean of recent throttle times above 0, in seconds.",
            "quota entity",
            _joined(c.rates, c.tokens),
        )
        yield _values(
            "producer_ids_remembered", "Producer ids remembered by the filter.", "entity", c.remembered, sum
        )
        yield _values(
            "filter_fill",
            "Fill of the newest filter segment, from 0 to 1; the series other shows the maximum.",
            "entity",
            c.fills,
            max,
        )
        yield _values(
            "connection_accept_rate", "New connections per second.", "broker listener", c.accepted, sum
        )
        yield _counter(
            "connection_blocked_seconds",
            "Seconds that acceptors were asked to wait before the next connection.",
            "listener",
            c.blocked,
        )
        yield _means(
            "connection_throttle_seconds",
            "Mean of recent connection throttle times above 0, in seconds.",
            "listener cause",
            c.held,
        )
        if self._log is not None:
            yield from _of_log(self._log)
        if self._throttling is not None:
            yield from _of_throttling(self._throttling, c.factor_fallbacks)


def _of_log(log: LogStatus) -> Iterator[Metric]:
    """The metrics of the decision log, which all nodes share."""
    yield _gauge(
        "log_lag_seconds",
        "Age of the oldest batch not yet in a file, in seconds.",
        "",
        {(): log.lag_ms / 1000},
    )
    yield _gauge("log_waiting_batches", "Batches not yet written to a file.", "", {(): log.waiting})
    yield _counter(
        "log_written_rows",
        "Rows written to files; rows of a batch that was sent twice count twice.",
        "",
        {(): log.written},
    )
    yield _counter(
        "log_unreadable_rows", "Rows that could not be read and were set aside.", "", {(): log.unreadable}
    )
    yield _counter(
        "log_write_failures", "Failed attempts to write or maintain files.", "", {(): log.failures}
    )


def _of_throttling(now: ThrottlingStatus, fallbacks: int) -> Iterator[Metric]:
    """The metrics of the throttle factor and of the volumes it depends on; removed volumes have no series."""
    in_force, state = now.in_force, now.state
    volumes = state.volumes if state else ()
    yield _gauge(
        "throttle_factor",
        "Factor applied to produce limits; 0 holds produce requests.",
        "",
        {(): in_force.factor},
    )
    held_s: dict[Labels, float] = {("validity",): 0.0, ("fallback",): 0.0}
    if in_force.held_by:
        held_s[in_force.held_by,] = max(now.now_ms - in_force.held_since_ms, 0) / 1000
    yield _gauge(
        "throttle_factor_held_seconds",
        "Seconds the factor has been held without a fresh observation, by reason.",
        "by",
        held_s,
    )
    yield _counter(
        "throttle_factor_fallback", "Times the fallback factor came into force.", "", {(): fallbacks}
    )
    yield _counter(
        "volume_limit_violations",
        "Volumes that violated a limit, summed over all observations.",
        "",
        {(): state.violations if state else 0},
    )
    brokers = state.active_brokers if state else 0
    yield _gauge("active_brokers", "Brokers seen by the last observation.", "", {(): brokers})
    yield _gauge("active_log_dirs", "Known volumes.", "", {(): len(volumes)})
    for name, text, sizes in (
        (
            "available",
            "Bytes available on the volume.",
            {(v.broker, v.dir): v.available_bytes for v in volumes},
        ),
        ("total", "Size of the volume in bytes.", {(v.broker, v.dir): v.total_bytes for v in volumes}),
    ):
        known: dict[Labels, float] = {labels: size for labels, size in sizes.items() if size is not None}
        yield _gauge(f"volume_{name}_bytes", text, "broker dir", known)


def _counter(name: str, text: str, labels: str, counts: dict[Labels, float]) -> Metric:
    return _filled(CounterMetricFamily(f"quotagate_{name}", text, labels=labels.split()), counts)


def _gauge(name: str, text: str, labels: str, values: Mapping[Labels, float]) -> Metric:
    return _filled(GaugeMetricFamily(f"quotagate_{name}", text, labels=labels.split()), values)


def _filled(
    family: CounterMetricFamily | GaugeMetricFamily, samples: Mapping[Labels, float]
) -> CounterMetricFamily | GaugeMetricFamily:
    for labels, value in samples.items():
        family.add_metric(labels, value)
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
    known = {values: [g.value for g in group if g.value is not None] for values, group in _shown(gauges)}
    return _gauge(name, text, labels, {values: join(those) for values, those in known.items() if those})


def _joined(*parts: Gauges) -> Gauges:
    """The gauges of all parts; a quota whose algorithm changed is in both parts for a while."""
    joined: Gauges = {}
    for part in parts:
        add_gauges(joined, part)
    return joined


def _means(name: str, text: str, labels: str, gauges: Gauges) -> Metric:
    groups = _shown({labels: gauge for labels, gauge in gauges.items() if gauge.throttles})
    means = {values: sum(g.throttled for g in its) / sum(g.throttles for g in its) for values, its in groups}
    return _gauge(name, text, labels, means)


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
