"""The throttle factor: Strimzi's vectors, the timeline of its proposal, pushes, drills, limits."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from app.domain.errors import UnknownBrokerError, VolumeCountError
from app.domain.quota import Quota
from app.domain.volumes import (
    Drill,
    FactorState,
    KnownVolume,
    Observation,
    Volume,
    VolumeLimit,
    VolumeRules,
    after_failure,
    after_forgetting,
    after_missed_pushes,
    after_observation,
    factor_in_force,
    scaled_quota,
    start_state,
    suspension_ms,
)

MINUTE = 60_000
BYTES = VolumeLimit(min_available_bytes=100)
KAFKA = VolumeRules("kafka", BYTES, interval_ms=MINUTE, validity_ms=5 * MINUTE)
PUSH = replace(KAFKA, source="push")
VECTORS = {v["id"]: v for v in yaml.safe_load(Path("tests/vectors/kafka.yaml").read_text(encoding="utf-8"))}


def volume(broker: str, available: int | None, place: str = "/data", total: int | None = 1000) -> Volume:
    return Volume(broker, place, None if available is None else total, available)


def polled(*volumes: Volume, silent: tuple[str, ...] = ()) -> Observation:
    """The result of a poll, in which each broker that answers reports all its volumes."""
    return Observation(volumes, frozenset(v.broker for v in volumes), dict.fromkeys(silent, "timed out"))


def factor(state: FactorState, now_ms: int, rules: VolumeRules = KAFKA) -> float:
    return factor_in_force(state, None, now_ms, rules).factor


@pytest.mark.parametrize(("available", "expected"), VECTORS["E01"]["rows"])
def test_vector_e01_volume_at_the_limit_violates(available: list[int], expected: float):
    seen = Observation(tuple(volume("1", size, f"/d{n}") for n, size in enumerate(available)))
    assert factor(after_observation(start_state(0, PUSH), seen, 10, PUSH), 10) == expected


def test_vector_e06_factor_is_valid_until_its_end_inclusive():
    rules = replace(KAFKA, fallback=0.25)
    state = after_observation(start_state(0, rules), polled(volume("1", 500)), MINUTE, rules)
    ages = [0, 5 * MINUTE - 1, 5 * MINUTE, 5 * MINUTE + 1]
    assert [factor(state, MINUTE + age, rules) for age in ages] == [1.0, 1.0, 1.0, 0.25]


def test_vector_e07_volume_sizes_are_valid_as_long_as_the_factor():
    """The sizes from a broker that left the cluster count until their validity ends, inclusive, as in E06."""
    full = after_observation(start_state(0, KAFKA), polled(volume("1", 500), volume("2", 5)), 0, KAFKA)
    for age, expected in [(5 * MINUTE - 1, 0.0), (5 * MINUTE, 0.0), (5 * MINUTE + 1, 1.0)]:
        after = after_observation(full, polled(volume("1", 500)), age, KAFKA)
        assert after.succeeded
        assert factor(after, age) == expected
        assert len(after.volumes) == (2 if expected == 0 else 1)


def test_vector_e09_timeline_of_the_proposal():
    rules = replace(KAFKA, validity_ms=2 * MINUTE, fallback=0.0)
    state = start_state(0, rules)
    for row, expected in VECTORS["E09"]["rows"]:
        minute, outcome = row.split("m ")
        now = int(minute) * MINUTE
        if outcome == "ok":
            state = after_observation(state, polled(volume("1", 500)), now, rules)
        else:
            state = after_failure(state, "no broker answers", now, rules)
        assert factor(state, now, rules) == expected, row


def test_inconsistent_cluster_of_the_proposal():
    """Brokers 1 and 2 are active, but 2 leaves before its disks are polled, so only 1 answers."""
    rules = replace(KAFKA, fallback=0.0)
    unseen = after_observation(start_state(0, rules), polled(volume("1", 500), silent=("2",)), MINUTE, rules)
    assert not unseen.succeeded  # the volumes of broker 2 are unknown
    assert unseen.valid_until_ms == 5 * MINUTE
    assert (factor(unseen, 5 * MINUTE, rules), factor(unseen, 5 * MINUTE + 1, rules)) == (1.0, 0.0)

    both = after_observation(start_state(0, rules), polled(volume("1", 500), volume("2", 500)), MINUTE, rules)
    one = after_observation(both, polled(volume("1", 500), silent=("2",)), 6 * MINUTE, rules)
    assert one.succeeded  # the sizes from broker 2 are still valid
    assert one.valid_until_ms == 11 * MINUTE
    assert "broker 2 is unknown: timed out" in factor_in_force(one, None, 6 * MINUTE, rules).reason
    late = after_observation(both, polled(volume("1", 500), silent=("2",)), 6 * MINUTE + 1, rules)
    assert not late.succeeded
    assert factor(late, 6 * MINUTE + 1, rules) == 0.0


def test_violation_counts_at_once_and_renews_validity_in_a_failed_observation():
    state = after_observation(start_state(0, KAFKA), polled(volume("1", 100), silent=("2",)), MINUTE, KAFKA)
    assert not state.succeeded
    assert (factor(state, MINUTE), state.valid_until_ms) == (0.0, 6 * MINUTE)
    again = after_failure(state, "no broker answers", 6 * MINUTE, KAFKA)  # broker 1's disk is still known
    assert again.valid_until_ms == 11 * MINUTE
    over = after_failure(again, "no broker answers", 7 * MINUTE, KAFKA)
    assert over.valid_until_ms == 11 * MINUTE
    assert factor_in_force(over, None, 11 * MINUTE, KAFKA).held_by == "validity"
    assert factor_in_force(over, None, 11 * MINUTE + 1, KAFKA).held_by == "fallback"


def test_offline_directory_is_unknown_neither_empty_nor_full():
    known = after_observation(start_state(0, KAFKA), polled(volume("1", 500)), 0, KAFKA)
    offline = after_observation(known, polled(volume("1", None)), MINUTE, KAFKA)
    assert offline.succeeded  # by its earlier sizes
    assert (offline.volumes[0].available_bytes, offline.volumes[0].observed_ms) == (500, 0)
    assert offline.volumes[0].state(MINUTE, KAFKA) == "unknown"
    later = after_observation(offline, polled(volume("1", None)), 5 * MINUTE + 1, KAFKA)
    assert not later.succeeded
    assert "without sizes: /data of broker 1" in later.trouble
    new = after_observation(
        start_state(0, KAFKA), polled(volume("1", 500), volume("1", None, "/other")), MINUTE, KAFKA
    )
    assert not new.succeeded


def test_10000_volumes_without_sizes_are_accepted_and_10_named():
    few, many = (
        Observation(tuple(volume(str(broker), None) for broker in range(count))) for count in (1_000, 10_000)
    )
    state = after_observation(start_state(0, PUSH), many, MINUTE, PUSH)
    assert processor_s(many) < 30 * processor_s(few), "no time that grows with their square"
    assert not state.succeeded
    assert state.trouble.count("/data") == 10
    assert state.trouble.endswith(", and 9990 more")


def processor_s(seen: Observation) -> float:
    """The processor time for one observation, the shortest of five."""
    took = []
    for _ in range(5):
        began = time.process_time()
        after_observation(start_state(0, PUSH), seen, MINUTE, PUSH)
        took.append(time.process_time() - began)
    return min(took)


def test_directory_that_its_broker_no_longer_names_is_gone():
    both = after_observation(
        start_state(0, KAFKA), polled(volume("1", 5, "/a"), volume("1", 500, "/b")), 0, KAFKA
    )
    one = after_observation(both, polled(volume("1", 500, "/b")), MINUTE, KAFKA)
    assert [v.dir for v in one.volumes] == ["/b"]
    assert factor(one, MINUTE) == 1.0


def test_complete_push_replaces_all_volumes_and_partial_push_keeps_the_others():
    two = after_observation(start_state(0, PUSH), Observation((volume("1", 500), volume("2", 5))), 0, PUSH)
    whole = after_observation(two, Observation((volume("1", 500),)), MINUTE, PUSH)
    assert factor(whole, MINUTE, PUSH) == 1.0
    part = after_observation(two, Observation((volume("1", 500),), frozenset()), MINUTE, PUSH)
    assert part.succeeded
    assert factor(part, MINUTE, PUSH) == 0.0
    over = after_observation(part, Observation((volume("1", 500),), frozenset()), 5 * MINUTE + 1, PUSH)
    assert [v.broker for v in over.volumes] == ["1", "2"], "a full disk is not forgotten when its agent dies"
    assert not over.succeeded
    assert over.trouble == "not renewed within the validity: /data of broker 2"
    # The violation renewed the factor at each due push, until its own validity ended.
    ends = over.valid_until_ms
    assert (ends, factor(over, ends, replace(PUSH, fallback=0.5))) == (10 * MINUTE, 0.0)
    assert factor(over, ends + 1, replace(PUSH, fallback=0.5)) == 0.5
    nothing = after_observation(two, Observation(()), MINUTE, PUSH)
    assert (nothing.succeeded, nothing.volumes, factor(nothing, MINUTE, PUSH)) == (True, (), 1.0)


def test_forgotten_broker_counts_no_more_from_the_last_observation_on():
    rules = replace(PUSH, fallback=0.5)
    both = Observation((volume("1", 500), volume("2", 5)), frozenset())
    full = after_observation(start_state(0, rules), both, MINUTE, rules)
    well = after_forgetting(full, "2", MINUTE + 10, rules)
    assert (factor(well, MINUTE + 10, rules), well.since_ms, well.observed_ms) == (1.0, MINUTE + 10, MINUTE)
    assert (well.valid_until_ms, well.violations, well.active_brokers) == (6 * MINUTE, 1, 1)
    assert factor(well, 6 * MINUTE + 1, rules) == 0.5, "forgetting renews no validity"
    with pytest.raises(UnknownBrokerError):
        after_forgetting(well, "2", MINUTE + 10, rules)
    still = after_forgetting(full, "1", MINUTE + 10, rules)
    assert (factor(still, MINUTE + 10, rules), still.since_ms, still.violations) == (0.0, MINUTE, 1)


def test_forgetting_one_of_two_silent_brokers_leaves_the_fallback():
    rules = replace(PUSH, fallback=0.5)
    state = after_observation(
        start_state(0, rules), Observation((volume("1", 500), volume("2", 500), volume("3", 500))), 0, rules
    )
    for minute in range(1, 12):
        state = after_observation(
            state, Observation((volume("3", 500),), frozenset()), minute * MINUTE, rules
        )
    assert factor(state, 11 * MINUTE, rules) == 0.5
    one = after_forgetting(state, "1", 11 * MINUTE + 5, rules)
    assert factor(one, 11 * MINUTE + 5, rules) == 0.5
    assert one.trouble == "not renewed within the validity: /data of broker 2"
    none = after_forgetting(one, "2", 11 * MINUTE + 5, rules)
    assert (factor(none, 11 * MINUTE + 5, rules), none.since_ms) == (1.0, 11 * MINUTE + 5)


def test_incomplete_pushes_make_no_more_than_10000_volumes_known():
    many = Observation(tuple(volume(str(n), 500) for n in range(10_000)))
    full = after_observation(start_state(0, PUSH), many, 0, PUSH)
    again = after_observation(full, Observation((volume("5", 400),), frozenset()), 1, PUSH)
    assert len(again.volumes) == 10_000
    with pytest.raises(VolumeCountError):
        after_observation(again, Observation((volume("new", 400),), frozenset()), 2, PUSH)


def test_missed_push_is_a_failed_observation():
    rules = replace(PUSH, fallback=0.5)
    well = after_observation(start_state(0, rules), Observation((volume("1", 500),)), 0, rules)
    assert factor_in_force(well, None, MINUTE - 1, rules).held_by is None
    assert factor_in_force(well, None, MINUTE, rules).held_by == "validity"
    assert factor(well, 5 * MINUTE, rules) == 1.0
    assert factor(well, 5 * MINUTE + 1, rules) == 0.5

    full = after_observation(start_state(0, rules), Observation((volume("1", 5),)), 0, rules)
    assert after_missed_pushes(full, 4 * MINUTE, rules).valid_until_ms == 9 * MINUTE
    assert factor(full, 10 * MINUTE, rules) == 0.0  # renewed for the last time at minute 5
    assert factor(full, 10 * MINUTE + 1, rules) == 0.5
    unknown = after_observation(full, Observation((volume("1", None),)), 6 * MINUTE, rules)
    assert not unknown.succeeded
    assert unknown.valid_until_ms == 10 * MINUTE  # the missed pushes had renewed it


def test_factor_that_waits_for_a_missed_push_is_held_since_it_was_set():
    state = after_observation(start_state(0, PUSH), Observation((volume("1", 500),)), 10, PUSH)
    in_time = factor_in_force(state, None, MINUTE, PUSH)
    assert (in_time.held_by, in_time.held_since_ms) == (None, 0)
    late = factor_in_force(state, None, 10 + MINUTE, PUSH)
    assert (late.held_by, late.held_since_ms) == ("validity", 10)


def test_factor_is_held_when_a_poll_is_an_interval_late():
    state = after_observation(start_state(0, KAFKA), polled(volume("1", 500)), MINUTE, KAFKA)
    assert state.next_check_ms == 2 * MINUTE
    held_by = [factor_in_force(state, None, now, KAFKA).held_by for now in (2 * MINUTE, 3 * MINUTE)]
    assert held_by == [None, None]
    late = factor_in_force(state, None, 3 * MINUTE + 1, KAFKA)
    assert (late.held_by, late.reason.partition(";")[0]) == ("validity", "held: observations are overdue")


def test_reason_names_the_fullest_volume_and_counts_the_others():
    state = start_state(0, KAFKA)
    one = after_observation(state, polled(volume("1", 5), volume("2", 500)), 0, KAFKA)
    assert one.reason == "violation: /data of broker 1 has 5 of 1,000 bytes left"
    three = after_observation(state, polled(volume("1", 50), volume("2", 5), volume("3", 70)), 0, KAFKA)
    assert three.reason == "violation: /data of broker 2 has 5 of 1,000 bytes left, and 2 more"


def test_only_known_sizes_are_ok():
    states = [
        KnownVolume("1", "/data", 1000, available, observed, is_current).state(now, KAFKA)
        for available, observed, is_current, now in (
            (500, 0, True, 5 * MINUTE),
            (500, 0, True, 5 * MINUTE + 1),
            (500, 0, False, 0),
            (None, 0, True, 0),
            (5, 0, False, 0),
        )
    ]
    assert states == ["ok", "unknown", "unknown", "unknown", "violating"]


def test_part_names_no_broker_that_answered_or_is_silent():
    parts = [
        Observation((), answered, silent).is_part
        for answered, silent in (
            (frozenset(), {}),
            (frozenset({"1"}), {}),
            (frozenset(), {"1": "?"}),
            (None, {}),
        )
    ]
    assert parts == [True, False, False, False]


def test_ratio_limit_needs_both_sizes_and_byte_limit_only_one():
    ratio = replace(PUSH, limit=VolumeLimit(min_available_ratio=0.1))
    half = Observation((Volume("1", "/a", None, 5),))
    assert not after_observation(start_state(0, ratio), half, 1, ratio).succeeded
    assert after_observation(start_state(0, PUSH), half, 1, PUSH).succeeded
    assert (
        factor(
            after_observation(start_state(0, ratio), Observation((Volume("1", "/a", 0, 0),)), 1, ratio),
            1,
            ratio,
        )
        == 0
    )
    edge = Observation((Volume("1", "/a", 1000, 100),))
    assert factor(after_observation(start_state(0, ratio), edge, 1, ratio), 1, ratio) == 0.0


def test_since_is_when_the_factor_last_changed():
    state = after_observation(start_state(0, KAFKA), polled(volume("1", 500)), MINUTE, KAFKA)
    assert factor_in_force(state, None, MINUTE, KAFKA).since_ms == 0
    full = after_observation(state, polled(volume("1", 5)), 2 * MINUTE, KAFKA)
    again = after_observation(full, polled(volume("1", 5)), 3 * MINUTE, KAFKA)
    assert factor_in_force(again, None, 3 * MINUTE, KAFKA).since_ms == 2 * MINUTE
    assert again.violations == 2
    fallen = factor_in_force(again, None, 9 * MINUTE, KAFKA)
    assert (fallen.factor, fallen.since_ms) == (1.0, 8 * MINUTE + 1)
    well = after_observation(again, polled(volume("1", 500)), 10 * MINUTE, KAFKA)
    assert (
        factor_in_force(well, None, 10 * MINUTE, KAFKA).since_ms == 8 * MINUTE + 1
    )  # the fallback was 1 too


def test_drill_holds_until_its_end_exclusive():
    drill = Drill(0.2, 1_000, 2_000, "alice")
    state = after_observation(start_state(0, KAFKA), polled(volume("1", 5)), 0, KAFKA)
    for source in (state, None):
        found = [
            factor_in_force(source, drill, now, KAFKA).factor for now in (999, 1_000, 1_999, 2_000, 2_001)
        ]
        rest = 1.0 if source is None else 0.0
        assert found == [0.2, 0.2, 0.2, rest, rest]  # the drill also holds by a clock behind its start
    assert factor_in_force(state, drill, 1_500, KAFKA).reason == "drill: by alice, until 2000"


def test_factor_is_1_without_a_source():
    found = factor_in_force(None, None, 5, VolumeRules())
    assert (found.factor, found.valid_until_ms, found.next_check_ms) == (1.0, None, None)
    assert factor_in_force(None, None, 5, VolumeRules("static", BYTES)).factor == 1.0


@pytest.mark.parametrize(
    ("now", "expected"), [(0, 60_000), (50_000, 10_000), (59_500, 1_000), (60_000, 1_000), (60_001, 60_000)]
)
def test_wait_lasts_until_the_next_check_or_an_interval_if_overdue(now: int, expected: int):
    assert suspension_ms(60_000, now, KAFKA) == expected


def test_produce_limit_is_multiplied_but_stays_at_least_1_byte_per_second():
    quota = Quota("producer_byte_rate", 100, "sampled_rate", "delay")
    assert [scaled_quota(quota, by).limit for by in (1.0, 0.5, 0.001)] == [100, 50, 1]
    assert scaled_quota(replace(quota, limit=0), 0.5).limit == 0  # which admits nothing at all
    fetch = Quota("consumer_byte_rate", 100, "sampled_rate", "deny")
    assert scaled_quota(fetch, 0.5) is fetch
    tokens = Quota("producer_byte_rate", 100, "token_bucket", "delay", burst=100, max_debt=360_000)
    assert scaled_quota(tokens, 0.5).max_debt == 360_000, "a debt is of the limit that was set"


SIZES = st.one_of(st.none(), st.integers(0, 300))
STEPS = st.lists(
    st.tuples(st.integers(1, 4 * MINUTE), st.dictionaries(st.sampled_from("123"), SIZES), st.booleans()),
    max_size=12,
)


@given(STEPS, st.sampled_from([0.0, 0.5, 1.0]))
def test_factor_is_0_exactly_while_a_violation_is_known(steps, fallback):
    """Compare with a plain record of the last size from each of three brokers with one volume each."""
    rules = replace(KAFKA, fallback=fallback)
    state, now, sizes_by_broker, valid_until, last = start_state(0, rules), 0, {}, 5 * MINUTE, 1.0
    for pause, sizes, describable in steps:
        now += pause
        if describable:
            silent = tuple(b for b in "123" if b not in sizes)
            state = after_observation(
                state, polled(*(volume(b, size) for b, size in sizes.items()), silent=silent), now, rules
            )
            sizes_by_broker.update({b: (now, size) for b, size in sizes.items() if size is not None})
        else:
            state = after_failure(state, "no broker answers", now, rules)
        valid = {b: size for b, (at, size) in sizes_by_broker.items() if now <= at + 5 * MINUTE}
        violating = any(size <= 100 for size in valid.values())
        if violating or (describable and len(valid) == 3):
            valid_until, last = now + 5 * MINUTE, 0.0 if violating else 1.0
        assert factor(state, now, rules) == (last if now <= valid_until else fallback)


@dataclass
class PushedCluster:
    """A plain model of pushes: the last sizes of each broker's one volume, and when a push last set a factor.

    Attributes:
        sizes: of each known broker, the last known size and its time; None if it was never known.
        held_until: the end of the last factor's validity; moved by violations at each push that was due.
    """

    fallback: float
    sizes: dict[str, tuple[int, int] | None] = field(default_factory=dict)
    last: float = 1.0
    held_until: int = 5 * MINUTE
    pushed_ms: int = 0

    def push(self, sizes: dict[str, int | None], now: int, *, complete: bool) -> None:
        self._pass(now)
        if complete:
            self.sizes = {b: known for b, known in self.sizes.items() if b in sizes}
        for broker, size in sizes.items():
            self.sizes[broker] = self.sizes.get(broker) if size is None else (now, size)
        self.pushed_ms = now
        self._judge(now)

    def forget(self, broker: str) -> None:
        del self.sizes[broker]
        self._judge(self.pushed_ms)

    def factor(self, now: int) -> float:
        late = copy.deepcopy(self)
        late._pass(now)
        return late.last if now <= late.held_until else self.fallback

    def _pass(self, now: int) -> None:
        """Each push that was due renews the validity while a violation is known."""
        for due in range(self.pushed_ms + MINUTE, now + 1, MINUTE):
            if self._violates(due):
                self.held_until = max(self.held_until, due + 5 * MINUTE)

    def _judge(self, now: int) -> None:
        violates = self._violates(now)
        if violates or len(self._valid(now)) == len(self.sizes):
            self.last, self.held_until = 0.0 if violates else 1.0, now + 5 * MINUTE

    def _valid(self, now: int) -> list[int]:
        return [known[1] for known in self.sizes.values() if known and now <= known[0] + 5 * MINUTE]

    def _violates(self, now: int) -> bool:
        return any(size <= 100 for size in self._valid(now))


PUSHES = st.one_of(
    st.tuples(st.just("complete"), st.dictionaries(st.sampled_from("123"), SIZES)),
    st.tuples(st.just("part"), st.dictionaries(st.sampled_from("123"), SIZES, min_size=1)),
    st.tuples(st.just("forget"), st.sampled_from("123")),
)
PAUSES = st.one_of(
    st.sampled_from([MINUTE - 1, MINUTE, 5 * MINUTE, 5 * MINUTE + 1]), st.integers(1, 4 * MINUTE)
)


@settings(max_examples=400)
@given(st.lists(st.tuples(PAUSES, PUSHES), max_size=14), st.sampled_from([0.0, 0.5, 1.0]))
def test_factor_of_pushes_is_that_of_a_plain_model(steps, fallback):
    """Agents of three brokers push parts, or one pushes everything; brokers are forgotten."""
    rules = replace(PUSH, fallback=fallback)
    state, model, now = start_state(0, rules), PushedCluster(fallback), 0
    for pause, (kind, what) in steps:
        now += pause
        if kind == "forget":
            if what in model.sizes:
                state = after_forgetting(state, what, now, rules)
                model.forget(what)
        else:
            seen = Observation(
                tuple(volume(b, size) for b, size in what.items()),
                None if kind == "complete" else frozenset(),
            )
            state = after_observation(state, seen, now, rules)
            model.push(what, now, complete=kind == "complete")
        assert {v.broker for v in state.volumes} == model.sizes.keys()
        for later in (0, MINUTE, 5 * MINUTE, 5 * MINUTE + 1, 9 * MINUTE, 11 * MINUTE):
            assert factor(state, now + later, rules) == model.factor(now + later), (kind, what, later)
