"""Points from samples: exact sums, gaps for lost samples, nothing counted twice."""

from __future__ import annotations

from itertools import pairwise

import pytest

from app.admission.overview.series import (
    MINUTE_MS,
    MOST_THROTTLED,
    Point,
    SummedSeries,
    present,
    throttled_long,
    throttled_since,
)
from app.store.samples import COUNTED, ProcessSample, ThrottledBucket, TimedSample

AT = 1_763_719_700
SPAN_S = 900


def series() -> SummedSeries:
    return SummedSeries(1_000, SPAN_S * 1_000, awaited=3, late_ms=1_500)


def sample(
    at: int,
    admits: int,
    node: str = "a",
    *,
    first: bool = False,
    last: bool = False,
    throttled: tuple[ThrottledBucket, ...] = (),
) -> TimedSample:
    """A sample until second `at`, taken a little later, of a process that admitted that many asks."""
    counts = [admits, *[0] * (len(COUNTED) - 1)]
    latency = [admits, *[0] * 10]
    made = ProcessSample(node, "0.1.0", first, last, 1, counts, latency, list(throttled))
    return TimedSample(AT + at, (AT + at) * 1_000 + 300, made)


def points(found: SummedSeries, now: int) -> dict[int, int]:
    """The admitted asks of each point."""
    found.close((AT + now) * 1_000)
    assert all(point.counts[0] == point.latency[0] for point in found.points)
    return {point.at - AT: point.counts[0] for point in found.points}


def test_a_point_has_what_all_processes_counted_since_their_samples_before() -> None:
    found = series()
    for timed in (
        *(sample(0, 3, first=True), sample(0, 5, "b", first=True)),
        *(sample(1, 10), sample(1, 5, "b"), sample(2, 11), sample(2, 7, "b")),
    ):
        found.add(timed)
    assert points(found, now=4) == {0: 8, 1: 7, 2: 3}
    assert [point.queue_asks for point in found.points] == [2, 2, 2]


def test_a_point_is_final_only_when_its_samples_had_time_to_come() -> None:
    found = series()
    found.add(sample(0, 3, first=True))
    found.close((AT + 1) * 1_000)
    assert not found.points
    found.add(sample(0, 5, "b", first=True))
    assert points(found, now=2) == {0: 8}


def test_a_process_whose_first_sample_is_not_kept_counts_from_the_first_that_is() -> None:
    found = series()
    for timed in (sample(0, 1_000), sample(1, 1_001)):
        found.add(timed)
    assert points(found, now=4) == {0: 0, 1: 1}


def test_a_lost_sample_is_a_gap_and_the_next_point_has_the_counts_of_both() -> None:
    found = series()
    for timed in (
        *(sample(0, 1, first=True), sample(0, 1, "b", first=True)),
        *(sample(1, 2, "b"), sample(2, 4), sample(2, 4, "b"), sample(3, 8), sample(3, 8, "b")),
    ):
        found.add(timed)
    assert points(found, now=5) == {0: 2, 2: 6, 3: 8}


def test_a_killed_process_leaves_a_gap_and_the_others_go_on() -> None:
    found = series()
    found.add(sample(0, 1, first=True))
    found.add(sample(0, 1, "b", first=True))
    for at in range(1, 8):
        found.add(sample(at, 1 + at, "b"))
    assert points(found, now=10) == {0: 2, 4: 4, 5: 1, 6: 1, 7: 1}


def test_a_process_that_comes_back_adds_all_its_counts_in_the_next_point() -> None:
    found = series()
    found.add(sample(0, 1, first=True))
    found.add(sample(0, 1, "b", first=True))
    for at in range(1, 20):
        found.add(sample(at, 1 + at, "b"))
    found.add(sample(20, 101))
    found.add(sample(20, 21, "b"))
    made = points(found, now=23)
    assert [at for at in range(21) if at not in made] == [1, 2, 3]
    assert made[20] == 101
    assert sum(made.values()) == 101 + 21


def after_outage(back: dict[str, float], until: int = 330) -> dict[int, tuple[int, int]]:
    """Points after an outage of the store from second 21 to 320: how many seconds each counts, and its asks.

    Every process decides 100 asks a second all the time.

    Args:
        back: when each process publishes again; `new` starts at 121, during the outage.
    """
    found = series()
    sent: list[tuple[float, TimedSample]] = []
    for node, back_at in back.items():
        spread_s = back_at % 1
        began = 121 if node == "new" else 1
        for at in (*(range(began, 21)), *range(int(back_at), until)):
            first = at == (began if began < 21 else int(back_at))
            timed = sample(at, 100 * (at - began + 1), node, first=first)
            sent.append((at + spread_s, timed._replace(taken_ms=round((AT + at + spread_s) * 1_000))))
    for _, timed in sorted(sent, key=lambda each: each[0]):
        found.add(timed)
    made = points(found, now=until + 10)
    return {at: (at - before, made[at]) for before, at in pairwise(made) if at > 20}


@pytest.mark.parametrize(
    "back",
    [
        {"a": 321.1, "b": 321.3},
        {"a": 321.1, "b": 322.3},
        {"a": 321.1, "b": 323.3},
        {"a": 321.4, "b": 324.1},
        {"a": 322.3, "b": 321.1, "c": 323.4},
    ],
    ids=str,
)
def test_processes_that_come_back_one_after_another_after_an_outage_make_no_peak(
    back: dict[str, float],
) -> None:
    rates = {at: asks / length for at, (length, asks) in after_outage(back).items()}
    assert set(rates.values()) == {100 * len(back)}
    assert min(rates) == max(map(int, back.values())), "the first point is that of the last to return"


@pytest.mark.parametrize("back", [{"a": 322.3, "new": 321.1}, {"a": 321.1, "new": 322.3}], ids=str)
def test_process_that_started_during_an_outage_makes_no_peak(back: dict[str, float]) -> None:
    found = after_outage(back)
    assert found[322] == (302, 100 * 302 + 100 * 202)
    assert {found[at] for at in range(323, 330)} == {(1, 200)}


def test_process_alone_without_the_store_comes_back_as_a_peak() -> None:
    found = series()
    for at in range(40):
        found.add(sample(at, 100 * (at + 1), "b", first=at == 0))
        if at <= 1 or at >= 30:
            found.add(sample(at, 100 * (at + 1), first=at == 0))
    made = points(found, now=43)
    assert [at for at in range(40) if at not in made] == [2, 3, 4]
    assert (made[29], made[30], made[31]) == (100, 100 + 29 * 100, 200)


def test_a_process_that_stopped_leaves_no_gap() -> None:
    found = series()
    for timed in (
        *(sample(0, 1, first=True), sample(0, 1, "b", first=True), sample(1, 5, last=True)),
        *(sample(at, 1, "b") for at in range(1, 4)),
    ):
        found.add(timed)
    assert points(found, now=6) == {0: 2, 1: 4, 2: 0, 3: 0}
    assert [point.queue_asks for point in found.points] == [1, 1, 1, 1]  # it has stopped when they are made


def test_nothing_at_all_is_no_point() -> None:
    found = series()
    found.add(sample(0, 1, first=True))
    found.add(sample(100, 6))
    assert points(found, now=103) == {0: 1, 100: 5}


def test_a_late_sample_counts_in_the_next_point() -> None:
    found = series()
    found.add(sample(0, 1, first=True))
    found.add(sample(0, 1, "b", first=True))
    found.add(sample(1, 2, "b"))
    found.close((AT + 3) * 1_000)  # without the sample of a
    late = sample(1, 9)
    found.add(late._replace(taken_ms=(AT + 3) * 1_000))
    found.add(sample(3, 3, "b"))
    found.add(sample(3, 10))
    assert sum(points(found, now=6).values()) == 13


def test_every_reader_makes_the_same_points() -> None:
    timed = [sample(0, 1, first=True), sample(0, 1, "b", first=True)]
    timed += [sample(at, at * 2, node) for at in range(1, 60) for node in "ab" if at * 7 % 5 or node == "a"]
    at_once, live = series(), series()
    for each in timed:
        at_once.add(each)
        live.add(each)
        live.close(each.taken_ms + 100)
    assert points(at_once, now=70) == points(live, now=70)
    assert sum(points(live, now=70).values()) == timed[-1].sample.counts[0] + timed[-2].sample.counts[0]  # type: ignore[union-attr]


def test_points_go_back_for_the_span_and_forgotten_processes_leave_nothing() -> None:
    found = series()
    found.add(sample(0, 1, "gone", first=True, last=True))
    for at in range(2 * SPAN_S):
        found.add(sample(at, at, first=at == 0))
    assert [*points(found, now=2 * SPAN_S + 2)] == [*range(SPAN_S + 1, 2 * SPAN_S)]
    assert [sample.node for _, sample in found.processes] == ["a"]


def test_throttled_buckets_are_added_up_and_bounded() -> None:
    found = series()
    for name in range(20):
        some = [ThrottledBucket("request_rate", f"user={name}-{n}", 1, 5) for n in range(7)]
        busy = ThrottledBucket("request_rate", "user=busy", 2, 30)
        found.add(sample(0, 1, f"node-{name}", first=True, throttled=(busy, *some)))
    found.close((AT + 3) * 1_000)
    (point,) = found.points
    assert point.throttled[0] == ThrottledBucket("request_rate", "user=busy", 40, 600)
    assert len(point.throttled) == MOST_THROTTLED


def test_samples_of_other_versions_count_as_far_as_they_are_known() -> None:
    found = series()
    newer = sample(0, 4, "newer", first=True)
    assert newer.sample is not None
    newer.sample.counts.append(99)
    older = sample(0, 2, "older", first=True)
    assert older.sample is not None
    del older.sample.counts[3:]
    for timed in (newer, older, TimedSample(0, older.taken_ms, None)):
        found.add(timed)
    found.close((AT + 3) * 1_000)
    (point,) = found.points
    assert point.counts == [6, *[0] * (len(COUNTED) - 1)]


ALICE = ("request_rate", "user=alice")


def since(*throttled: int, lost: int = 0) -> int | None:
    """Since when alice is throttled, with points until second 200, of which one is lost."""
    made = [
        Point(AT + at, [], [], 0, [ThrottledBucket(*ALICE, 1, 5)] if at in throttled else [])
        for at in range(1, 201)
        if at != lost
    ]
    found = throttled_since(made, 1_000, [ALICE]).get(ALICE)
    return None if found is None else found // 1_000 - AT


def test_a_bucket_is_throttled_since_the_first_point_without_a_longer_pause_than_a_minute() -> None:
    assert since() is None
    assert since(150) == 149
    assert since(20, 81, 140) == 19, "pauses of 60 and 58 seconds"
    assert since(20, 82, 140) == 81, "a pause of 61 seconds"
    assert since(1, 50, 100, 150, 200) == 0, "since the first point that is kept"
    assert since(100, lost=99) == 98, "its point counts the lost one, too"


def test_by_the_minute_one_minute_without_throttled_asks_is_a_short_pause() -> None:
    def minutes(*throttled: int) -> list[Point]:
        busy = [ThrottledBucket(*ALICE, 1, 5)]
        return [Point(at, [], [], 0, busy if at in throttled else []) for at in range(1, 8)]

    assert throttled_since(minutes(1, 2, 4, 5, 7), 60_000, [ALICE]) == {ALICE: 0}
    assert throttled_since(minutes(1, 4, 5, 7), 60_000, [ALICE]) == {ALICE: 3 * 60_000}


MINUTE = 29_395_328


def throttling(minutes: dict[int, str]) -> list[Point]:
    """Points by the minute, each with the principals that it throttled."""
    return [
        Point(MINUTE + at, [], [], 0, [ThrottledBucket("request_rate", f"user={one}", 1, 5) for one in names])
        for at, names in sorted(minutes.items())
    ]


@pytest.mark.parametrize(
    ("minutes", "expected"),
    [
        ({}, {}),
        (dict.fromkeys(range(1, 30), "a"), {}),
        (dict.fromkeys(range(1, 31), "a"), {"a": 0}),
        (dict.fromkeys(range(1, 31), "ab") | dict.fromkeys(range(-60, 1), "b"), {"b": -61, "a": 0}),
        (dict.fromkeys(range(-60, 29), "ab") | {29: "a", 30: "a"}, {"a": -61}),
        (dict.fromkeys(range(1, 31), "ab") | {17: "b"}, {"a": 0, "b": 0}),
        (dict.fromkeys(range(1, 31), "ab") | {17: "b", 18: "b"}, {"b": 0}),
        (dict.fromkeys(range(-60, 29), "a"), {"a": -61}),
        (dict.fromkeys(range(-60, 28), "a"), {}),
    ],
    ids=[
        *("nothing", "29 minutes", "30 minutes", "one much longer", "no more in the newest two"),
        *("not in one", "not in two", "the newest are late", "the newest are lost"),
    ],
)
def test_bucket_is_throttled_for_long_if_it_still_is(
    minutes: dict[int, str], expected: dict[str, int]
) -> None:
    kept = throttling(minutes)
    found = throttled_long(kept, present(kept, (MINUTE + 31) * MINUTE_MS - 1))
    names = {("request_rate", f"user={name}"): (MINUTE + at) * MINUTE_MS for name, at in expected.items()}
    assert list(found.items()) == list(names.items())
