"""The time that callers send: its beginning, and the newest time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from app.admission.answers import ADMITTED
from app.admission.atomic_asks import AtomicDecision
from app.admission.errors import CallerGoneError
from app.admission.plan import PlannedAsk
from app.admission.port import Decider, Then
from app.admission.throttle_factor.caller_clock import CallerClock, CallerTime
from app.domain.ask import Ask
from app.domain.caller import ANYONE, Caller


def admitted(ask: Ask) -> PlannedAsk:
    return PlannedAsk(ask, (), None, decision=ADMITTED[0])


class AdmitsAll(Decider):
    """An admission that admits every ask."""

    def begin(self, ask: Ask, caller: Caller, then: Then, within_s: float | None = None) -> object:
        then(CallerGoneError() if caller.is_gone() else admitted(ask))
        return None

    async def decide(
        self, asks: Sequence[Ask], caller: Caller = ANYONE, within_s: float | None = None
    ) -> list[PlannedAsk]:
        return [admitted(ask) for ask in asks]

    async def decide_atomically(
        self, asks: Sequence[Ask], caller: Caller = ANYONE, within_s: float | None = None
    ) -> AtomicDecision:
        return AtomicDecision(ADMITTED[0], tuple(admitted(ask) for ask in asks))


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
        clock.begin(Ask(at_ms=at_ms), ANYONE, lambda _: None)
    assert (time.first_ms, clock.now_ms()) == (0, 9)
    await clock.decide_atomically([Ask(at_ms=12), Ask(at_ms=12)])
    assert (time.first_ms, clock.now_ms()) == (0, 12)


async def test_newest_time_of_a_batch_counts():
    time = CallerTime()
    clock = CallerClock(AdmitsAll(), time)
    await clock.decide([Ask(at_ms=at_ms) for at_ms in (5, 8, 3)])
    assert (time.first_ms, clock.now_ms()) == (5, 8)


@pytest.mark.parametrize(("is_gone", "newest"), [(False, 7), (True, 0)])
def test_time_counts_once_it_is_decided_and_is_noted_before_the_answer(is_gone: bool, newest: int):
    clock = CallerClock(AdmitsAll())
    seen: list[int] = []
    clock.begin(Ask(at_ms=7), Caller(is_gone=lambda: is_gone), lambda _: seen.append(clock.now_ms()))
    assert (seen, clock.time.first_ms) == ([newest], 7)
