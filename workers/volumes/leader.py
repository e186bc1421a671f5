"""The observer: one of several leads, asks the cluster every interval and writes the volume record.

The leader holds a lease; the others wait for it. The lease is shorter than an interval, so if the leader dies
or hangs, another takes over within two intervals. A former leader that wakes up late is fenced off by the
store (``app/store/leader_election.py``). All state is in the record, so a new leader continues where the
old one stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import Final, Protocol

import structlog

from app.domain.errors import ObservationError
from app.domain.volumes import (
    FactorState,
    Observation,
    VolumeRules,
    after_failure,
    after_observation,
    start_state,
)
from app.store.leader_election import Contender
from app.store.port import StoreError
from app.store.volumes import Reading, VolumeRecord, change

LEASE_FRACTION: Final = 0.6
MIN_LEASE_S: Final = 0.6
MAX_LEASE_S: Final = 10.0
BEATS_PER_LEASE: Final = 3
"""How often the lease is extended, or requested, during its length."""

OBSERVE_FRACTION: Final = 0.8
"""The fraction of an interval that an observation may take, so that it ends before the next is due."""

log: Final = structlog.get_logger("quotagate.volumes")


class VolumeSource(Protocol):
    """A source of observations, such as ``workers/volumes/kafka.py``."""

    async def observe(self, within_s: float) -> Observation:
        """Observe every broker, and return within so many seconds.

        Raises:
            ObservationError: the cluster itself could not be described.
        """


def lease_s(rules: VolumeRules) -> float:
    """Return the length of a lease in seconds.

    >>> [lease_s(VolumeRules(interval_ms=ms)) for ms in (500, 10_000, 60_000)]
    [0.6, 6.0, 10.0]
    """
    return min(max(rules.interval_ms / 1000 * LEASE_FRACTION, MIN_LEASE_S), MAX_LEASE_S)


class Observer:
    """One of the processes that contend for the lease."""

    def __init__(
        self,
        source: VolumeSource,
        record: VolumeRecord,
        lease: Contender,
        rules: VolumeRules,
    ) -> None:
        self._source = source
        self._record = record
        self._lease = lease
        self._rules = rules
        self._clock = asyncio.get_running_loop().time
        self._beat_s = lease_s(rules) / BEATS_PER_LEASE
        self._interval_s = rules.interval_ms / 1000
        self._due = 0.0
        self._observing: asyncio.Task[None] | None = None
        self._status: str | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Contend for the lease, and observe while leading, until ``stop`` is set."""
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
            self._log_change(f"the store does not answer: {error}")
            return  # unknown whether the lease is still ours, but writes are fenced
        if leads and not led:
            self._due = self._clock()
            log.info("volume observer leads", token=self._lease.token)
        elif led and not leads:
            log.warning("volume observer lost the lease to another")

    async def _observe(self, token: int) -> None:
        """Observe once, and write the result to the record."""
        try:
            try:
                seen: Observation | ObservationError = await self._source.observe(
                    self._interval_s * OBSERVE_FRACTION
                )
            except ObservationError as error:
                seen = error
            await self._write(seen, token)
        except StoreError as error:
            self._log_change(f"the store does not answer: {error}")
        except Exception:
            log.exception("volume observation failed")

    async def _write(self, seen: Observation | ObservationError, token: int) -> None:
        result, after = await change(self._record, partial(self._next_state, seen), token)
        if result == "written":
            self._log_state(after)
        elif result == "fenced":
            log.warning("volume observation dropped: another observer leads now", token=token)
        else:
            log.warning("volume observation dropped: the record changed on every attempt")

    async def _next_state(self, seen: Observation | ObservationError, reading: Reading) -> FactorState:
        state = reading.state
        if state is None or state.source != self._rules.source:
            state = start_state(reading.now_ms, self._rules)
        if isinstance(seen, ObservationError):
            return after_failure(state, str(seen), reading.now_ms, self._rules)
        return after_observation(state, seen, reading.now_ms, self._rules)

    def _log_state(self, state: FactorState) -> None:
        known = f"{state.active_brokers} brokers, {len(state.volumes)} volumes"
        self._log_change(f"{state.trouble}; {state.reason}" if state.trouble else f"complete: {known}")

    def _log_change(self, status: str) -> None:
        """Log a status that differs from the previous one."""
        if status != self._status:
            self._status = status
            log.info("volumes observed", status=status)

    async def _end(self) -> None:
        if self._observing is not None:
            self._observing.cancel()
            await asyncio.gather(self._observing, return_exceptions=True)
        with contextlib.suppress(StoreError):
            await self._lease.release()
        await self._record.close()
        await self._lease.close()
