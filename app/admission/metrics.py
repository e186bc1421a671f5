"""What happened, counted: plain numbers on the decision path, Prometheus' words at scrape time.

Each API process counts for itself and writes its counts into a folder that they share; a scrape of any of
them adds up the folder (``docs/decisions``, metrics of several processes).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple, Protocol
from urllib.parse import unquote

from msgspec import MsgspecError, msgpack
from prometheus_client import CollectorRegistry, generate_latest

from app.admission.counts import KEPT, Counts, bounded, touch
from app.admission.exposition import Exposition
from app.admission.throttling import Standing
from app.domain.ask import Ask
from app.domain.decision import Decision, Verdict
from app.domain.ladder import EXEMPT_FOR_CLUSTER_ACTIONS, Applied
from app.domain.quota import CONNECTION_CREATION_RATE, KEYS, MAX_CONNECTION_CREATION_RATE
from app.store.decision_log_standing import LogStanding
from app.store.port import Memory

HALF_LIFE_S: Final = 30.0
"""Activity, and the weight of old throttle times in their mean, halve this often."""
QUIET_S: Final = 120.0
"""What nothing touched for so long is gone, and so is a mean without a throttle time for so long."""
STANDING_S: Final = 5.0
"""A process that has not left its counts for so long is gone: what was away from it says nothing any more."""
WRITE_EVERY_S: Final = 1.0
RESTS: Final = 3.0
"""After a page of metrics none is made for so many times as long as it took."""

_EXEMPT_USAGE: Final = frozenset(KEYS[key].usage for key in EXEMPT_FOR_CLUSTER_ACTIONS)


class Logged(Protocol):
    """The decision log; ``app.admission.decision_log`` is it.

    Attributes:
        dropped: rows that could not be logged, for want of room or otherwise.
        standing: how it stood when it was looked at last.
    """

    dropped: int
    standing: LogStanding | None


class Fill(NamedTuple):
    """How many producer ids a bucket remembers, and what part of its filter is set."""

    bucket: str
    remembered: int
    fill: float


class Metrics:
    """Counts decisions, and shows them to Prometheus.

    Args:
        folder: where the processes of one deployment on one host leave their counts for each other; emptied
            by whoever starts them. None if there is only one.
        clock: the host's monotonic clock, in seconds.
        catalog_away: says whether the catalog is out of reach.
        waiting: says how many asks wait for a call to the store.
        volumes: says how volumes and the throttle factor stand.
        logged: the decision log, which says how it stands and what it dropped.
        store_memory: says what the store uses of its memory.
    """

    def __init__(
        self,
        folder: Path | None = None,
        clock: Callable[[], float] = monotonic,
        catalog_away: Callable[[], bool] = lambda: False,
        waiting: Callable[[], int] = lambda: 0,
        volumes: Callable[[], Standing | None] = lambda: None,
        logged: Logged | None = None,
        store_memory: Callable[[], Memory | None] = lambda: None,
    ) -> None:
        self._store_memory = store_memory
        self._counts = Counts()
        self._catalog_away = catalog_away
        self._waiting = waiting
        self._volumes = volumes
        self._logged = logged
        self._clock = clock
        self._halve_at = clock() + HALF_LIFE_S
        self._page: asyncio.Task[bytes] | None = None
        self._rests_until = 0.0  # by the loop's clock
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
                touch(counts.tokens, place, now, verdict.remaining, throttled)
            else:
                touch(counts.rates, place, now, verdict.observed, throttled)
            if verdict.quota == MAX_CONNECTION_CREATION_RATE:
                self._accepted(ask, verdict, now, throttled)
            elif throttled and verdict.quota == CONNECTION_CREATION_RATE:
                touch(counts.held, (ask.listener or "", "ip"), now, None, throttled)
        for fill in fills:
            touch(counts.remembered, (fill.bucket,), now, fill.remembered)
            touch(counts.fills, (fill.bucket,), now, fill.fill)
        if by is not None and by.quota == MAX_CONNECTION_CREATION_RATE and ask.mode != "peek":
            listener = bounded(counts.blocked, (ask.listener or "",))
            counts.blocked[listener] = counts.blocked.get(listener, 0) + decision.throttle_ms / 1000

    def _accepted(self, ask: Ask, verdict: Verdict, now: float, throttled: float) -> None:
        broker, listener = _broker_and_listener(verdict.bucket)
        touch(self._counts.accepted, (broker, listener), now, verdict.observed)
        if throttled:
            cause = "listener" if listener else "broker"
            touch(self._counts.held, (ask.listener or "", cause), now, None, throttled)

    def took(self, seconds: float, asks: int = 1) -> None:
        """Count how long these asks, decided together, waited for their decisions."""
        self._counts.decision_seconds.observe(seconds, asks)

    def queued(self, seconds: float, asks: int = 1) -> None:
        """Count how long these asks waited in this node until they left for the store."""
        self._counts.queue_seconds.observe(seconds, asks)

    def shed(self, cause: str) -> None:
        """Count a request, or a connection, that was not taken in."""
        shed = self._counts.shed
        shed[cause,] = shed.get((cause,), 0) + 1

    def called(self, asks: int, seconds: float) -> None:
        """Count one call to the store."""
        self._counts.store_seconds.observe(seconds)
        self._counts.script_asks.observe(asks)

    def fell_back(self, reason: str) -> None:
        """Count an ask that was answered for want of the store."""
        fallbacks = self._counts.fallbacks
        fallbacks[reason,] = fallbacks.get((reason,), 0) + 1

    def failed(self, reason: str) -> None:
        """Count a call to the store, or an examination of it, that failed."""
        failures = self._counts.failures
        failures[reason,] = failures.get((reason,), 0) + 1

    def refused(self, reason: str) -> None:
        """Count a request that was refused for want of access."""
        failures = self._counts.access_failures
        failures[reason,] = failures.get((reason,), 0) + 1

    def store_is(self, *, away: bool, faults: Sequence[str]) -> None:
        """Take down how the store is now."""
        counts = self._counts
        counts.stores_away, counts.store_faults = int(away), set(faults)

    def corrected(self) -> None:
        """Count a clock that was behind a bucket's newest time."""
        self._counts.corrections += 1

    def forgave(self, units: float) -> None:
        """Count what of a debt was forgiven."""
        self._counts.forgiven += units

    async def text(self) -> bytes:
        """Every metric, summed over the processes, as Prometheus reads it.

        Who asks while a page is being made is given that one: many scrapes at once cost as much as one. A
        page is followed by a rest, so that scrapes without end take a part of a processor and no more.
        """
        if self._page is None:
            self._page = asyncio.create_task(self._made(), name="make a page of metrics")
            self._page.add_done_callback(self._finished)
        return await asyncio.shield(self._page)

    def _finished(self, _page: asyncio.Task[bytes]) -> None:
        self._page = None

    async def _made(self) -> bytes:
        """A page: the counts are copied in slices, and put together beside the loop."""
        loop = asyncio.get_running_loop()
        if (rest_s := self._rests_until - loop.time()) > 0:
            await asyncio.sleep(rest_s)
        began = loop.time()
        try:
            return await self._put_together()
        finally:
            self._rests_until = loop.time() + RESTS * (loop.time() - began)

    async def _put_together(self) -> bytes:
        standing = self._look()
        total = Counts()
        for _ in total.added(self._counts):
            await asyncio.sleep(0)
        return await asyncio.to_thread(
            self._rendered, total, standing, self._logged.standing if self._logged else None
        )

    def write(self) -> None:
        """Leave the counts for the other processes."""
        if self._file is not None:
            self._look()
            self._counts.written_at = self._clock()
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

    def _look(self) -> Standing | None:
        """Take down what others know."""
        self._counts.catalogs_away = int(self._catalog_away())
        self._counts.queue_asks = self._waiting()
        standing = self._volumes()
        self._counts.factor_fallbacks = standing.fallbacks if standing else 0
        self._counts.log_dropped = self._logged.dropped if self._logged else 0
        return standing

    def _rendered(self, total: Counts, volumes: Standing | None, log: LogStanding | None) -> bytes:
        now = self._clock()
        for file in self._file.parent.glob("*.counts") if self._file else ():
            # A file that another version wrote, or that just went away, is not worth failing a scrape.
            with contextlib.suppress(OSError, MsgspecError):
                if file != self._file:
                    its = msgpack.decode(file.read_bytes(), type=Counts)
                    if its.written_at < now - STANDING_S:
                        its.stores_away, its.store_faults, its.catalogs_away, its.queue_asks = 0, set(), 0, 0
                    total.add(its)
        quiet = now - QUIET_S
        for gauges in total.gauges:
            for labels in [labels for labels, gauge in gauges.items() if gauge.at < quiet]:
                del gauges[labels]
            for gauge in gauges.values():
                if gauge.throttled_at < quiet:
                    gauge.throttled = gauge.throttles = 0.0
        registry = CollectorRegistry()
        registry.register(Exposition(total, volumes, log, self._store_memory()))
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


@lru_cache(KEPT)
def _broker_and_listener(bucket: str) -> tuple[str, str]:
    """Where connections are counted, ``""`` for all.

    >>> _broker_and_listener("listener=EXTERNAL;broker=1"), _broker_and_listener("broker=2")
    (('1', 'EXTERNAL'), ('2', ''))
    """
    names = dict(part.split("=", 1) for part in bucket.replace(";", ",").split(","))
    return unquote(names.get("broker", "")), unquote(names.get("listener", ""))
