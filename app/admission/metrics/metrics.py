"""Counts decisions and events as numbers, and renders them for Prometheus at scrape time.

Each API process counts for itself and writes its counts every second to a folder that all share. A scrape of
any process adds up the folder
(``docs/decisions/0003-metrics-of-several-processes-are-added-up-from-files.md``).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import lru_cache
from itertools import cycle
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

import structlog
from msgspec import MsgspecError, Raw, msgpack
from prometheus_client import CollectorRegistry, generate_latest

from app.admission.factor import ThrottlingStatus
from app.admission.metrics.counts import KEPT, SECONDS, Counts, Histogram, Labels, bounded, touch
from app.admission.metrics.exposition import Exposition
from app.admission.metrics.shadows import ShadowTally
from app.admission.metrics.tally import Tally
from app.admission.plan import PlannedAsk
from app.decision_log.status import LogStatus
from app.domain.ask import Ask
from app.domain.binding import parts_of
from app.domain.ladder import EXEMPT_FOR_CLUSTER_ACTIONS
from app.domain.quota import CONNECTION_CREATION_RATE, KEYS, MAX_CONNECTION_CREATION_RATE
from app.node.shortage import Resource, shortage_of
from app.store.port import Answer, Charge, ChargeResult, IdsResult, LeaseResult, Memory, UnitsResult
from app.store.samples import LATENCY_S

HALF_LIFE_S: Final = 30.0
"""The half-life of a gauge's activity, and of the weight of old throttle times in their mean."""
KEEP_EVERY_S: Final = 30.0
"""How often the gauges of a bucket are kept alive while its ids are answered without the store."""
QUIET_S: Final = 120.0
"""A gauge without an update for this long disappears; so does a mean without a throttle time."""
GONE_S: Final = 5.0
"""The age of counts from which their process counts as gone: its store and catalog state is ignored."""
WRITE_EVERY_S: Final = 1.0
PAUSE_FACTOR: Final = 3.0
"""The pause after rendering a page, as a multiple of the time that it took."""

LOG_SHORTAGE_EVERY_S: Final = 10.0
"""How often a shortage is logged while it lasts, for each resource."""

log: Final = structlog.get_logger("quotagate")

_EXEMPT_USAGE: Final = frozenset(KEYS[key].usage for key in EXEMPT_FOR_CLUSTER_ACTIONS)


class Fill(NamedTuple):
    """The contents of a bucket of producer ids.

    Attributes:
        remembered: how many ids it remembers.
        fill: the fill of its filter, from 0 to 1.
        remaining: how many new ids may pass now, minus the ids just refused; so it may be below 0.
    """

    bucket: str
    remembered: float
    fill: float
    remaining: float


class Totals(NamedTuple):
    """The counts of a process since its start, for its samples.

    Attributes:
        counts: by the names of ``app.store.samples.COUNTED``.
        latency: as in ``app.store.samples.ProcessSample``.
        queue_asks: asks that wait for a store call now.
    """

    counts: list[int]
    latency: list[int]
    queue_asks: int


_OUTCOMES: Final = ("admit", "delay", "throttle", "reject")
_WENT_AHEAD: Final = ("admit", "delay")
"""The decisions after which the work goes ahead. Only such asks count for a shadow quota: a refusal of one
that another quota refuses is not caused by it."""
_ALL_SECONDS: Final = tuple(sorted({*SECONDS, *LATENCY_S}))
"""The bounds by which decisions are counted once, for the metric and for the samples."""

Observe = Callable[[Sequence[float]], None]
"""Counts the times of some asks, in seconds."""


class Metrics:
    """Counts decisions, and renders the counts for Prometheus.

    Args:
        folder: where the API processes of a deployment on this host write their counts; the parent process
            empties it at start. None if there is only one process.
        clock: the host's monotonic clock, in seconds.
        catalog_away: returns whether the catalog cannot be reached.
        draining: returns whether the process is stopping.
        waiting: returns how many asks wait for a store call.
        volumes: returns the status of the throttle factor and the volumes.
        log_dropped: returns how many rows the decision log dropped.
        samples_dropped: returns how many samples could not be published.
        log_status: returns the status of the decision log; None before it was read, or without a log.
        store_memory: returns the memory use of the store.
        spans_dropped: returns how many spans were dropped, by reason.

    Attributes:
        observe_decisions: counts the seconds that some asks took.
        observe_queue: counts the seconds that some asks waited in this node for a call.
        throttled: the most throttled buckets since the last sample.
        shadows: the verdicts of shadow quotas since they were last written to the store.
    """

    def __init__(
        self,
        folder: Path | None = None,
        clock: Callable[[], float] = monotonic,
        catalog_away: Callable[[], bool] = lambda: False,
        draining: Callable[[], bool] = lambda: False,
        waiting: Callable[[], int] = lambda: 0,
        volumes: Callable[[], ThrottlingStatus | None] = lambda: None,
        log_dropped: Callable[[], int] = lambda: 0,
        log_status: Callable[[], LogStatus | None] = lambda: None,
        store_memory: Callable[[], Memory | None] = lambda: None,
        samples_dropped: Callable[[], int] = lambda: 0,
        spans_dropped: Callable[[], Mapping[Labels, float]] = dict,
    ) -> None:
        self._store_memory = store_memory
        self._samples_dropped = samples_dropped
        self._spans_dropped = spans_dropped
        self.throttled = Tally()
        self.shadows = ShadowTally()
        self._shadow_refused = 0
        """The asks of ``shadows`` that shadow quotas would have refused, since the start."""
        self._counts = Counts()
        self._decision_seconds = Histogram.of(_ALL_SECONDS)
        self.observe_decisions: Observe = self._decision_seconds.observe
        self._waits: list[float] = []  # not counted yet
        self.observe_queue: Observe = self._waits.extend
        self._catalog_away = catalog_away
        self._draining = draining
        self._waiting = waiting
        self._volumes = volumes
        self._log_dropped = log_dropped
        self._log_status = log_status
        self._clock = clock
        self._halve_next = cycle(self._counts.gauges)
        self._halve_at = clock() + HALF_LIFE_S / len(self._counts.gauges)
        self._shortages_logged: dict[Resource, float] = {}
        """When each shortage was last logged."""
        self._page: asyncio.Task[bytes] | None = None
        self._pauses_until = 0.0  # by the loop's clock
        self._file = None if folder is None else folder / f"{os.getpid()}-{secrets.token_hex(4)}.counts"

    def count(self, planned: PlannedAsk, answer: Answer | None) -> bool:
        """Count the decision on an ask, and the other events in the store's answer.

        Returns:
            whether leases of its buckets ended unsettled.
        """
        counts, ask, decision = self._counts, planned.ask, planned.decision
        assert decision is not None
        by, source = decision.limited_by, decision.source
        labels = decision.decision, "" if by is None else by.quota, source
        counts.decisions[labels] = counts.decisions.get(labels, 0) + 1
        if by is None:
            if not decision.applied:
                counts.unmatched += 1
        elif decision.throttle_ms and by.bucket is not None and ask.mode != "peek":
            self.throttled.add(by.quota, by.bucket, decision.throttle_ms)
        if ask.cluster_action and ask.mode in ("admit", "record") and not _EXEMPT_USAGE.isdisjoint(ask.usage):
            counts.exempt += ask.usage.get("requests", 1)
        plan = planned.plan
        if answer is None:
            if plan is None and planned.known is not None:
                self._shadowed(planned, planned.charges[0], "admit")
            return False
        charges = planned.charges if plan is None else plan.charges
        has_lapsed = answer.earlier is not None and self._count_earlier(answer.earlier)
        if answer.kept is not None:  # its numbers are old
            return has_lapsed
        now = self._clock()
        if now >= self._halve_at:
            self._halve(now)
        is_shown = source == "store"
        if is_shown and planned.known is not None:
            charge = planned.charges[0]
            self._shadowed(planned, charge, "admit")
            touch(counts.rates, (charge.quota.key, charge.bucket), now, None)
        for charge, result in zip(charges, answer.results, strict=True):
            if result.correction:
                counts.corrections += 1
            if isinstance(result, UnitsResult) and (result.lapsed or result.forgiven):
                counts.forgiven += result.forgiven
                has_lapsed |= result.lapsed > 0
            if not is_shown:
                continue
            compiled = charge.compiled
            if result.throttle_ms or not compiled.is_shown_alone:
                self._show(planned, charge, result, now)
            elif compiled.quota.algorithm == "token_bucket":
                touch(counts.tokens, (compiled.quota.key, charge.bucket), now, result.remaining)
            else:
                touch(counts.rates, (compiled.quota.key, charge.bucket), now, result.observed)
        if by is not None and by.quota == MAX_CONNECTION_CREATION_RATE and ask.mode != "peek":
            listener = bounded(counts.blocked, (ask.listener or "",))
            counts.blocked[listener] = counts.blocked.get(listener, 0) + decision.throttle_ms / 1000
        return has_lapsed

    def _show(self, planned: PlannedAsk, charge: Charge, result: ChargeResult, now: float) -> None:
        """Update the gauges of a bucket from the store's result."""
        counts, compiled, throttled = self._counts, charge.compiled, 0.0
        quota, ask = compiled.quota, planned.ask
        if compiled.shadow:
            self._shadowed(planned, charge, result.outcome)
        elif result.throttle_ms and ask.mode != "peek":
            throttled = result.throttle_ms / 1000
        if quota.algorithm == "token_bucket":
            touch(counts.tokens, (quota.key, charge.bucket), now, result.remaining, throttled)
        else:
            touch(counts.rates, (quota.key, charge.bucket), now, result.observed, throttled)
        if compiled.counts_ids and isinstance(result, IdsResult):
            left = result.remaining - _refused_ids(ask, charge, result)
            self._filled(Fill(charge.bucket, result.remembered, result.fill, left), now)
        elif compiled.field == "connections":
            if quota.key == MAX_CONNECTION_CREATION_RATE:
                self._accepted(ask, charge.bucket, result.observed, now, throttled)
            elif throttled and quota.key == CONNECTION_CREATION_RATE:
                touch(counts.held, (ask.listener or "", "ip"), now, None, throttled)

    def _count_earlier(self, answer: Answer) -> bool:
        """Count the events of earlier tries of an ask; return whether leases lapsed."""
        has_lapsed = False
        for each in answer.tries:
            if each.kept is not None:
                continue
            for result in each.results:
                self._counts.corrections += result.correction > 0
                if isinstance(result, UnitsResult):
                    self._counts.forgiven += result.forgiven
                    has_lapsed |= result.lapsed > 0
        return has_lapsed

    def _shadowed(self, planned: PlannedAsk, charge: Charge, outcome: str) -> None:
        """Count the outcome of a quota, if it is in shadow mode."""
        period = charge.compiled.shadow
        if period is not None:
            labels = (outcome, period.quota)
            self._counts.shadows[labels] = self._counts.shadows.get(labels, 0) + 1
            decision = planned.decision
            is_ask = planned.ask.mode in ("admit", "record")
            if decision is not None and decision.decision in _WENT_AHEAD and is_ask:
                self.shadows.add(period, outcome)
                self._shadow_refused += outcome in ("throttle", "reject")

    def _filled(self, fill: Fill, now: float) -> None:
        counts, labels = self._counts, (fill.bucket,)
        touch(counts.remembered, labels, now, fill.remembered)
        touch(counts.fills, labels, now, fill.fill)
        touch(counts.remaining, labels, now, fill.remaining)

    def _accepted(self, ask: Ask, bucket: str, observed: float, now: float, throttled: float) -> None:
        broker, listener = _broker_and_listener(bucket)
        touch(self._counts.accepted, (broker, listener), now, observed)
        if throttled:
            cause = "listener" if listener else "broker"
            touch(self._counts.held, (ask.listener or "", cause), now, None, throttled)

    def count_local(self, quota: str, bucket: str, ids: int) -> None:
        """Count ids that were answered without the store, and keep the gauges of their bucket.

        A remainder below 0 becomes 0: the ask that was refused last no longer counts.
        """
        counts = self._counts
        counts.local_ids += ids
        gauge = counts.remembered.get((bucket,))
        if gauge is not None and (now := self._clock()) > gauge.at + KEEP_EVERY_S:
            touch(counts.remembered, (bucket,), now, None)
            touch(counts.fills, (bucket,), now, None)
            left = counts.remaining[bucket,].value if (bucket,) in counts.remaining else None
            touch(counts.remaining, (bucket,), now, None if left is None else max(left, 0.0))
            touch(counts.rates, (quota, bucket), now, None)

    def count_renewal(self, fill: Fill) -> None:
        """Count a renewal of ids, and note the fill of their bucket."""
        self._counts.renewals += 1
        self._filled(fill, self._clock())

    def set_known_ids(self, ids: int) -> None:
        """Note how many producer ids this node knows."""
        self._counts.known_ids = ids

    def count_shed(self, cause: str) -> None:
        """Count a request that was shed."""
        _increment(self._counts.shed, cause)

    def count_refused_connection(self, port: str, reason: str) -> None:
        """Count a connection that was closed at a bound, or because its first request was late."""
        refused = self._counts.refused_connections
        refused[port, reason] = refused.get((port, reason), 0) + 1

    def count_shortage(self, resource: Resource, error: Exception) -> None:
        """Count something that failed because this process was short of a resource; log it now and then."""
        _increment(self._counts.shortages, resource)
        now = self._clock()
        if now - self._shortages_logged.get(resource, -math.inf) >= LOG_SHORTAGE_EVERY_S:
            self._shortages_logged[resource] = now
            log.warning("this node is short of a resource", resource=resource, why=str(error))

    def count_unsent_answer(self) -> None:
        """Count an answer that could not be written to its connection."""
        self._counts.unsent_answers += 1

    def count_handed_over_connection(self) -> None:
        """Count a connection that went to uvicorn's protocol for good."""
        self._counts.connections_handed_over += 1

    def count_envoy_request(self, outcome: str, unmapped: int = 0) -> None:
        """Count an answer of the rate-limit service for Envoy, and its descriptors that named nothing."""
        _increment(self._counts.envoy_requests, outcome)
        self._counts.unmapped_descriptors += unmapped

    def count_unusable_descriptor(self, reason: str) -> None:
        """Count a part of a descriptor of Envoy that was left out."""
        _increment(self._counts.unusable_descriptors, reason)

    def observe_call(self, asks: int, seconds: float) -> None:
        """Count one store call, and the waits of all asks that were sent since the last count."""
        self._counts.store_seconds.observe((seconds,))
        self._counts.script_asks.observe((asks,))
        self._count_waits()

    def _count_waits(self) -> None:
        self._counts.queue_seconds.observe(self._waits)
        self._waits.clear()

    def count_fallback(self, reason: str) -> None:
        """Count an ask that was answered without the store."""
        _increment(self._counts.fallbacks, reason)

    def count_failure(self, reason: str) -> None:
        """Count a failed store call or store examination."""
        _increment(self._counts.failures, reason)

    def count_refusal(self, reason: str) -> None:
        """Count a request that access control refused."""
        _increment(self._counts.access_failures, reason)

    def set_store_state(self, *, away: bool, faults: Sequence[str]) -> None:
        """Note whether the circuit is open, and the store's misconfigurations."""
        counts = self._counts
        counts.stores_away, counts.store_faults = int(away), set(faults)

    def count_lease(self, outcome: str) -> None:
        """Count a lease that was ``granted`` or ``refused``, ``settled``, or ``unknown`` when settled."""
        _increment(self._counts.leases, outcome)

    def count_leased(self, charges: Sequence[Charge], answer: Answer) -> None:
        """Note the units that buckets hold for leases."""
        now = self._clock()
        for charge, result in zip(charges, answer.results, strict=True):
            if isinstance(result, LeaseResult):
                touch(self._counts.leased, (charge.quota.key, charge.bucket), now, result.held)

    def count_lapsed(self, units: float) -> None:
        """Count units of leases that ended unsettled."""
        self._counts.lapsed += units

    async def text(self) -> bytes:
        """Return all metrics, summed over the processes, in Prometheus' text format.

        Scrapes that arrive while a page is being rendered share it. A pause of three times the rendering time
        follows each page, so that constant scraping uses at most a quarter of a processor.
        """
        if self._page is None:
            self._page = asyncio.create_task(self._made(), name="make a page of metrics")
            self._page.add_done_callback(self._finished)
        return await asyncio.shield(self._page)

    def _finished(self, _page: asyncio.Task[bytes]) -> None:
        self._page = None

    async def _made(self) -> bytes:
        """Make a page: copy the counts in slices on the event loop, and render them in a thread."""
        loop = asyncio.get_running_loop()
        if (pause_s := self._pauses_until - loop.time()) > 0:
            await asyncio.sleep(pause_s)
        began = loop.time()
        try:
            throttling, total = self._update(), Counts()
            for _ in total.add_in_slices(self._counts):
                await asyncio.sleep(0)
            return await asyncio.to_thread(self._rendered, total, throttling, self._log_status())
        finally:
            self._pauses_until = loop.time() + PAUSE_FACTOR * (loop.time() - began)

    def totals(self) -> Totals:
        """Return what the samples of this process count."""
        counts = self._counts
        by_outcome, by_source = dict.fromkeys(_OUTCOMES, 0.0), {"local": 0.0, "fallback": 0.0}
        for (outcome, _, source), asks in counts.decisions.items():
            by_outcome[outcome] += asks
            if source in by_source:
                by_source[source] += asks
        latency = Histogram.of(LATENCY_S)
        latency.add(self._decision_seconds)
        shed = sum(counts.shed.values())
        numbers = (*by_outcome.values(), *by_source.values(), shed, self._shadow_refused)
        return Totals([int(number) for number in numbers], latency.counts, self._waiting())

    def write(self) -> None:
        """Write the counts for the other processes."""
        self._update()
        self._keep(dict(self._counts.encoded(self._clock())))

    def _keep(self, encoded: Mapping[str, Raw]) -> None:
        """Write encoded counts to the file."""
        if self._file is not None:
            fresh = self._file.with_suffix(".new")
            fresh.write_bytes(msgpack.encode(encoded))
            fresh.replace(self._file)

    @contextlib.asynccontextmanager
    async def written(self) -> AsyncIterator[None]:
        """Write the counts every second, and once more at the end."""
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
            with contextlib.suppress(OSError):
                self.write()

    async def _write_on(self) -> None:
        while True:
            self._update()
            encoded: dict[str, Raw] = {}
            for name, field in self._counts.encoded(self._clock()):
                encoded[name] = field
                await asyncio.sleep(0)  # 4,000 entries take a millisecond
            try:
                self._keep(encoded)
            except OSError as error:  # the file stays as it was, and is written again
                resource = shortage_of(error)
                if resource is None:
                    log.warning("the counts of this process cannot be written", why=str(error))
                else:
                    self.count_shortage(resource, error)
            await asyncio.sleep(WRITE_EVERY_S)

    def _update(self) -> ThrottlingStatus | None:
        """Update the counts that are kept elsewhere, and return the status of the factor."""
        self._count_waits()
        self._counts.decision_seconds = Histogram.of(SECONDS)
        self._counts.decision_seconds.add(self._decision_seconds)
        self._counts.catalogs_away = int(self._catalog_away())
        self._counts.draining = int(self._draining())
        self._counts.queue_asks = self._waiting()
        throttling = self._volumes()
        self._counts.factor_fallbacks = throttling.fallbacks if throttling else 0
        self._counts.log_dropped = self._log_dropped()
        self._counts.samples_dropped = self._samples_dropped()
        self._counts.spans_dropped = dict(self._spans_dropped())
        return throttling

    def _rendered(self, total: Counts, throttling: ThrottlingStatus | None, log: LogStatus | None) -> bytes:
        now = self._clock()
        for file in self._file.parent.glob("*.counts") if self._file else ():
            # A file of another version, or one just deleted, must not fail the scrape.
            with contextlib.suppress(OSError, MsgspecError):
                if file != self._file:
                    counts = msgpack.decode(file.read_bytes(), type=Counts)
                    if counts.written_at < now - GONE_S:
                        counts.stores_away = counts.catalogs_away = counts.queue_asks = 0
                        counts.store_faults = set()
                        counts.draining = 0
                        counts.known_ids = 0
                    total.add(counts)
        quiet = now - QUIET_S
        for gauges in total.gauges:
            for labels, gauge in list(gauges.items()):
                if gauge.at < quiet:
                    del gauges[labels]
                elif gauge.throttled_at < quiet:
                    gauge.throttled = gauge.throttles = 0.0
        registry = CollectorRegistry()
        registry.register(Exposition(total, throttling, log, self._store_memory()))
        return generate_latest(registry)

    def _halve(self, now: float) -> None:
        """Halve the gauges of one name; the others follow in turn, each once in a half-life."""
        self._halve_at = now + HALF_LIFE_S / len(self._counts.gauges)
        gauges = next(self._halve_next)
        for labels, gauge in list(gauges.items()):
            gauge.activity /= 2
            gauge.throttled /= 2
            gauge.throttles /= 2
            if gauge.at < now - QUIET_S:
                del gauges[labels]


def _increment(counter: dict[Labels, float], label: str) -> None:
    counter[label,] = counter.get((label,), 0) + 1


def _refused_ids(ask: Ask, charge: Charge, result: IdsResult) -> int:
    """How many new ids a quota refused; all ids of an ask with more than the quota can ever hold.

    A shadow quota charges the ids that it would refuse, so the remainder already includes them.
    """
    if ask.mode == "peek" or charge.quota.shadow:
        return 0
    return int(charge.usage) if result.outcome == "reject" else result.unseen


@lru_cache(KEPT)
def _broker_and_listener(bucket: str) -> tuple[str, str]:
    """Return the broker and the listener of a connection bucket, ``""`` for all.

    >>> _broker_and_listener("listener=EXTERNAL;broker=1"), _broker_and_listener("broker=2")
    (('1', 'EXTERNAL'), ('2', ''))
    """
    names = parts_of(bucket)
    return names.get("broker", ""), names.get("listener", "")
