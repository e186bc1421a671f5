"""A node's view of the factor: what reading it costs, and which fallbacks it counts."""

from __future__ import annotations

import pytest

from app.admission import throttling
from app.admission.caller_clock import CallerTime
from app.admission.throttling import Throttling
from app.domain.ask import Ask
from app.domain.volumes import (
    Drill,
    FactorState,
    Observation,
    Volume,
    VolumeLimit,
    VolumeRules,
    after_missed_pushes,
)
from app.store.volumes import Reading, VolumeRecord

MINUTE = 60_000
RULES = VolumeRules("push", VolumeLimit(min_available_bytes=100), MINUTE, 5 * MINUTE, fallback=0.5)
WELL = Observation((Volume("1", "/data", 1_000, 500),))


class Record(VolumeRecord):
    """The record in a store that never fails."""

    def __init__(self) -> None:
        self._state: FactorState | None = None

    async def read(self) -> Reading:
        return Reading(0, self._state, None, b"")

    async def replace(self, seen: bytes, state: FactorState, token: int | None = None) -> str:
        self._state = state
        return "written"

    async def begin_drill(self, drill: Drill, now_ms: int) -> None:
        pass

    async def end_drill(self) -> None:
        raise AssertionError


async def test_fallback_is_counted_when_read_and_before_a_push_ends_it():
    time = CallerTime()
    throttling_ = Throttling(Record(), RULES, time)
    await throttling_.push(WELL, 0)
    time.note(5 * MINUTE + 1)
    assert throttling_.status().fallbacks == 1
    await throttling_.push(WELL, 6 * MINUTE)
    await throttling_.push(WELL, 20 * MINUTE)  # nobody read the factor since minute 11
    time.note(20 * MINUTE)
    assert (throttling_.status().fallbacks, throttling_.status().in_force.factor) == (2, 1.0)
    assert throttling_.status().fallbacks == 2


async def test_missed_pushes_are_computed_once_per_interval_and_not_per_ask(
    monkeypatch: pytest.MonkeyPatch,
):
    computed = []

    def counted(state: FactorState, now_ms: int, rules: VolumeRules) -> FactorState:
        computed.append(now_ms)
        return after_missed_pushes(state, now_ms, rules)

    monkeypatch.setattr(throttling, "after_missed_pushes", counted)
    throttling_ = Throttling(Record(), RULES, CallerTime())
    await throttling_.push(WELL, 0)
    times = (MINUTE - 1, MINUTE, MINUTE + 1, 2 * MINUTE - 1, 2 * MINUTE, 5 * MINUTE, 5 * MINUTE + 1)
    factors = [throttling_.on(Ask({"produce_bytes": 1}, principal="alice", at_ms=now_ms)) for now_ms in times]
    assert factors == [1, 1, 1, 1, 1, 1, 0.5]
    assert computed == [MINUTE, 2 * MINUTE, 5 * MINUTE]


async def test_drill_begun_before_the_first_ask_starts_at_its_time():
    time = CallerTime()
    throttling_ = Throttling(Record(), VolumeRules(), time)
    await throttling_.begin_drill(Drill(0.2, 0, MINUTE, "admin"))
    assert throttling_.status().in_force.factor == 0.2
    late = 1_000_000 * MINUTE
    ask = Ask({"produce_bytes": 1}, principal="alice", at_ms=late)
    assert throttling_.on(ask) == 0.2
    time.note(late)
    drill = throttling_.status().drill
    assert drill is not None
    assert (drill.since_ms, drill.until_ms) == (late, late + MINUTE)
    factors = [throttling_.at(late + after).factor for after in (MINUTE - 1, MINUTE)]
    assert factors == [0.2, 1.0]
