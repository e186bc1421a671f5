"""The counts of one process: numbers, cheap to count and to add up over processes.

A gauge has one entry per label set, for instance per bucket. The 1,000 most active are shown and the others
combined as ``other``; at 4,000 entries the least active are forgotten.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import islice
from math import inf
from typing import Final

from msgspec import Raw, Struct, field, msgpack

Labels = tuple[str, ...]

SHOWN: Final = 1_000
"""How many label sets of a gauge are shown; the others are combined as ``other``."""
KEPT: Final = 4 * SHOWN
"""The most label sets of a gauge that are kept; for a new one the least active are forgotten."""
OTHER: Final = "other"
SLICE: Final = 500
"""How many gauges are copied at a time, which takes about half a millisecond."""

SECONDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
ASKS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


class Histogram(Struct):
    """How many values lie between each bound and the previous one; the last count is for larger values."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    @classmethod
    def of(cls, bounds: tuple[float, ...]) -> Histogram:
        """Return an empty histogram."""
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, values: Sequence[float]) -> None:
        """Count values."""
        for value in values:
            self.counts[bisect_left(self.bounds, value)] += 1
        self.total += sum(values)

    def add(self, other: Histogram) -> None:
        """Add the counts of another histogram; each goes to the first bound that is not below its own."""
        for bound, count in zip((*other.bounds, inf), other.counts, strict=True):
            self.counts[bisect_left(self.bounds, bound)] += count
        self.total += other.total


class Gauge(Struct, gc=False):
    """The newest value and the throttle times of one label set.

    Attributes:
        at: when it was last updated, by the host's monotonic clock, which its processes share.
        activity: the number of updates, halved every half-life.
        throttled, throttles: the sum in seconds and the number of throttle times above 0, halved likewise.
        throttled_at: when the last throttle time above 0 was counted.
    """

    at: float = 0.0
    activity: float = 0.0
    value: float | None = None
    throttled: float = 0.0
    throttles: float = 0.0
    throttled_at: float = 0.0

    def add(self, other: Gauge) -> None:
        """Add the gauge of another process; both describe the same bucket, so the newest value wins."""
        if other.at > self.at:
            self.at, self.value = other.at, other.value
        self.activity += other.activity
        self.throttled += other.throttled
        self.throttles += other.throttles
        self.throttled_at = max(self.throttled_at, other.throttled_at)


Gauges = dict[Labels, Gauge]

COUNTERS: Final = (
    *("decisions", "shadows", "fallbacks", "failures", "blocked", "access_failures", "shed", "shortages"),
    *("leases", "envoy_requests", "unusable_descriptors", "refused_connections", "spans_dropped"),
)
SUMS: Final = (
    *("unmatched", "exempt", "corrections", "forgiven", "lapsed", "log_dropped", "samples_dropped"),
    *("stores_away", "catalogs_away", "draining", "queue_asks", "local_ids", "known_ids", "renewals"),
    *("unmapped_descriptors", "unsent_answers", "connections_handed_over"),
)
HISTOGRAMS: Final = ("decision_seconds", "store_seconds", "queue_seconds", "script_asks")
"""The fields of ``Counts`` that are added up over processes, by their types."""


class Counts(Struct):
    """Everything one process has counted.

    Attributes:
        written_at: when the process last wrote its counts, by the host's monotonic clock.
        stores_away: 1 while its store circuit is open; in a sum, the number of such processes.
        store_faults: the names of the store's misconfigurations.
        catalogs_away: 1 while it cannot reach the catalog; in a sum, the number of such processes.
        draining: 1 while it is stopping and still serves; in a sum, the number of such processes.
        queue_asks: asks that wait for a store call.
        factor_fallbacks: how often the fallback factor came into force. All processes see the same changes,
            so adding up takes the maximum.
        lapsed: units of leases that ended unsettled.
        log_dropped: decision log rows that it dropped.
        samples_dropped: samples that it could not publish.
        local_ids: producer ids that were answered without the store.
        known_ids: how many producer ids it knows.
        renewals: asks by which it wrote known ids again.
        envoy_requests: answers of the rate-limit service for Envoy, by outcome.
        unusable_descriptors: parts of descriptors that were left out, by reason.
        unmapped_descriptors: descriptors of these requests that named nothing to limit.
        unsent_answers: answers that could not be written to their connection.
        connections_handed_over: connections that went to uvicorn's protocol for good.
        spans_dropped: sampled decisions without a span at the collector, by reason; empty without traces.
    """

    decisions: dict[Labels, float] = field(default_factory=dict)
    shadows: dict[Labels, float] = field(default_factory=dict)
    fallbacks: dict[Labels, float] = field(default_factory=dict)
    failures: dict[Labels, float] = field(default_factory=dict)
    blocked: dict[Labels, float] = field(default_factory=dict)
    access_failures: dict[Labels, float] = field(default_factory=dict)
    shed: dict[Labels, float] = field(default_factory=dict)
    refused_connections: dict[Labels, float] = field(default_factory=dict)
    shortages: dict[Labels, float] = field(default_factory=dict)
    envoy_requests: dict[Labels, float] = field(default_factory=dict)
    unusable_descriptors: dict[Labels, float] = field(default_factory=dict)
    unmatched: int = 0
    exempt: float = 0
    corrections: int = 0
    forgiven: float = 0.0
    decision_seconds: Histogram = field(default_factory=lambda: Histogram.of(SECONDS))
    store_seconds: Histogram = field(default_factory=lambda: Histogram.of(SECONDS))
    queue_seconds: Histogram = field(default_factory=lambda: Histogram.of((*SECONDS, 2.5, 5.0)))
    script_asks: Histogram = field(default_factory=lambda: Histogram.of(ASKS))
    rates: Gauges = field(default_factory=dict)
    tokens: Gauges = field(default_factory=dict)
    remembered: Gauges = field(default_factory=dict)
    fills: Gauges = field(default_factory=dict)
    remaining: Gauges = field(default_factory=dict)
    accepted: Gauges = field(default_factory=dict)
    held: Gauges = field(default_factory=dict)
    written_at: float = 0.0
    stores_away: int = 0
    store_faults: set[str] = field(default_factory=set)
    catalogs_away: int = 0
    draining: int = 0
    queue_asks: int = 0
    factor_fallbacks: int = 0
    log_dropped: int = 0
    local_ids: int = 0
    known_ids: int = 0
    renewals: int = 0
    leases: dict[Labels, float] = field(default_factory=dict)
    lapsed: float = 0.0
    leased: Gauges = field(default_factory=dict)
    unmapped_descriptors: int = 0
    unsent_answers: int = 0
    connections_handed_over: int = 0
    samples_dropped: int = 0
    spans_dropped: dict[Labels, float] = field(default_factory=dict)

    @property
    def gauges(self) -> tuple[Gauges, ...]:
        """All gauges."""
        return (
            *(self.rates, self.tokens, self.remembered, self.fills, self.remaining),
            *(self.accepted, self.held, self.leased),
        )

    def encoded(self, now: float) -> Iterator[tuple[str, Raw]]:
        """Encode the fields one by one, for ``msgpack``, as written at ``now``."""
        self.written_at = now
        for name in self.__struct_fields__:
            yield name, Raw(msgpack.encode(getattr(self, name)))

    def add(self, other: Counts) -> None:
        """Add the counts of another process."""
        for _ in self.add_in_slices(other):
            pass

    def add_in_slices(self, other: Counts) -> Iterator[None]:
        """Add the counts of a process that may still be counting, one slice per step."""
        for name in COUNTERS:
            mine: dict[Labels, float] = getattr(self, name)
            for labels, count in getattr(other, name).items():
                mine[labels] = mine.get(labels, 0) + count
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in HISTOGRAMS:
            getattr(self, name).add(getattr(other, name))
        self.store_faults |= other.store_faults
        self.factor_fallbacks = max(self.factor_fallbacks, other.factor_fallbacks)
        for known, gauges in zip(self.gauges, other.gauges, strict=True):
            labels = iter(list(gauges.items()))
            while some := dict(islice(labels, SLICE)):
                add_gauges(known, some)
                yield


def touch(gauges: Gauges, labels: Labels, now: float, value: float | None, throttled: float = 0.0) -> None:
    """Update a gauge with a value, if not None, and a throttle time, if above 0."""
    gauge = gauges.get(labels)
    if gauge is None:
        if len(gauges) >= KEPT:
            for idle in by_activity(gauges)[SHOWN:]:
                del gauges[idle]
        gauge = gauges[labels] = Gauge()
    gauge.at = now
    gauge.activity += 1
    if value is not None:
        gauge.value = value
    if throttled:
        gauge.throttled += throttled
        gauge.throttles += 1
        gauge.throttled_at = now


def by_activity(gauges: Gauges) -> list[Labels]:
    """Return the label sets, the most active first."""
    return sorted(gauges, key=lambda labels: gauges[labels].activity, reverse=True)


def add_gauges(known: Gauges, more: Gauges) -> None:
    """Add gauges to others; new ones are copied."""
    for labels, gauge in more.items():
        known.setdefault(labels, Gauge()).add(gauge)


def bounded(counter: dict[Labels, float], labels: Labels) -> Labels:
    """Return the label set to count under: this one, or ``other`` if there are too many."""
    return labels if labels in counter or len(counter) < SHOWN else (OTHER,)
