"""A process publishes its counters: a sample a second, a minute when it ends, and one more when it stops."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from msgspec import msgpack

from app.admission.metrics.metrics import Totals
from app.admission.metrics.tally import Tally
from app.admission.overview import publisher as module
from app.admission.overview.publisher import Publisher
from app.store.port import StoreError
from app.store.samples import COUNTED, LARGEST, MOST_BUCKETS, ProcessSample
from tests.waiting import until

START_S = 1_763_719_700.0
"""The store's time when the clock of the tests is 0; 20 s into a minute."""


@dataclass
class Series:
    """Remembers samples; has room, or does not, or is away, as the test sets it."""

    clock: Clock
    does: bool | StoreError = True
    seconds: list[tuple[int | None, ProcessSample]] = field(default_factory=list)
    minutes: list[tuple[int, ProcessSample]] = field(default_factory=list)

    async def append(self, second: bytes, minute: bytes, at: int | None, at_minute: int) -> tuple[int, bool]:
        assert max(len(second), len(minute)) <= LARGEST
        if isinstance(self.does, StoreError):
            raise self.does
        if self.does:
            self.seconds.append((at, msgpack.decode(second, type=ProcessSample)))
            if minute:
                self.minutes.append((at_minute, msgpack.decode(minute, type=ProcessSample)))
        return round((START_S + self.clock.now) * 1000), self.does


class Clock:
    """A monotonic clock, moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Node:
    """A publisher whose process admits one ask before each sample."""

    def __init__(self) -> None:
        self.clock, self.tally, self.is_away = Clock(), Tally(), False
        self.series = Series(self.clock)
        self._admits = itertools.count(1)
        self.publisher = Publisher(
            self.series,
            node="node-1",
            version="0.1.0",
            totals=lambda: Totals([next(self._admits), *[0] * (len(COUNTED) - 1)], [0] * 11, 3),
            throttled=self.tally,
            away=lambda: self.is_away,
            clock=self.clock,
        )

    async def publish(self, seconds: int) -> None:
        """Publish once in each second."""
        for _ in range(seconds):
            await self.publisher.publish()
            self.clock.now += 1


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(module, "SPREAD_S", 0.0)
    return Node()


async def test_samples_are_named_by_the_time_of_the_store(node: Node):
    await node.publish(3)
    assert [at for at, _ in node.series.seconds] == [None, START_S + 1, START_S + 2]
    assert [sample.counts[0] for _, sample in node.series.seconds] == [1, 2, 3]
    assert [sample.is_first for _, sample in node.series.seconds] == [True, False, False]
    assert {sample.queue_asks for _, sample in node.series.seconds} == {3}


async def test_series_by_the_minute_gets_a_sample_when_a_minute_ends(node: Node):
    node.tally.add("request_rate", "user=alice", 10)
    await node.publish(30)
    node.tally.add("request_rate", "user=alice", 20)
    await node.publish(100)
    first = int(START_S) // 60 + 1
    assert [at for at, _ in node.series.minutes] == [first, first + 1]
    assert [sample.is_first for _, sample in node.series.minutes] == [True, False]
    throttled = [
        [(each.asks, each.throttle_ms) for each in sample.throttled] for _, sample in node.series.minutes
    ]
    assert throttled == [[(2, 30)], []]


async def test_a_process_that_stops_publishes_once_more(node: Node):
    node.publisher.open()
    await until(lambda: node.series.seconds)
    node.clock.now += 0.3
    await node.publisher.close()
    at, sample = node.series.seconds[-1]
    assert (at, sample.is_last) == (START_S + 1, True)
    ((minute, in_minute),) = node.series.minutes
    assert (minute, in_minute.is_first, in_minute.is_last) == (int(START_S) // 60 + 1, True, True)
    assert in_minute.counts[0] == sample.counts[0] + 1  # both read the counters


@pytest.mark.parametrize("does", [False, StoreError("timeout", "no answer")])
async def test_a_sample_that_was_not_taken_is_counted_and_the_next_has_its_counts(
    node: Node, does: bool | StoreError
):
    node.series.does = does
    await node.publish(2)
    assert (node.publisher.dropped, node.series.seconds) == (2, [])
    node.series.does = True
    await node.publish(1)
    ((_, sample),) = node.series.seconds
    assert (sample.is_first, sample.counts[0], node.publisher.dropped) == (True, 3, 2)


@pytest.mark.parametrize("does", [False, StoreError("timeout", "no answer")])
async def test_a_minute_that_was_not_taken_keeps_its_throttled_buckets(node: Node, does: bool | StoreError):
    node.tally.add("request_rate", "user=alice", 10)
    await node.publish(40)
    node.series.does = does  # as the minute ends
    await node.publish(1)
    node.series.does = True
    node.tally.add("request_rate", "user=alice", 20)
    await node.publish(61)
    throttled = [[(each.asks, each.throttle_ms) for each in one.throttled] for _, one in node.series.minutes]
    assert throttled == [[(2, 30)], []]


async def test_nothing_is_sent_to_a_store_that_is_away(node: Node):
    node.is_away = True
    await node.publish(2)
    await node.publisher.publish(is_last=True)
    assert (node.publisher.dropped, node.series.seconds) == (3, [])


async def test_a_sample_is_small_whatever_callers_name(node: Node):
    for number in range(2 * MOST_BUCKETS):
        for _ in range(number + 1):
            node.tally.add("max_connection_creation_rate", f"listener={'ä' * 60}{number:04}", 2**31)
            node.tally.add("max_connection_creation_rate", f"listener={'ä' * 500}{number}", 2**31)
    await node.publish(1)
    ((_, sample),) = node.series.seconds
    assert len(sample.throttled) == MOST_BUCKETS
    assert all(each.bucket.startswith("#") for each in sample.throttled)
