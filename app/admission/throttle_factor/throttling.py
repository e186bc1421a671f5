"""The node's view of the throttle factor.

The node reads the record of volumes from the store four times a second, together with the store's time, and
advances that time by its own monotonic clock. Decisions use this view and never ask the store for the factor.
Each node judges by itself whether the last observation is still valid, so it notices when a worker, a source
or the store is away.
"""

from __future__ import annotations

import asyncio
import time
from asyncio import sleep, to_thread
from collections.abc import Callable
from typing import Final, TypeVar

import structlog

from app.admission.factor import FactorSource, ThrottlingStatus
from app.admission.throttle_factor.caller_clock import CallerTime
from app.domain.ask import Ask
from app.domain.quota import PRODUCER_BYTE_RATE, Quota
from app.domain.volumes import (
    CurrentFactor,
    Drill,
    FactorState,
    Observation,
    VolumeRules,
    after_forgetting,
    after_missed_pushes,
    after_observation,
    factor_in_force,
    missed_pushes,
    scaled_quota,
    start_state,
    suspension_ms,
)
from app.node.tasks import end
from app.store.port import StoreError
from app.store.volumes import Reading, VolumeRecord, change

T = TypeVar("T")

FOLLOW_EVERY_S: Final = 0.25
SUSPENDED_MODES: Final = frozenset({"admit", "peek"})
"""The modes that the factor applies to; records are for work already done, and refunds give back."""

log: Final = structlog.get_logger("quotagate.volumes")


class Throttling(FactorSource):
    """Follows the record of volumes and gives the factor in force.

    Args:
        callers: the time under the caller's clock; None under the store's clock.
        changed: called with the old and the new factor when the factor changes on this node.
        away: returns whether the store is known to be away; the record is not read then.
    """

    def __init__(
        self,
        record: VolumeRecord,
        rules: VolumeRules,
        callers: CallerTime | None = None,
        *,
        changed: Callable[[object, object], None] = lambda *_: None,
        away: Callable[[], bool] = lambda: False,
    ) -> None:
        self.rules = rules
        self._changed = changed
        self._away = away
        self._record = record
        self._callers = callers
        self._lock = asyncio.Lock()
        """Serialises reads and writes, so that a read cannot overwrite a later state with an older one."""
        self._state: FactorState | None = None
        self._late: tuple[FactorState, int, FactorState] | None = None
        """A state, the number of pushes missed since, and the state that follows from them."""
        self._drill: Drill | None = None
        self._ahead_ms = time.time_ns() // 1_000_000 - _monotonic_ms()
        """The store's time minus this process's monotonic time; by the host's clock until the first read."""
        self._following: asyncio.Task[None] | None = None
        self._last: CurrentFactor | None = None
        self._fallbacks = 0

    async def open(self) -> None:
        """Read the record now, and follow it from then on."""
        await self._follow_once()
        self._following = asyncio.create_task(self._follow(), name="follow the throttle factor")

    async def close(self) -> None:
        """Stop following."""
        await end(self._following)

    def at(self, at_ms: int | None = None) -> CurrentFactor:
        """Return the factor in force now, or at a caller's time."""
        now_ms = self.now_ms(at_ms)
        if self._state is None:
            self._begin(at_ms)
        return factor_in_force(self._as_of(now_ms), self._drill_as_of(at_ms), now_ms, self.rules)

    def on(self, ask: Ask) -> float:
        """Return the factor for an ask; 1 if the factor does not apply to it."""
        if self._state is None and self._drill is None and not self.rules.observes:
            return 1.0
        if ask.mode not in SUSPENDED_MODES or ask.principal in self.rules.excluded:
            return 1.0
        return self.at(ask.at_ms).factor

    def limit_now(self, quota: Quota, ask: Ask) -> float:
        """Return the limit of a quota for an ask, scaled by the factor in force."""
        if quota.key != PRODUCER_BYTE_RATE or (factor := self.on(ask)) == 1:
            return quota.limit
        return scaled_quota(quota, factor).limit if factor else 0.0

    def suspension_ms(self, at_ms: int | None) -> int:
        """Return how long an ask to produce must wait while the factor is 0."""
        return suspension_ms(self.at(at_ms).next_check_ms, self.now_ms(at_ms), self.rules)

    def status(self, at_ms: int | None = None) -> ThrottlingStatus:
        """Return the factor and the volumes now, or at a caller's time."""
        now_ms, found = self.now_ms(at_ms), self.at(at_ms)
        drill = self._drill_as_of(at_ms)
        drill = drill if drill and drill.is_active(now_ms) else None
        if at_ms is None:
            self._note()
        return ThrottlingStatus(now_ms, self.rules, found, self._state, drill, self._fallbacks)

    async def refresh(self) -> None:
        """Read the record now.

        Raises:
            StoreError: the store did not answer.
        """
        async with self._lock:
            self._take(await self._record.read())

    async def push(self, seen: Observation, at_ms: int | None) -> None:
        """Apply an observation that was made now, or at a caller's time, and write it to the record.

        Raises:
            VolumeCountError: the observation is of a part of the cluster; too many volumes would be known.
            StoreError: the store did not answer; the observation may have been written.
        """
        await self._change(after_observation, seen, at_ms)

    async def forget(self, broker: str, at_ms: int | None) -> None:
        """Forget the volumes of a broker, now or at a caller's time.

        Raises:
            UnknownBrokerError: no volume of this broker is known.
            StoreError: the store did not answer; the volumes may be forgotten.
        """
        await self._change(after_forgetting, broker, at_ms)

    async def _change(
        self, follow: Callable[[FactorState, T, int, VolumeRules], FactorState], by: T, at_ms: int | None
    ) -> None:
        """Replace the recorded state by the state that follows from an event."""

        async def judged(reading: Reading) -> FactorState:
            self._take(reading)
            self._note(at_ms)  # note the factor in force until now, such as a fallback
            now_ms = self.now_ms(at_ms)
            state = self._state or start_state(now_ms, self.rules)
            return await to_thread(follow, state, by, now_ms, self.rules)

        async with self._lock:
            outcome, state = await change(self._record, judged)
            if outcome != "written":
                raise StoreError("contention", "other writers keep changing the record of volumes")
            self._state = state
            self._note()

    async def begin_drill(self, drill: Drill) -> None:
        """Set a fixed factor for a while, regardless of the volumes.

        Raises:
            StoreError: the store did not answer; the drill may have begun.
        """
        async with self._lock:
            await self._record.begin_drill(drill, self.now_ms())
            self._drill = drill
            self._note()

    async def end_drill(self) -> None:
        """End the drill.

        Raises:
            StoreError: the store did not answer; the drill may have ended.
        """
        async with self._lock:
            await self._record.end_drill()
            self._drill = None
            self._note()

    def now_ms(self, at_ms: int | None = None) -> int:
        """Return the store's time; under the caller's clock ``at_ms``, or else the newest time of any ask."""
        if self._callers is not None:
            return self._callers.newest_ms if at_ms is None else at_ms
        return _monotonic_ms() + self._ahead_ms

    def _as_of(self, now_ms: int) -> FactorState | None:
        """Return the state after the missed pushes, computed once per interval.

        Every ask to produce needs it, and it is as large as the cluster.
        """
        state = self._state
        if state is None or (ticks := missed_pushes(state, now_ms, self.rules)) < 1:
            return state
        if self._late is None or self._late[0] is not state or self._late[1] != ticks:
            self._late = state, ticks, after_missed_pushes(state, now_ms, self.rules)
        return self._late[2]

    def _drill_as_of(self, at_ms: int | None) -> Drill | None:
        """Return the drill; one begun before the first ask under the caller's clock starts at its time."""
        drill = self._drill
        if drill is None or self._callers is None or drill.since_ms:
            return drill
        first_ms = self._callers.first(at_ms) or 0
        return drill._replace(since_ms=first_ms, until_ms=first_ms + drill.until_ms)

    def _take(self, reading: Reading) -> None:
        self._ahead_ms = reading.now_ms - _monotonic_ms()
        self._drill = reading.drill
        if reading.state is not None and reading.state.source == self.rules.source:
            self._state = reading.state

    async def _follow(self) -> None:
        while True:
            await sleep(FOLLOW_EVERY_S)
            if self._away():
                self._note()  # meanwhile the validity of the last state may end
            else:
                await self._follow_once()

    async def _follow_once(self) -> None:
        """Read the record, create it if it is missing, and note a changed factor."""
        try:
            async with self._lock:
                await self._poll()
        except StoreError as error:
            log.debug("cannot read the record of volumes", why=str(error))
            self._begin()
        except Exception:
            log.exception("following the throttle factor failed")
        self._note()

    async def _poll(self) -> None:
        reading = await self._record.read()
        self._take(reading)
        self._begin()
        ours = reading.state is not None and reading.state.source == self.rules.source
        if self._state is not None and not ours:
            await self._record.replace(reading.raw, self._state)

    def _begin(self, at_ms: int | None = None) -> None:
        """Start with an empty state if nothing is known yet: now, or at the time of the first ask."""
        if self._state is not None or not self.rules.observes:
            return
        if self._callers is None:
            self._state = start_state(self.now_ms(), self.rules)
        elif (first_ms := self._callers.first(at_ms)) is not None:
            self._state = start_state(first_ms, self.rules)

    def _note(self, at_ms: int | None = None) -> None:
        """Log and report a changed factor, and count a change to the fallback."""
        before, self._last = self._last, self.at(at_ms)
        if self._last.held_by == "fallback" and (before is None or before.held_by != "fallback"):
            self._fallbacks += 1
        if before is None or before.factor != self._last.factor:
            log.info("throttle factor changed", factor=self._last.factor, reason=self._last.reason)
            self._changed(before.factor if before else None, self._last.factor)


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000
