"""Each node's view of the throttle factor: it follows the record in the store, and judges validity itself.

No decision asks the store for it. The record is looked at four times a second, beside the decisions, and with
it the store's time, which the node's own clock then carries on; so a worker, a source or a store that is away
is noticed by every node by itself.
"""

from __future__ import annotations

import asyncio
import time
from asyncio import sleep
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import structlog

from app.admission.caller_time import CallerTime
from app.admission.ending import end
from app.domain.ask import Ask
from app.domain.quota import PRODUCER_BYTE_RATE, Quota
from app.domain.volumes import (
    Drill,
    InForce,
    Observation,
    Rules,
    State,
    hold_ms,
    in_force,
    lapsed,
    missed,
    observed,
    scaled,
    start,
)
from app.store.port import StoreError
from app.store.volumes import Reading, Replaced, change

FOLLOW_EVERY_S: Final = 0.25
HELD_MODES: Final = frozenset({"admit", "peek"})
"""What a factor touches: work that is done is not held back, nor is what is given back."""

log: Final = structlog.get_logger("quotagate.volumes")


class Record(Replaced, Protocol):
    """The record in the store; ``app.store.volumes`` has it."""

    async def begin_drill(self, drill: Drill, now_ms: int) -> None:
        """Put a drill in the place of any other; raises ``StoreError``."""

    async def end_drill(self) -> None:
        """End the drill; raises ``StoreError``."""


class Standing(NamedTuple):
    """How volumes and factor stand at a moment, for whoever looks.

    Attributes:
        fallbacks: how often this node has gone over to the fallback.
    """

    now_ms: int
    rules: Rules
    in_force: InForce
    state: State | None
    drill: Drill | None
    fallbacks: int


class Throttling:
    """The factor in force.

    Args:
        callers: the time under the caller's clock; None under the store's.
        changed: told when another factor begins to hold here: what did before, and what does.
        away: says that the store is known to be away, so that nobody looks there meanwhile.
    """

    def __init__(
        self,
        record: Record,
        rules: Rules,
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
        self._turn = asyncio.Lock()
        """Looks and writes one after the other: what a look brings never puts back what was written since."""
        self._state: State | None = None
        self._late: tuple[State, int, State] | None = None
        """A state, how many pushes were missed since, and what became of it by that."""
        self._drill: Drill | None = None
        self._ahead_ms = time.time_ns() // 1_000_000 - _monotonic_ms()
        """What the store's time is ahead of this process's own; its host's clock until the store has said."""
        self._following: asyncio.Task[None] | None = None
        self._last: InForce | None = None
        self._fallbacks = 0

    async def open(self) -> None:
        """Read the record, and follow it from then on."""
        await self._follow_once()
        self._following = asyncio.create_task(self._follow(), name="follow the throttle factor")

    async def close(self) -> None:
        """Follow no longer."""
        if self._following is not None:
            await end(self._following)

    def at(self, at_ms: int | None = None) -> InForce:
        """The factor that holds now, or at a caller's time."""
        now_ms = self.now_ms(at_ms)
        if self._state is None:
            self._begin(at_ms)
        return in_force(self._as_of(now_ms), self._drill_as_of(at_ms), now_ms, self.rules)

    def on(self, ask: Ask) -> float:
        """The factor for an ask: 1 where none touches it."""
        if self._state is None and self._drill is None and not self.rules.observes:
            return 1.0
        if ask.mode not in HELD_MODES or ask.principal in self.rules.excluded:
            return 1.0
        return self.at(ask.at_ms).factor

    def limit_now(self, quota: Quota, ask: Ask) -> float:
        """What a limit is for an ask this moment; 0 where the factor lets nothing be produced."""
        if quota.key != PRODUCER_BYTE_RATE or (factor := self.on(ask)) == 1:
            return quota.limit
        return scaled(quota, factor).limit if factor else 0.0

    def hold_ms(self, at_ms: int | None) -> int:
        """How long an ask to produce waits while the factor is 0."""
        return hold_ms(self.at(at_ms).next_check_ms, self.now_ms(at_ms), self.rules)

    def standing(self, at_ms: int | None = None) -> Standing:
        """Everything there is to show."""
        now_ms, found = self.now_ms(at_ms), self.at(at_ms)
        drill = self._drill_as_of(at_ms)
        drill = drill if drill and drill.holds(now_ms) else None
        if at_ms is None:
            self._note()
        return Standing(now_ms, self.rules, found, self._state, drill, self._fallbacks)

    async def refresh(self) -> None:
        """Look at the record now.

        Raises:
            StoreError: the store did not answer.
        """
        async with self._turn:
            self._take(await self._record.read())

    async def push(self, seen: Observation, at_ms: int | None) -> None:
        """Take an observation, made now or at a caller's time.

        Raises:
            StoreError: the store did not answer; it may have been taken.
        """

        def judged(reading: Reading) -> State:
            self._take(reading)
            self._note(at_ms)  # what held until now, a fallback for instance
            now_ms = self.now_ms(at_ms)
            return observed(self._state or start(now_ms, self.rules), seen, now_ms, self.rules)

        async with self._turn:
            said, state = await change(self._record, judged)
            if said != "written":
                raise StoreError("contention", "others change the record of volumes all the time")
            self._state = state
            self._note()

    async def begin_drill(self, drill: Drill) -> None:
        """Set a factor for a while, whatever the volumes say.

        Raises:
            StoreError: the store did not answer; the drill may have begun.
        """
        async with self._turn:
            await self._record.begin_drill(drill, self.now_ms())
            self._drill = drill
            self._note()

    async def end_drill(self) -> None:
        """End the drill.

        Raises:
            StoreError: the store did not answer; the drill may have ended.
        """
        async with self._turn:
            await self._record.end_drill()
            self._drill = None
            self._note()

    def now_ms(self, at_ms: int | None = None) -> int:
        """The store's time as this node carries it on; or a caller's, or the newest that one told."""
        if self._callers is not None:
            return self._callers.newest_ms if at_ms is None else at_ms
        return _monotonic_ms() + self._ahead_ms

    def _as_of(self, now_ms: int) -> State | None:
        """The state with the pushes that did not come; made once for all asks of an interval.

        It is as large as the cluster, and every ask to produce looks at it.
        """
        state = self._state
        if state is None or (ticks := missed(state, now_ms, self.rules)) < 1:
            return state
        if self._late is None or self._late[0] is not state or self._late[1] != ticks:
            self._late = state, ticks, lapsed(state, now_ms, self.rules)
        return self._late[2]

    def _drill_as_of(self, at_ms: int | None) -> Drill | None:
        """The drill; one that was begun before any caller told the time begins with the first who does."""
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
                self._note()  # validity goes on, by what was read last
            else:
                await self._follow_once()

    async def _follow_once(self) -> None:
        """Look, begin the record where there is none, and note what has changed."""
        try:
            async with self._turn:
                await self._look()
        except StoreError as error:
            log.debug("the record of volumes could not be read", why=str(error))
            self._begin()
        except Exception:
            log.exception("following the throttle factor failed")
        self._note()

    async def _look(self) -> None:
        reading = await self._record.read()
        self._take(reading)
        self._begin()
        ours = reading.state is not None and reading.state.source == self.rules.source
        if self._state is not None and not ours:
            await self._record.replace(reading.raw, self._state)

    def _begin(self, at_ms: int | None = None) -> None:
        """Begin where nothing was known so far: now, or when the first caller says it is."""
        if self._state is not None or not self.rules.observes:
            return
        if self._callers is None:
            self._state = start(self.now_ms(), self.rules)
        elif (first_ms := self._callers.first(at_ms)) is not None:
            self._state = start(first_ms, self.rules)

    def _note(self, at_ms: int | None = None) -> None:
        """Say and count what has changed."""
        before, self._last = self._last, self.at(at_ms)
        if self._last.held_by == "fallback" and (before is None or before.held_by != "fallback"):
            self._fallbacks += 1
        if before is None or before.factor != self._last.factor:
            log.info("the throttle factor", factor=self._last.factor, reason=self._last.reason)
            self._changed(before.factor if before else None, self._last.factor)


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000
