"""A node's view of the factor: the cost of reading it, and the fallbacks that are counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.admission.throttle_factor import throttling
from app.admission.throttle_factor.caller_clock import CallerTime
from app.admission.throttle_factor.throttling import Throttling
from app.domain.ask import Ask
from app.domain.quota import Quota
from app.domain.volumes import (
    Drill,
    FactorState,
    Observation,
    Source,
    Volume,
    VolumeLimit,
    VolumeRules,
    after_missed_pushes,
    after_observation,
    start_state,
)
from app.store.port import StoreError
from app.store.volumes import Reading, VolumeRecord

MINUTE = 60_000
RULES = VolumeRules("push", VolumeLimit(min_available_bytes=100), MINUTE, 5 * MINUTE, fallback=0.5)
WELL = Observation((Volume("1", "/data", 1_000, 500),))


class Record(VolumeRecord):
    """The record in a store that never fails."""

    def __init__(self) -> None:
        self._state: FactorState | None = None
        self.now_ms = 0

    async def read(self) -> Reading:
        return Reading(self.now_ms, self._state, None, b"")

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


async def test_produce_limit_is_scaled_and_other_limits_are_not():
    throttling_ = Throttling(Record(), VolumeRules(), CallerTime())
    produce = Quota("producer_byte_rate", 100, "sampled_rate", "delay")
    others = [Quota(key, 100, "sampled_rate", "delay") for key in ("consumer_byte_rate", "request_rate")]
    ask = Ask({"produce_bytes": 1}, principal="alice", at_ms=1)
    limits = []
    for factor in (0.5, 0.0, 1.0):
        await throttling_.begin_drill(Drill(factor, 0, MINUTE, "admin"))
        limits.append(throttling_.limit_now(produce, ask))
        assert [throttling_.limit_now(other, ask) for other in others] == [100, 100]
    assert limits == [50, 0, 100]


async def test_time_is_that_of_the_store_and_goes_on(monkeypatch: pytest.MonkeyPatch):
    here_ms = [7_000]
    monkeypatch.setattr(throttling, "_monotonic_ms", lambda: here_ms[0])
    record = Record()
    record.now_ms = 5_000_000
    throttling_ = Throttling(record, RULES)
    await throttling_.refresh()
    here_ms[0] += 250
    assert throttling_.now_ms() == 5_000_250


@pytest.mark.parametrize(("source", "factor"), [("push", 0.0), ("kafka", 1.0)])
async def test_record_of_this_source_is_taken_and_that_of_another_is_not(source: Source, factor: float):
    record = Record()
    full = Observation((Volume("1", "/data", 1_000, 5),))
    theirs = replace(RULES, source=source)
    await record.replace(b"", after_observation(start_state(0, theirs), full, 0, theirs))
    throttling_ = Throttling(record, RULES, CallerTime())
    await throttling_.refresh()
    assert throttling_.on(Ask({"produce_bytes": 1}, principal="alice", at_ms=1)) == factor


async def test_node_that_cannot_read_the_record_begins_with_factor_1_until_its_validity_ends(
    monkeypatch: pytest.MonkeyPatch,
):
    class Away(Record):
        async def read(self) -> Reading:
            raise StoreError("connection")

    monkeypatch.setattr(throttling, "_monotonic_ms", lambda: 7_000)
    throttling_ = Throttling(Away(), RULES)
    await throttling_.open()
    now_ms = throttling_.now_ms()
    state = throttling_.status().state
    assert state is not None
    assert (state.factor, state.observed_ms, state.valid_until_ms) == (1.0, now_ms, now_ms + 5 * MINUTE)
    await throttling_.close()


async def test_callers_time_begins_with_the_first_ask():
    throttling_ = Throttling(Record(), RULES, CallerTime())
    assert throttling_.status().state is None
    throttling_.at(9 * MINUTE)
    state = throttling_.status().state
    assert state is not None
    assert state.observed_ms == 9 * MINUTE
