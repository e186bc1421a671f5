"""What happened, counted: plain numbers on the decision path, Prometheus' words at scrape time.

Each API process counts for itself and writes its counts into a folder that they share; a scrape of any of
them adds up the folder (``docs/decisions``, metrics of several processes).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple
from urllib.parse import unquote

from msgspec import MsgspecError, Struct, field, msgpack
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from app.domain.ask import Ask
from app.domain.decision import Decision, Verdict
from app.domain.ladder import EXEMPT_FOR_CLUSTER_ACTIONS, Applied
from app.domain.quota import CONNECTION_CREATION_RATE, KEYS, MAX_CONNECTION_CREATION_RATE

Labels = tuple[str, ...]

SHOWN: Final = 1_000
"""How many label sets of one gauge a scrape shows, by activity; the rest are together as ``other``."""
KEPT: Final = 4 * SHOWN
"""How many are kept before the least active are forgotten."""
HALF_LIFE_S: Final = 30.0
"""Activity, and the weight of old throttle times in their mean, halve this often."""
QUIET_S: Final = 120.0
"""What nothing touched for so long is gone."""
WRITE_EVERY_S: Final = 1.0
OTHER: Final = "other"

SECONDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
ASKS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_EXEMPT_USAGE: Final = frozenset(KEYS[key].usage for key in EXEMPT_FOR_CLUSTER_ACTIONS)


class Fill(NamedTuple):
    """How many producer ids a bucket remembers, and what part of its filter is set."""

    bucket: str
    remembered: int
    fill: float


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


class Gauge(Struct):
    """One label set: its newest value, and its throttle times.

    Attributes:
        at: when it was touched last, by the host's monotonic clock, which its processes share.
        activity: how often it was touched, halved every half-life.
        throttled, throttles: the sum in seconds and the number of throttle times above 0, halved likewise.
    """

    at: float = 0.0
    activity: float = 0.0
    value: float | None = None
    throttled: float = 0.0
    throttles: float = 0.0

    def add(self, other: Gauge) -> None:
        """Take in what another process knows: a value is the whole bucket's, so the newest one counts."""
        if other.at > self.at:
            self.at, self.value = other.at, other.value
        self.activity += other.activity
        self.throttled += other.throttled
        self.throttles += other.throttles


Gauges = dict[Labels, Gauge]


class Counts(Struct):
    """Everything one process has counted."""

    decisions: dict[Labels, float] = field(default_factory=dict)
    shadows: dict[Labels, float] = field(default_factory=dict)
    fallbacks: dict[Labels, float] = field(default_factory=dict)
    blocked: dict[Labels, float] = field(default_factory=dict)
    unmatched: int = 0
    exempt: float = 0
    corrections: int = 0
    decision_seconds: Histogram = field(default_factory=lambda: Histogram.of(SECONDS))
    store_seconds: Histogram = field(default_factory=lambda: Histogram.of(SECONDS))
    script_asks: Histogram = field(default_factory=lambda: Histogram.of(ASKS))
    rates: Gauges = field(default_factory=dict)
    tokens: Gauges = field(default_factory=dict)
    remembered: Gauges = field(default_factory=dict)
    fills: Gauges = field(default_factory=dict)
    accepted: Gauges = field(default_factory=dict)
    held: Gauges = field(default_factory=dict)

    @property
    def gauges(self) -> tuple[Gauges, ...]:
        """Every table that grows with the names it is asked about."""
        return self.rates, self.tokens, self.remembered, self.fills, self.accepted, self.held

    def add(self, other: Counts) -> None:
        """Take in the counts of another process."""
        for name in ("decisions", "shadows", "fallbacks", "blocked"):
            mine: dict[Labels, float] = getattr(self, name)
            for labels, count in getattr(other, name).items():
                mine[labels] = mine.get(labels, 0) + count
        self.unmatched += other.unmatched
        self.exempt += other.exempt
        self.corrections += other.corrections
        self.decision_seconds.add(other.decision_seconds)
        self.store_seconds.add(other.store_seconds)
        self.script_asks.add(other.script_asks)
        for known, its in zip(self.gauges, other.gauges, strict=True):
            _take_in(known, its)


class Metrics:
    """Counts decisions, and shows them to Prometheus.

    Args:
        folder: where the processes of one deployment on one host leave their counts for each other; emptied
            by whoever starts them. None if there is only one.
        clock: the host's monotonic clock, in seconds.
    """

    def __init__(self, folder: Path | None = None, clock: Callable[[], float] = monotonic) -> None:
        self._counts = Counts()
        self._clock = clock
        self._halve_at = clock() + HALF_LIFE_S
        self._file = None if folder is None else folder / f"{os.getpid()}-{secrets.token_hex(4)}.counts"

    def decided(
        self,
        ask: Ask,
        decision: Decision,
        verdicts: Sequence[Verdict],
        fills: Iterable[Fill] = (),
        found: Sequence[Applied] = (),
    ) -> None:
        """Count one decision.

        Args:
            found: the quotas that gave the verdicts, in the same order; none for an answer that was kept,
                whose numbers are old.
        """
        counts = self._counts
        by = decision.limited_by
        labels = (decision.decision, by.quota if by else "", decision.source)
        counts.decisions[labels] = counts.decisions.get(labels, 0) + 1
        if not decision.applied and by is None:
            counts.unmatched += 1
        if ask.cluster_action and ask.mode in ("admit", "record") and not _EXEMPT_USAGE.isdisjoint(ask.usage):
            counts.exempt += ask.usage.get("requests", 1)
        if decision.source != "store" or not found:
            return
        now = self._clock()
        if now >= self._halve_at:
            self._halve(now)
        for verdict, applied in zip(verdicts, found, strict=True):
            if verdict.shadow:
                shadow = (verdict.outcome, verdict.quota)
                counts.shadows[shadow] = counts.shadows.get(shadow, 0) + 1
            throttled = 0.0 if verdict.shadow or ask.mode == "peek" else verdict.throttle_ms / 1000
            place = (verdict.quota, verdict.bucket)
            if applied.quota.algorithm == "token_bucket":
                _touch(counts.tokens, place, now, verdict.remaining, throttled)
            else:
                _touch(counts.rates, place, now, verdict.observed, throttled)
            if verdict.quota == MAX_CONNECTION_CREATION_RATE:
                self._accepted(ask, verdict, now, throttled)
            elif throttled and verdict.quota == CONNECTION_CREATION_RATE:
                _touch(counts.held, (ask.listener or "", "ip"), now, None, throttled)
        for fill in fills:
            _touch(counts.remembered, (fill.bucket,), now, fill.remembered)
            _touch(counts.fills, (fill.bucket,), now, fill.fill)
        if by is not None and by.quota == MAX_CONNECTION_CREATION_RATE and ask.mode != "peek":
            listener = _bounded(counts.blocked, (ask.listener or "",))
            counts.blocked[listener] = counts.blocked.get(listener, 0) + decision.throttle_ms / 1000

    def _accepted(self, ask: Ask, verdict: Verdict, now: float, throttled: float) -> None:
        broker, listener = _broker_and_listener(verdict.bucket)
        _touch(self._counts.accepted, (broker, listener), now, verdict.observed)
        if throttled:
            cause = "listener" if listener else "broker"
            _touch(self._counts.held, (ask.listener or "", cause), now, None, throttled)

    def took(self, seconds: float, asks: int = 1) -> None:
        """Count how long these asks, decided together, waited for their decisions."""
        self._counts.decision_seconds.observe(seconds, asks)

    def called(self, asks: int, seconds: float) -> None:
        """Count one call to the store."""
        self._counts.store_seconds.observe(seconds)
        self._counts.script_asks.observe(asks)

    def fell_back(self, reason: str) -> None:
        """Count an ask that was answered for want of the store."""
        fallbacks = self._counts.fallbacks
        fallbacks[reason,] = fallbacks.get((reason,), 0) + 1

    def corrected(self) -> None:
        """Count a clock that was behind a bucket's newest time."""
        self._counts.corrections += 1

    async def text(self) -> bytes:
        """Every metric, summed over the processes, as Prometheus reads it; put together beside the loop."""
        total = Counts()
        total.add(self._counts)
        return await asyncio.to_thread(self._rendered, total)

    def write(self) -> None:
        """Leave the counts for the other processes."""
        if self._file is not None:
            fresh = self._file.with_suffix(".new")
            fresh.write_bytes(msgpack.encode(self._counts))
            fresh.replace(self._file)

    @contextlib.asynccontextmanager
    async def written(self) -> AsyncIterator[None]:
        """Leave the counts every second, and once more at the end."""
        if self._file is None:
            yield
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        writing = asyncio.create_task(self._write_on(), name="write metrics")
        try:
            yield
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            self.write()

    async def _write_on(self) -> None:
        while True:
            self.write()
            await asyncio.sleep(WRITE_EVERY_S)

    def _rendered(self, total: Counts) -> bytes:
        for file in self._file.parent.glob("*.counts") if self._file else ():
            # A file that another version wrote, or that just went away, is not worth failing a scrape.
            with contextlib.suppress(OSError, MsgspecError):
                if file != self._file:
                    total.add(msgpack.decode(file.read_bytes(), type=Counts))
        quiet = self._clock() - QUIET_S
        for gauges in total.gauges:
            for labels in [labels for labels, gauge in gauges.items() if gauge.at < quiet]:
                del gauges[labels]
        registry = CollectorRegistry()
        registry.register(_Shown(total))
        return generate_latest(registry)

    def _halve(self, now: float) -> None:
        self._halve_at = now + HALF_LIFE_S
        for gauges in self._counts.gauges:
            for labels, gauge in list(gauges.items()):
                gauge.activity /= 2
                gauge.throttled /= 2
                gauge.throttles /= 2
                if gauge.at < now - QUIET_S:
                    del gauges[labels]


def _touch(gauges: Gauges, labels: Labels, now: float, value: float | None, throttled: float = 0.0) -> None:
    gauge = gauges.get(labels)
    if gauge is None:
        if len(gauges) >= KEPT:
            for idle in _by_activity(gauges)[SHOWN:]:
                del gauges[idle]
        gauge = gauges[labels] = Gauge()
    gauge.at = now
    gauge.activity += 1
    if value is not None:
        gauge.value = value
    if throttled:
        gauge.throttled += throttled
        gauge.throttles += 1


def _by_activity(gauges: Gauges) -> list[Labels]:
    return sorted(gauges, key=lambda labels: gauges[labels].activity, reverse=True)


def _bounded(counter: dict[Labels, float], labels: Labels) -> Labels:
    return labels if labels in counter or len(counter) < SHOWN else (OTHER,)


@lru_cache(KEPT)
def _broker_and_listener(bucket: str) -> tuple[str, str]:
    """Where connections are counted, ``""`` for all.

    >>> _broker_and_listener("listener=EXTERNAL;broker=1"), _broker_and_listener("broker=2")
    (('1', 'EXTERNAL'), ('2', ''))
    """
    names = dict(part.split("=", 1) for part in bucket.replace(";", ",").split(","))
    return unquote(names.get("broker", "")), unquote(names.get("listener", ""))


class _Shown(Collector):
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
        _take_in(joined, part)
    return joined


def _take_in(known: Gauges, more: Gauges) -> None:
    for labels, gauge in more.items():
        known.setdefault(labels, Gauge()).add(gauge)


def _means(name: str, text: str, labels: str, gauges: Gauges) -> Metric:
    family = GaugeMetricFamily(f"quotagate_{name}", text, labels=labels.split())
    for values, group in _shown({labels: gauge for labels, gauge in gauges.items() if gauge.throttles}):
        family.add_metric(values, sum(g.throttled for g in group) / sum(g.throttles for g in group))
    return family


def _shown(gauges: Gauges) -> Iterator[tuple[Labels, list[Gauge]]]:
    """The most active label sets, then the rest as ``other``: for each quota, or for all."""
    ranked = _by_activity(gauges)
    for labels in ranked[:SHOWN]:
        yield labels, [gauges[labels]]
    rest: dict[Labels, list[Gauge]] = {}
    for labels in ranked[SHOWN:]:
        kept = labels[:1] if labels[0] in KEYS else (OTHER,) * (len(labels) - 1)
        rest.setdefault((*kept, OTHER), []).append(gauges[labels])
    yield from rest.items()
