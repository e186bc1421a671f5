"""A node's view of the factor: what it costs to look at it, and which fallbacks it counts."""

from __future__ import annotations

import pytest

from app.admission import throttling
from app.admission.caller_time import CallerTime
from app.admission.throttling import Throttling
from app.domain.ask import Ask
from app.domain.volumes import Drill, Limit, Observation, Rules, State, Volume, lapsed
from app.store.volumes import Reading

MINUTE = 60_000
RULES = Rules("push", Limit(min_available_bytes=100), MINUTE, 5 * MINUTE, fallback=0.5)
WELL = Observation((Volume("1", "/data", 1_000, 500),))


class Record:
    """The record in a store that never fails."""

    def __init__(self) -> None:
        self._state: State | None = None

    async def read(self) -> Reading:
        return Reading(0, self._state, None, b"")

    async def replace(self, seen: bytes, state: State, token: int | None = None) -> str:
        self._state = state
        return "written"

    async def begin_drill(self, drill: Drill, now_ms: int) -> None:
        pass

    async def end_drill(self) -> None:
        raise AssertionError


async def test_a_fallback_is_counted_by_whoever_looks_and_before_a_push_ends_it():
    time = CallerTime()
    held = Throttling(Record(), RULES, time)
    await held.push(WELL, 0)
    time.seen(5 * MINUTE + 1)
    assert held.standing().fallbacks == 1
    await held.push(WELL, 6 * MINUTE)
    await held.push(WELL, 20 * MINUTE)  # from minute 11 on nobody looked
    time.seen(20 * MINUTE)
    assert (held.standing().fallbacks, held.standing().in_force.factor) == (2, 1.0)
    assert held.standing().fallbacks == 2


async def test_pushes_that_do_not_come_are_reckoned_once_an_interval_and_not_for_each_ask(
    monkeypatch: pytest.MonkeyPatch,
):
    reckoned = []

    def counted(state: State, now_ms: int, rules: Rules) -> State:
        reckoned.append(now_ms)
        return lapsed(state, now_ms, rules)

    monkeypatch.setattr(throttling, "lapsed", counted)
    held = Throttling(Record(), RULES, CallerTime())
    await held.push(WELL, 0)
    times = (MINUTE - 1, MINUTE, MINUTE + 1, 2 * MINUTE - 1, 2 * MINUTE, 5 * MINUTE, 5 * MINUTE + 1)
    factors = [held.on(Ask({"produce_bytes": 1}, principal="alice", at_ms=now_ms)) for now_ms in times]
    assert factors == [1, 1, 1, 1, 1, 1, 0.5]
    assert reckoned == [MINUTE, 2 * MINUTE, 5 * MINUTE]


async def test_a_drill_that_began_before_any_caller_told_the_time_begins_with_the_first():
    time = CallerTime()
    held = Throttling(Record(), Rules(), time)
    await held.begin_drill(Drill(0.2, 0, MINUTE, "admin"))
    assert held.standing().in_force.factor == 0.2
    late = 1_000_000 * MINUTE
    ask = Ask({"produce_bytes": 1}, principal="alice", at_ms=late)
    assert held.on(ask) == 0.2
    time.seen(late)
    drill = held.standing().drill
    assert drill is not None
    assert (drill.since_ms, drill.until_ms) == (late, late + MINUTE)
    factors = [held.at(late + after).factor for after in (MINUTE - 1, MINUTE)]
    assert factors == [0.2, 1.0]
