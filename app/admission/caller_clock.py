"""Admission under the caller's clock: the current time is the newest ``at_ms`` of all asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from app.admission.plain import PlainAsk
from app.admission.port import Decider, InFull, Joint, Remaining
from app.domain.ask import Ask
from app.domain.caller import ANYONE, Caller
from app.domain.decision import Decision

T = TypeVar("T")


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
        """Return the first time: this one, if none is set yet."""
        return at_ms if self.first_ms is None else self.first_ms

    def note(self, at_ms: int) -> None:
        """Note a time that a caller sent."""
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

    def plain(self, ask: Ask) -> PlainAsk | None:
        """Return an ask made ready, which serves equal ones while it is valid; None if it is not plain."""
        return self._admission.plain(ask)

    @property
    def edition(self) -> object:
        """That of the quotas in force: a plain ask is valid while it has the same one."""
        return self._admission.edition

    async def decide(self, asks: Sequence[Ask | PlainAsk], caller: Caller = ANYONE) -> list[Decision]:
        """Decide asks in order."""
        times = [(ask.planned.ask if isinstance(ask, PlainAsk) else ask).at_ms or 0 for ask in asks]
        self.time.begin(times[0])
        decisions = await self._admission.decide(asks, caller)
        self.time.note(max(times))
        return decisions

    def begin(
        self, ask: Ask | PlainAsk, caller: Caller, then: Callable[[Decision | Exception], None]
    ) -> object:
        """Decide an ask, and call ``then`` once; no route calls this for an ask with a time."""
        return self._admission.begin(ask, caller, then)

    async def decide_in_full(
        self, ask: Ask, caller: Caller = ANYONE, within_s: float | None = None
    ) -> InFull:
        """Decide an ask that wants detail and has no id."""
        self.time.begin(ask.at_ms or 0)
        decided = await self._admission.decide_in_full(ask, caller, within_s)
        self.time.note(ask.at_ms or 0)
        return decided

    async def decide_together(
        self, asks: Sequence[Ask], caller: Caller = ANYONE, within_s: float | None = None
    ) -> Joint:
        """Decide asks of which all are admitted or none; they have one time."""
        self.time.begin(asks[0].at_ms or 0)
        joint = await self._admission.decide_together(asks, caller, within_s)
        self.time.note(asks[0].at_ms or 0)
        return joint

    def begin_in_full(
        self,
        ask: PlainAsk,
        caller: Caller,
        admitted: Callable[[Remaining], T],
        then: Callable[[T | InFull | Exception], None],
        within_s: float | None = None,
    ) -> object:
        """Decide a plain ask that wants detail, and call ``then`` once, as ``begin`` does."""
        return self._admission.begin_in_full(ask, caller, admitted, then, within_s)
