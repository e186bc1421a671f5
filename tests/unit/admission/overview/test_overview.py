"""The overview of several processes, from their counts to its entries, by the store's time of a test."""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_left
from itertools import accumulate, pairwise

import pytest
from msgspec import msgpack

from app.admission.metrics.metrics import Metrics
from app.admission.metrics.tally import Tally
from app.admission.overview import publisher as publishing
from app.admission.overview.overview import DeploymentOverview, Resolution
from app.admission.overview.publisher import Publisher
from app.store.port import StoreError
from app.store.samples import COUNTED, LATENCY_S, NewSamples, ProcessSample, TimedSample

START_S = 1_763_719_700
"""The store's time when the clock of the tests is 0; 20 s into a minute."""
TIMEOUT = StoreError("timeout", "no answer")
BOTH: tuple[Resolution, ...] = ("second", "minute")


class Store:
    """Both series of a store, and its clock, which tests move by hand.

    Attributes:
        error: raised by each call.
        fate: of the next samples: `taken`, `lost`, taken without a `reply`, or no `room` for them.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.reads = 0
        self.error: StoreError | None = None
        self.fate = "taken"
        self._series: tuple[list[TimedSample], list[TimedSample]] = ([], [])

    def clock(self) -> float:
        return self.now_s

    @property
    def now_ms(self) -> int:
        return round((START_S + self.now_s) * 1000)

    async def append(self, second: bytes, minute: bytes, at: int | None, at_minute: int) -> tuple[int, bool]:
        if self.error or self.fate == "lost":
            raise self.error or TIMEOUT
        if self.fate == "room":
            return self.now_ms, False
        at = round(self.now_ms / 1000) if at is None else at
        for series, ends, sample in zip(self._series, (at, at_minute), (second, minute), strict=True):
            if sample:
                read = msgpack.decode(sample, type=ProcessSample)
                series.append(TimedSample(ends, self.now_ms, read))
        if self.fate == "reply":
            raise TIMEOUT
        return self.now_ms, True

    async def read(self) -> NewSamples:
        self.reads += 1
        await asyncio.sleep(0)
        if self.error:
            raise self.error
        seconds, minutes = self._series
        found = NewSamples(self.now_ms, [*seconds], [*minutes], is_all=True)
        seconds.clear()
        minutes.clear()
        return found

    def rewind(self) -> None:
        raise AssertionError("the clock did not go back")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(publishing, "SPREAD_S", 0.0)
    return Store()


class Process:
    """A process that counts, and publishes its counts."""

    def __init__(self, store: Store, name: str) -> None:
        self.metrics = Metrics()
        self.publisher = Publisher(
            store,
            node=name,
            version="0.2.0",
            totals=self.metrics.totals,
            throttled=Tally(),
            clock=store.clock,
        )

    def shed(self, requests: int) -> None:
        for _ in range(requests):
            self.metrics.count_shed("age")


def summed(overview: DeploymentOverview, resolution: Resolution, name: str) -> int:
    return sum(point.counts[COUNTED.index(name)] for point in overview.view(resolution).points)


async def test_minutes_and_seconds_have_the_same_sum_and_a_kill_is_a_gap_of_each(store: Store):
    overview = DeploymentOverview(store, clock=store.clock)
    stops, is_killed, stays = (Process(store, name) for name in ("stops", "is killed", "stays"))
    for second in range(400):
        for process, until in ((stops, 100), (is_killed, 205), (stays, 400)):
            if second < until:
                process.shed(1)
                await process.publisher.publish()
        if second == 100:
            stops.shed(3)
            await stops.publisher.publish(is_last=True)
        store.now_s += 1
    await stays.publisher.publish(is_last=True)
    store.now_s += 60
    await overview.refresh()
    assert summed(overview, "second", "shed") == 103 + 205 + 400
    # By the minute, a process that was killed counts until its last whole minute: seconds 0 to 160.
    assert summed(overview, "minute", "shed") == 103 + 161 + 400
    seconds, minutes = ([point.at for point in overview.view(each).points] for each in ("second", "minute"))
    assert [(at - START_S, later - at) for at, later in pairwise(seconds) if later > at + 1] == [(204, 4)]
    first = START_S // 60
    assert minutes == [first + 1, first + 2, first + 3, first + 5, first + 6, first + 7]


async def test_minute_whose_last_sample_is_lost_is_published_a_second_later(store: Store):
    overview, process = DeploymentOverview(store, clock=store.clock), Process(store, "one")
    for second in range(180):
        process.shed(1)
        store.error = StoreError("timeout", "no answer") if second == 40 else None  # as a minute ends
        await process.publisher.publish()
        await overview.refresh()
        store.now_s += 1
    seconds, minutes = overview.view("second").points, overview.view("minute").points
    assert [at.at - START_S for at, later in pairwise(seconds) if later.at > at.at + 1] == [39]
    first = START_S // 60 + 1
    shed = COUNTED.index("shed")
    assert [(point.at, point.counts[shed]) for point in minutes] == [
        (first, 42),
        (first + 1, 59),
        (first + 2, 60),
    ]


@pytest.mark.parametrize("seed", range(10))
async def test_no_count_is_lost_or_added_twice_whatever_becomes_of_samples(store: Store, seed: int):
    chance = random.Random(seed)
    live, processes, shed = DeploymentOverview(store, clock=store.clock), [Process(store, "0")], 0
    for second in range(200):
        if chance.random() < 0.05:
            processes.append(Process(store, f"{second}"))
        for process in list(processes):
            requests = chance.randrange(3)
            process.shed(requests)
            shed += requests
            store.fate = chance.choice(("taken", "taken", "taken", "lost", "reply", "room"))
            if len(processes) > 1 and chance.random() < 0.02:
                store.fate = "taken"
                await process.publisher.publish(is_last=True)
                processes.remove(process)
            elif chance.random() < 0.95:  # else it is late
                await process.publisher.publish()
        if chance.random() < 0.5:
            await live.refresh()
        store.now_s += chance.choice((0.7, 1, 1, 1, 5))
    store.fate = "taken"
    for process in processes:
        await process.publisher.publish()
    store.now_s += 70
    for process in processes:
        await process.publisher.publish(is_last=True)
    store.now_s += 70
    await live.refresh()
    assert [summed(live, each, "shed") for each in BOTH] == [shed, shed]
    assert all(min(point.counts) >= 0 for each in BOTH for point in live.view(each).points)


async def test_shed_requests_are_counted_apart_from_decisions(store: Store):
    overview, process = DeploymentOverview(store, clock=store.clock), Process(store, "one")
    process.shed(3)
    await process.publisher.publish()
    store.now_s += 4
    await overview.refresh()
    (point,) = overview.view("second").points
    assert dict(zip(COUNTED, point.counts, strict=True)) == dict.fromkeys(COUNTED, 0) | {"shed": 3}


async def test_percentiles_of_added_histograms_are_those_of_all_answers(store: Store):
    overview = DeploymentOverview(store, clock=store.clock)
    chance = random.Random(33)
    processes = [Process(store, f"node-{number}") for number in range(3)]
    took: list[float] = []
    for second in range(20):
        for number, process in enumerate(processes):
            # Some processes are slow, and one has few answers: a mean of percentiles would be wrong.
            times = [chance.lognormvariate(-7 + 1.5 * number, 1) for _ in range(500 // (number * 9 + 1))]
            took += times
            process.metrics.observe_decisions(times)
            await process.publisher.publish(is_last=second == 19)
        store.now_s += 1
    store.now_s += 3
    await overview.refresh()
    latency = [
        sum(column) for column in zip(*(p.latency for p in overview.view("second").points), strict=True)
    ]
    assert sum(latency) == len(took)
    took.sort()
    places = set()
    for percent in range(1, 101):
        answers = -(-percent * len(took) // 100)
        place = next(place for place, reached in enumerate(accumulate(latency)) if reached >= answers)
        assert place == bisect_left(LATENCY_S, took[answers - 1])
        places.add(place)
    assert len(places) > 5, "the answers are spread over the bounds"


@pytest.mark.parametrize("error", [None, StoreError("timeout", "no answer")])
async def test_callers_in_a_loop_read_the_store_once_a_second(store: Store, error: StoreError | None):
    store.error = error
    overview = DeploymentOverview(store, clock=store.clock)
    for _ in range(100):
        for _ in range(3):
            await asyncio.gather(*(overview.refresh() for _ in range(20)))
        store.now_s += 0.1
    assert store.reads == 10


async def test_store_that_is_away_is_not_read(store: Store):
    away = True
    overview = DeploymentOverview(store, away=lambda: away, clock=store.clock)
    await overview.refresh()
    assert (store.reads, overview.view("second").now_ms) == (0, 0)
    away = False
    await overview.refresh()
    assert (store.reads, overview.view("second").now_ms) == (1, store.now_ms)
