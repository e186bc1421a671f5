"""The time that callers send: when it begins, and what the newest time is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from app.admission.caller_clock import CallerClock, CallerTime
from app.admission.plain import PlainAsk
from app.admission.port import Decider, InFull, Joint, Remaining
from app.domain.ask import Ask
from app.domain.caller import ANYONE, Caller
from app.domain.decision import Decision

T = TypeVar("T")
ADMITTED = Decision("admit", 0, True, 0, "local", None)


class AdmitsAll(Decider):
    """An admission that admits every ask."""

    def plain(self, ask: Ask) -> PlainAsk | None:
        return None

    @property
    def edition(self) -> object:
        raise AssertionError

    async def decide(self, asks: Sequence[Ask | PlainAsk], caller: Caller = ANYONE) -> list[Decision]:
        return [ADMITTED for _ in asks]

    def begin(
        self, ask: Ask | PlainAsk, caller: Caller, then: Callable[[Decision | Exception], None]
    ) -> object:
        raise AssertionError(ask)

    def begin_in_full(
        self,
        ask: PlainAsk,
        caller: Caller,
        admitted: Callable[[Remaining], T],
        then: Callable[[T | InFull | Exception], None],
        within_s: float | None = None,
    ) -> object:
        raise AssertionError(ask)

    async def decide_in_full(
        self, ask: Ask, caller: Caller = ANYONE, within_s: float | None = None
    ) -> InFull:
        return InFull(ADMITTED, ())

    async def decide_together(
        self, asks: Sequence[Ask], caller: Caller = ANYONE, within_s: float | None = None
    ) -> Joint:
        return Joint(ADMITTED, tuple(InFull(ADMITTED, ()) for _ in asks))


async def test_time_is_0_before_the_first_ask_and_then_the_newest_one():
    clock = CallerClock(AdmitsAll())
    assert clock.now_ms() == 0
    for at_ms in (7, 5):
        await clock.decide([Ask(at_ms=at_ms)])
    assert clock.now_ms() == 7


async def test_everything_begins_at_the_first_time_even_if_that_is_0():
    time = CallerTime()
    clock = CallerClock(AdmitsAll(), time)
    for at_ms in (0, 9):
        await clock.decide_in_full(Ask(at_ms=at_ms))
    assert (time.first_ms, clock.now_ms()) == (0, 9)
    await clock.decide_together([Ask(at_ms=12), Ask(at_ms=12)])
    assert (time.first_ms, clock.now_ms()) == (0, 12)
