"""Samples in real stores: what is read, the bound of memory, the longest series dropped first, no room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from math import ceil, log
from random import Random
from typing import Any

import pytest
import redis.asyncio
from msgspec import msgpack

from app.admission.metrics.metrics import Metrics
from app.admission.metrics.tally import Tally
from app.admission.overview.overview import DeploymentOverview
from app.admission.overview.publisher import Publisher
from app.http.openapi.overview import LATENCY_MS
from app.run.commands.top import quantile
from app.store.samples import (
    AT_ONCE,
    COUNTED,
    LARGEST,
    MINUTES_MS,
    SECONDS_MS,
    ProcessSample,
    SampleSeries,
    TimedSample,
)
from app.terminal import duration
from tests import clusters
from tests.report import say
from tests.stores import KINDS, MAXMEMORY, running

SECONDS, MINUTES, BYTES = "qg1:overview:seconds", "qg1:overview:minutes", "qg1:overview:bytes"


@pytest.fixture(scope="module", params=KINDS)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param) as found:
        yield found


@pytest.fixture
async def raw(url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.from_url(url) as client:
        await client.flushall()
        yield client
        await client.config_set("maxmemory", MAXMEMORY)


@pytest.fixture
async def series(url: str, raw: redis.asyncio.Redis) -> AsyncIterator[SampleSeries]:
    found = SampleSeries.at(url, timeout_s=60.0)
    yield found
    await found.close()


def sample(admits: int = 0, node: str = "node-1", *, first: bool = False, last: bool = False) -> bytes:
    counts = [admits, *[0] * (len(COUNTED) - 1)]
    return msgpack.encode(ProcessSample(node, "0.1.0", first, last, 0, counts, [0] * 11, []))


async def all_of(series: SampleSeries) -> tuple[list[TimedSample], list[TimedSample]]:
    """All samples of both series that were not read yet."""
    seconds, minutes, is_all = [], [], False
    while not is_all:
        _, some_seconds, some_minutes, is_all = await series.read()
        seconds += some_seconds
        minutes += some_minutes
    return seconds, minutes


async def used(raw: redis.asyncio.Redis) -> int:
    """The bytes that the store uses; MEMORY USAGE of Redis estimates streams too high."""
    found: int = (await raw.info("memory"))["used_memory"]
    return found


async def test_a_reader_gets_what_is_new_to_it(series: SampleSeries):
    now_ms, took = await series.append(sample(1), b"", None, 0)
    assert took
    at = now_ms // 1000
    await series.append(sample(2), sample(2), at, at // 60)
    seconds, minutes = await all_of(series)
    assert [each.sample.counts[0] for each in seconds if each.sample] == [1, 2]
    assert abs(seconds[0].at * 1000 - now_ms) <= 500
    assert [each.at for each in seconds[1:] + minutes] == [at, at // 60]
    assert await all_of(series) == ([], [])
    await series.append(sample(3), b"", at + 1, 0)
    assert [each.at for each in (await all_of(series))[0]] == [at + 1]


async def test_a_process_that_is_wrong_about_the_time_is_put_right(series: SampleSeries):
    now_ms, _ = await series.append(sample(1), sample(1), 7, 7)
    ((second,), (minute,)) = await all_of(series)
    assert abs(second.at * 1000 - now_ms) <= 500
    assert minute.at == second.at // 60


async def test_many_samples_come_in_several_replies(series: SampleSeries):
    for number in range(2 * AT_ONCE + 1):
        await series.append(sample(number), b"", None, 0)
    lengths = [len((await series.read()).seconds) for _ in range(4)]
    assert lengths == [AT_ONCE, AT_ONCE, 1, 0]


async def test_series_are_in_one_slot_of_a_cluster():
    with clusters.running(replicas=False) as cluster:
        series = SampleSeries.at(cluster.url, timeout_s=60.0)
        try:
            assert (await series.append(sample(1), sample(1), None, 0))[1]
            assert (await series.append(sample(2), b"", None, 0))[1]
            seconds, minutes = await all_of(series)
            assert (len(seconds), len(minutes)) == (2, 1)
        finally:
            await series.close()


async def test_samples_go_back_15_minutes_and_a_day(series: SampleSeries, raw: redis.asyncio.Redis):
    now_ms, _ = await series.append(sample(), sample(), None, 0)
    await raw.delete(SECONDS, MINUTES)
    for key, span_ms in ((SECONDS, SECONDS_MS), (MINUTES, MINUTES_MS)):
        for number in range(300):  # more than one node of a stream
            fields: Any = {"at": 1, "before": 0, "sample": sample()}
            await raw.xadd(key, fields, id=f"{now_ms - span_ms - 1_000}-{number + 1}")
    await series.append(sample(), sample(), None, 0)
    assert await raw.xlen(SECONDS) < 150
    assert await raw.xlen(MINUTES) < 150
    assert 0 < await raw.pttl(SECONDS) <= MINUTES_MS


async def test_samples_of_another_layout_are_passed_over(series: SampleSeries, raw: redis.asyncio.Redis):
    newer = msgpack.encode([*msgpack.decode(sample(5)), "a field of a later version"])
    await series.append(newer, b"", None, 0)
    await series.append(b"no sample at all", b"", None, 0)
    seconds, _ = await all_of(series)
    assert [each.sample and each.sample.counts[0] for each in seconds] == [5, None]


@pytest.mark.parametrize("minutes_first", [True, False])
async def test_each_series_keeps_half_of_a_64th_and_the_longest_is_dropped_first(
    series: SampleSeries, raw: redis.asyncio.Redis, minutes_first: bool
):
    """The series by the minute is full, or begins, when that by the second needs all of the room."""
    most = 1024 * 1024
    await series.append(sample(), sample(), None, 0)
    empty = await used(raw)
    for _ in range(500 if minutes_first else 0):
        await series.append(sample().ljust(LARGEST), sample().ljust(LARGEST), None, 0)
    await raw.config_set("maxmemory", most * 64)
    lengths, sizes, refused = [], [], 0
    for number in range(1_200):
        minute = b"" if number % 2 else sample().ljust(1_000)
        _, took = await series.append(sample().ljust(1_000), minute, None, 0)  # the worst size for jemalloc
        refused += not took
        lengths.append((await raw.xlen(SECONDS), await raw.xlen(MINUTES)))
        if len(lengths) % 100 == 0:
            sizes.append(await used(raw) - empty)
    say(f"samples take {sizes} bytes of {most}; the series had {lengths[::100]} entries")
    assert refused <= 8  # each call removes 64 samples of a series at most, until the new bound holds
    assert max(sizes) <= most
    half = most // 2 // 1_298  # of samples as they are reckoned
    assert all(abs(length - half) < 5 for length in lengths[-1]), "the bound is used, by each"


async def test_one_series_has_the_room_that_the_other_does_not_need(
    series: SampleSeries, raw: redis.asyncio.Redis
):
    most = 256 * 1024
    await raw.config_set("maxmemory", most * 64)
    for _ in range(300):
        await series.append(sample().ljust(1_000), b"", None, 0)
    assert await raw.xlen(SECONDS) == most // 1_298
    for _ in range(600):
        await series.append(sample(), sample().ljust(1_000), None, 0)
    assert await raw.xlen(MINUTES) > most // 1_298 // 2, "short seconds leave room"
    assert await raw.xlen(SECONDS) > 400


async def test_a_store_without_room_takes_no_sample(series: SampleSeries, raw: redis.asyncio.Redis):
    assert (await series.append(sample(), b"", None, 0))[1]
    await raw.set("buckets", b"x" * 16 * 1024 * 1024)
    used = (await raw.info("memory"))["used_memory"]
    await raw.config_set("maxmemory", used * 10 // 9)  # full for buckets
    assert (await series.append(sample(), b"", None, 0))[1]
    used = (await raw.info("memory"))["used_memory"]
    await raw.config_set("maxmemory", used * 32 // 31 - 1024)  # beyond the reserve
    assert not (await series.append(sample(), b"", None, 0))[1]
    await raw.config_set("maxmemory", used // 2)
    assert not (await series.append(sample(), b"", None, 0))[1]  # nor beyond all of it
    await raw.config_set("maxmemory", MAXMEMORY)
    assert len((await all_of(series))[0]) == 2


async def test_a_lost_count_of_bytes_begins_anew(series: SampleSeries, raw: redis.asyncio.Redis):
    for _ in range(3):
        await series.append(sample(), b"", None, 0)
    await raw.xtrim(SECONDS, maxlen=1, approximate=False)
    await raw.delete(BYTES)
    assert (await series.append(sample(), b"", None, 0))[1]
    assert await raw.xlen(SECONDS) == 1


async def test_a_clock_that_went_back_begins_anew(series: SampleSeries, raw: redis.asyncio.Redis):
    now_ms, _ = await series.append(sample(1), b"", None, 0)
    fields: Any = {"at": 1, "before": 10_000, "sample": sample()}
    await raw.xadd(SECONDS, fields, id=f"{now_ms + 3_600_000}-0")  # by the clock before a failover
    await series.append(sample(2), b"", None, 0)
    series.rewind()
    ((found,), _) = await all_of(series)
    assert found.sample is not None
    assert found.sample.counts[0] == 2


async def counted(overview: DeploymentOverview, admits: int) -> int:
    """Read until the points by the second have so many admitted asks or more; return how many they have."""
    found = 0
    async with asyncio.timeout(60):
        while found < admits:
            await overview.refresh()
            found = sum(point.counts[0] for point in overview.view("second").points)
            await asyncio.sleep(0.05)  # the polling interval
    return found


async def test_overview_goes_on_after_the_clock_of_the_store_went_back(
    series: SampleSeries, raw: redis.asyncio.Redis
):
    """A node reads before the next sample after the step."""
    now_ms, _ = await series.append(sample(), b"", None, 0)
    ahead_ms = now_ms + 3_600_000
    await raw.delete(SECONDS)
    for place in range(3):  # by the clock before it was set right
        fields: Any = {"at": ahead_ms // 1_000 + place, "before": 0, "sample": sample(place, first=not place)}
        await raw.xadd(SECONDS, fields, id=f"{ahead_ms + 1_000 * place}-0")
    fields = {"at": ahead_ms // 60_000, "before": 0, "sample": sample(1, first=True)}
    await raw.xadd(MINUTES, fields, id=f"{ahead_ms}-0")
    overview = DeploymentOverview(series)
    await overview.refresh()
    assert not overview.view("second").nodes, "samples of the future are not shown"
    assert (await series.append(sample(7, first=True), b"", None, 0))[1]
    assert await raw.xlen(MINUTES) == 0
    assert (await series.append(sample(9, last=True), sample(9, first=True, last=True), None, 0))[1]
    assert await counted(overview, 9) == 9
    assert await raw.xlen(MINUTES) == 1


@pytest.mark.parametrize("size", [150, 400, LARGEST])
async def test_64_processes_send_and_keep_few_bytes(
    series: SampleSeries, raw: redis.asyncio.Redis, size: int
):
    seconds, processes = 30, 64
    await series.append(sample(), b"", None, 0)
    empty, before = await used(raw), await raw.info("stats")
    for _ in range(seconds * processes):
        assert (await series.append(sample().ljust(size), b"", None, 0))[1]
    after = await raw.info("stats")
    sent = (after["total_net_input_bytes"] - before["total_net_input_bytes"]) / seconds
    kept = (await used(raw) - empty) / seconds / processes
    whole = kept * processes * (SECONDS_MS // 1_000 + MINUTES_MS // 60_000)
    say(
        f"samples of {size} bytes: {processes} processes send {sent / 1024:.0f} KiB a second; without a "
        f"bound the store would keep {whole / 2**20:.0f} MiB, {kept:.0f} bytes for each"
    )
    assert sent < processes * (size + 4 * 1024)  # the script is sent with each
    assert kept <= size * 1.25 + 48, "more than the script reckons"


async def test_percentiles_of_the_sum_are_those_of_all_answers(series: SampleSeries):
    """Three processes, of which each has other latencies."""
    random, every = Random(33), []
    for place, median_s in enumerate((0.0008, 0.006, 0.09)):
        metrics = Metrics()
        publisher = Publisher(
            series, node=f"node-{place}", version="1", totals=metrics.totals, throttled=Tally()
        )
        for asks in (3_000, 500, 100):
            some = [random.lognormvariate(log(median_s), 0.8) for _ in range(asks)]
            metrics.observe_decisions(some)
            every += some
            await publisher.publish()
        await publisher.publish(is_last=True)
    overview = DeploymentOverview(series)
    counts: list[int] = []
    async with asyncio.timeout(60):
        while sum(counts) < len(every):
            await overview.refresh()
            counts = [
                *map(sum, zip(*(point.latency for point in overview.view("second").points), strict=True))
            ]
            await asyncio.sleep(0.05)  # the polling interval
    every.sort()
    found = {}
    for part in (0.01, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999):
        exact_ms = every[ceil(part * len(every)) - 1] * 1_000
        bound_ms = min((bound for bound in LATENCY_MS if bound >= exact_ms), default=None)
        found[part] = quantile(counts, LATENCY_MS, part)
        assert found[part] == (
            f"> {duration(LATENCY_MS[-1])}" if bound_ms is None else f"≤ {duration(bound_ms)}"
        )
    assert len({*found.values()}) >= 5, "the percentiles differ"


async def test_an_overview_of_a_store_counts_every_ask(series: SampleSeries, url: str):
    now_ms, _ = await series.append(sample(3, first=True), b"", None, 0)
    at = now_ms // 1000
    await series.append(sample(8), b"", at + 1, 0)
    await series.append(sample(9, last=True), b"", at + 1, 0)
    overview = DeploymentOverview(series)
    assert await counted(overview, 9) == 9
