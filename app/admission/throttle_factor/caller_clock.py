"""Admission under the caller's clock: the current time is the newest ``at_ms`` of all asks."""

from __future__ import annotations

from collections.abc import Sequence

from app.admission.atomic_asks import AtomicDecision
from app.admission.plan import PlannedAsk
from app.admission.port import Decider, Then
from app.domain.ask import Ask
from app.domain.caller import ANYONE, Caller


class CallerTime:
    """The times that callers have sent.

    Attributes:
        first_ms: the first time, at which everything begins; None before the first ask.
        newest_ms: the newest time; 0 before the first ask.
    """

    def __init__(self) -> None:
        self.first_ms: int | None = None
        self.newest_ms = 0

    def begin(self, at_ms: int) -> None:
        """Set the first time, if it is not set yet."""
        if self.first_ms is None:
            self.first_ms = at_ms

    def first(self, at_ms: int | None) -> int | None:
        """Return the first time, or ``at_ms`` if no first time is set yet."""
        return at_ms if self.first_ms is None else self.first_ms

    def note(self, at_ms: int) -> None:
        """Record a time that a caller sent."""
        self.begin(at_ms)
        self.newest_ms = max(self.newest_ms, at_ms)


class CallerClock:
    """Decides like the admission behind it, and notes the times of all asks.

    Args:
        time: receives the times.
    """

    def __init__(self, admission: Decider, time: CallerTime | None = None) -> None:
        self._admission = admission
        self.time = time or CallerTime()

    def now_ms(self) -> int:
        """Return the newest time; 0 before the first ask."""
        return self.time.newest_ms

    def begin(self, ask: Ask, caller: Caller, then: Then, within_s: float | None = None) -> object:
        """Decide one ask, and call ``then`` once, when its time is noted."""

        def decided(result: PlannedAsk | Exception) -> None:
            if not isinstance(result, Exception):
                self.time.note(ask.at_ms or 0)
            then(result)

        self.time.begin(ask.at_ms or 0)
        return self._admission.begin(ask, caller, decided, within_s)

    async def decide(
        self, asks: Sequence[Ask], caller: Caller = ANYONE, within_s: float | None = None
    ) -> list[PlannedAsk]:
        """Decide asks in order."""
        times = [ask.at_ms or 0 for ask in asks]
        self.time.begin(times[0])
        planned = await self._admission.decide(asks, caller, within_s)
        self.time.note(max(times))
        return planned

    async def decide_atomically(
        self, asks: Sequence[Ask], caller: Caller = ANYONE, within_s: float | None = None
    ) -> AtomicDecision:
        """Admit all of these asks or none; they have one time."""
        self.time.begin(asks[0].at_ms or 0)
        decision = await self._admission.decide_atomically(asks, caller, within_s)
        self.time.note(asks[0].at_ms or 0)
        return decision
