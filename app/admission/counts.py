"""What one process has counted: plain numbers, cheap to add to and to add up."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice
from typing import Final

from msgspec import Struct, field

Labels = tuple[str, ...]

SHOWN: Final = 1_000
"""How many label sets of one gauge a scrape shows, by activity; the rest are together as ``other``."""
KEPT: Final = 4 * SHOWN
"""How many are kept before the least active are forgotten."""
OTHER: Final = "other"
SLICE: Final = 500
"""Gauges that are copied at once, which takes about half a millisecond."""

SECONDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
ASKS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


class Histogram(Struct):
    """How many values fell below each bound and above the one before; the last count has no bound."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    @classmethod
    def of(cls, bounds: tuple[float, ...]) -> Histogram:
        """An empty one."""
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def add(self, other: Histogram) -> None:
        """Take in the counts of another process."""
        self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


class Gauge(Struct, gc=False):
    """One label set: its newest value, and its throttle times.

    Attributes:
        at: when it was touched last, by the host's monotonic clock, which its processes share.
        activity: how often it was touched, halved every half-life.
        throttled, throttles: the sum in seconds and the number of throttle times above 0, halved likewise.
        throttled_at: when the last of them was.
    """

    at: float = 0.0
    activity: float = 0.0
    value: float | None = None
    throttled: float = 0.0
    throttles: float = 0.0
    throttled_at: float = 0.0

    def add(self, other: Gauge) -> None:
        """Take in what another process knows: a value is the whole bucket's, so the newest one counts."""
        if other.at > self.at:
            self.at, self.value = other.at, other.value
        self.activity += other.activity
        self.throttled += other.throttled
        self.throttles += other.throttles
        self.throttled_at = max(self.throttled_at, other.throttled_at)


Gauges = dict[Labels, Gauge]


class Counts(Struct):
    """Everything one process has counted.

    Attributes:
        written_at: when it left its counts last, by the host's monotonic clock.
        stores_away: 1 while its circuit is open; of several processes, how many have it open.
        store_faults: what was wrong with the store's set-up then.
        catalogs_away: 1 while it does not reach its catalog; of several processes, how many do not.
        queue_asks: how many asks wait for a call to the store.
        factor_fallbacks: how often it has gone over to the fallback factor; of several processes, which all
            see the same, the most.
        log_dropped: rows of the decision log that it dropped.
    """

    decisions: dict[Labels, float] = field(default_factory=dict)
    shadows: dict[Labels, float] = field(default_factory=dict)
    fallbacks: dict[Labels, float] = field(default_factory=dict)
    failures: dict[Labels, float] = field(default_factory=dict)
    blocked: dict[Labels, float] = field(default_factory=dict)
    access_failures: dict[Labels, float] = field(default_factory=dict)
    shed: dict[Labels, float] = field(default_factory=dict)
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
    accepted: Gauges = field(default_factory=dict)
    held: Gauges = field(default_factory=dict)
    written_at: float = 0.0
    stores_away: int = 0
    store_faults: set[str] = field(default_factory=set)
    catalogs_away: int = 0
    queue_asks: int = 0
    factor_fallbacks: int = 0
    log_dropped: int = 0

    @property
    def gauges(self) -> tuple[Gauges, ...]:
        """Every table that grows with the names it is asked about."""
        return self.rates, self.tokens, self.remembered, self.fills, self.accepted, self.held

    def add(self, other: Counts) -> None:
        """Take in the counts of another process."""
        for _ in self.added(other):
            pass

    def added(self, other: Counts) -> Iterator[None]:
        """Take in the counts of a process that may go on counting, a slice at each step."""
        for name in ("decisions", "shadows", "fallbacks", "failures", "blocked", "access_failures", "shed"):
            mine: dict[Labels, float] = getattr(self, name)
            for labels, count in getattr(other, name).items():
                mine[labels] = mine.get(labels, 0) + count
        self.unmatched += other.unmatched
        self.exempt += other.exempt
        self.corrections += other.corrections
        self.forgiven += other.forgiven
        self.log_dropped += other.log_dropped
        self.stores_away += other.stores_away
        self.catalogs_away += other.catalogs_away
        self.queue_asks += other.queue_asks
        self.store_faults |= other.store_faults
        self.factor_fallbacks = max(self.factor_fallbacks, other.factor_fallbacks)
        self.decision_seconds.add(other.decision_seconds)
        self.store_seconds.add(other.store_seconds)
        self.queue_seconds.add(other.queue_seconds)
        self.script_asks.add(other.script_asks)
        for known, its in zip(self.gauges, other.gauges, strict=True):
            labels = iter(list(its.items()))
            while some := dict(islice(labels, SLICE)):
                take_in(known, some)
                yield


def touch(gauges: Gauges, labels: Labels, now: float, value: float | None, throttled: float = 0.0) -> None:
    """Note a value, where there is one, and a throttle time above 0; forgets the idle ones when too many."""
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
    """The label sets, the most active first."""
    return sorted(gauges, key=lambda labels: gauges[labels].activity, reverse=True)


def take_in(known: Gauges, more: Gauges) -> None:
    """Add gauges to others; those taken over as new are copies."""
    for labels, gauge in more.items():
        known.setdefault(labels, Gauge()).add(gauge)


def bounded(counter: dict[Labels, float], labels: Labels) -> Labels:
    """The label set to count under: its own, or ``other`` when there are too many."""
    return labels if labels in counter or len(counter) < SHOWN else (OTHER,)
