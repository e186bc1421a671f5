"""Who of several observers asks the cluster, and what becomes of the answers.

One holds the lease, observes every interval and writes the record; the others wait for the lease. A lease
lasts less than an interval, so a leader that died or hangs is followed by another within two; one that wakes
up late is fenced off by the store (``app/store/lease.py``). All that is known stands in the record, so a new
leader goes on where the old one was.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import Final, Protocol

import structlog

from app.domain.volumes import Observation, ObservationFailed, Rules, State, failed, observed, start
from app.store.lease import Lease
from app.store.port import StoreError
from app.store.volumes import Reading, VolumeRecord, change

LEASE_OF_INTERVAL: Final = 0.6
SHORTEST_LEASE_S: Final = 0.6
LONGEST_LEASE_S: Final = 10.0
BEATS_IN_LEASE: Final = 3
"""How often a lease is renewed, or tried for, while it lasts."""

OBSERVE_OF_INTERVAL: Final = 0.8
"""What part of an interval an observation may take, so that it ends before the next one is due."""

log: Final = structlog.get_logger("quotagate.volumes")


class Source(Protocol):
    """Where observations come from; ``workers/volumes/kafka.py`` is one."""

    async def observe(self, within_s: float) -> Observation:
        """Look at every broker, and end within so many seconds.

        Raises:
            ObservationFailed: the cluster itself could not be described.
        """


def lease_s(rules: Rules) -> float:
    """How long a lease lasts.

    >>> [lease_s(Rules(interval_ms=ms)) for ms in (500, 10_000, 60_000)]
    [0.6, 6.0, 10.0]
    """
    return min(max(rules.interval_ms / 1000 * LEASE_OF_INTERVAL, SHORTEST_LEASE_S), LONGEST_LEASE_S)


class Observer:
    """One of the contenders."""

    def __init__(
        self,
        source: Source,
        record: VolumeRecord,
        lease: Lease,
        rules: Rules,
    ) -> None:
        self._source = source
        self._record = record
        self._lease = lease
        self._rules = rules
        self._clock = asyncio.get_running_loop().time
        self._beat_s = lease_s(rules) / BEATS_IN_LEASE
        self._interval_s = rules.interval_ms / 1000
        self._due = 0.0
        self._observing: asyncio.Task[None] | None = None
        self._said: str | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Contend, and observe while leading, until told to stop."""
        try:
            while not stop.is_set():
                await self._contend()
                busy = self._observing is not None and not self._observing.done()
                if self._lease.token is not None and not busy and self._clock() >= self._due:
                    self._due = self._clock() + self._interval_s
                    self._observing = asyncio.create_task(self._observe(self._lease.token), name="observe")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), self._pause_s())
        finally:
            await self._end()

    def _pause_s(self) -> float:
        leads = self._lease.token is not None
        return max(min(self._beat_s, self._due - self._clock()) if leads else self._beat_s, 0.01)

    async def _contend(self) -> None:
        led = self._lease.token is not None
        try:
            leads = await self._lease.acquire() is not None
        except StoreError as error:
            self._say(f"the store does not answer: {error}")
            return  # whether the lease is still ours is not known; what we write is fenced
        if leads and not led:
            self._due = self._clock()
            log.info("leads the observation of volumes", token=self._lease.token)
        elif led and not leads:
            log.warning("another observer leads now")

    async def _observe(self, token: int) -> None:
        """Look once, and write down what follows."""
        try:
            try:
                seen: Observation | ObservationFailed = await self._source.observe(
                    self._interval_s * OBSERVE_OF_INTERVAL
                )
            except ObservationFailed as error:
                seen = error
            await self._write(seen, token)
        except StoreError as error:
            self._say(f"the store does not answer: {error}")
        except Exception:
            log.exception("an observation of volumes ended in a fault")

    async def _write(self, seen: Observation | ObservationFailed, token: int) -> None:
        said, after = await change(self._record, partial(self._judged, seen), token)
        if said == "written":
            self._tell(after)
        elif said == "fenced":
            log.warning("another observer leads now; what this one saw is dropped", token=token)
        else:
            log.warning("others change the record of volumes all the time; an observation is dropped")

    def _judged(self, seen: Observation | ObservationFailed, reading: Reading) -> State:
        state = reading.state
        if state is None or state.source != self._rules.source:
            state = start(reading.now_ms, self._rules)
        if isinstance(seen, ObservationFailed):
            return failed(state, str(seen), reading.now_ms, self._rules)
        return observed(state, seen, reading.now_ms, self._rules)

    def _tell(self, state: State) -> None:
        known = f"{state.active_brokers} brokers, {len(state.volumes)} volumes"
        self._say(f"{state.trouble}; {state.reason}" if state.trouble else f"all is told: {known}")

    def _say(self, text: str) -> None:
        """Said once for as long as it stays the same."""
        if text != self._said:
            self._said = text
            log.info("volumes", said=text)

    async def _end(self) -> None:
        if self._observing is not None:
            self._observing.cancel()
            await asyncio.gather(self._observing, return_exceptions=True)
        with contextlib.suppress(StoreError):
            await self._lease.release()
        await self._record.close()
        await self._lease.close()
