"""Counts of shadow quotas in real stores: added once, by quota and definition, within the store's room."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import redis.asyncio

from app.store.client import client_of
from app.store.compiled_quota import ShadowPeriod
from app.store.shadow_counts import KEPT_MS, MOST, ShadowCount, ShadowCounts
from tests import clusters
from tests.report import say
from tests.stores import KINDS, MAXMEMORY, running

RATE = ShadowPeriod("request_rate", "user=*", 1_000)
LATER = RATE._replace(since_ms=1_001)
OTHERS = [LATER, RATE._replace(entity="user=a"), RATE._replace(quota="producer_byte_rate")]


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
def counts(raw: redis.asyncio.Redis) -> ShadowCounts:
    return ShadowCounts(raw)


def many(number: int) -> list[ShadowCount]:
    return [(RATE._replace(entity=f"user={place}"), [9, 9, 9, 9]) for place in range(number)]


async def test_counts_of_processes_are_added_up_for_each_quota_and_definition(counts: ShadowCounts):
    assert await counts.add("a", 1, [(RATE, [3, 0, 2, 1]), (LATER, [0, 5, 0, 0])])
    assert await counts.add("b", 1, [(RATE, [1, 0, 0, 2**53 - 2])])
    _, found = await counts.read([RATE, *OTHERS])
    assert found == [[4, 0, 2, 2**53 - 1], [0, 5, 0, 0], [0] * 4, [0] * 4]


async def test_a_batch_that_comes_again_is_added_once(counts: ShadowCounts):
    for batch in (1, 1, 2, 1, 2):
        assert await counts.add("a", batch, [(RATE, [1, 0, 0, 0])])
    _, found = await counts.read([RATE])
    assert found == [[2, 0, 0, 0]]


async def test_a_quota_without_counts_has_none_and_the_time_is_the_stores(
    counts: ShadowCounts, raw: redis.asyncio.Redis
) -> None:
    before_s, _ = await raw.time()
    now_ms, found = await counts.read([RATE])
    assert found == [[0] * 4]
    assert before_s * 1000 <= now_ms < before_s * 1000 + 60_000
    assert (await counts.read([]))[1] == []
    assert await raw.dbsize() == 0, "reading makes no key"


async def test_counts_are_kept_after_the_last_ask_and_numbers_of_batches_for_a_day(
    counts: ShadowCounts, raw: redis.asyncio.Redis
) -> None:
    await counts.add("a", 1, [(RATE, [1, 0, 0, 0])])
    ttls = sorted([await raw.pttl(key) async for key in raw.scan_iter()])
    assert 0 < ttls[0] <= 86_400_000 < ttls[1] <= KEPT_MS


async def test_a_store_without_room_takes_none_and_takes_them_later(
    counts: ShadowCounts, raw: redis.asyncio.Redis
) -> None:
    await raw.set("buckets", b"x" * 16 * 1024 * 1024)
    used = (await raw.info("memory"))["used_memory"]
    await raw.config_set("maxmemory", used * 32 // 31 - 1024)
    assert not await counts.add("a", 1, [(RATE, [1, 0, 0, 0])])
    assert (await counts.read([RATE]))[1] == [[0] * 4]
    await raw.config_set("maxmemory", MAXMEMORY)
    assert await counts.add("a", 1, [(RATE, [1, 0, 0, 0])])
    assert (await counts.read([RATE]))[1] == [[1, 0, 0, 0]]


async def test_a_shadow_quota_takes_few_bytes_and_a_batch_little_time(
    counts: ShadowCounts, raw: redis.asyncio.Redis
) -> None:
    await counts.add("a", 1, many(MOST))
    before, used = await raw.info("commandstats"), await raw.info("memory")
    await counts.add("a", 2, many(10 * MOST)[-MOST:])
    after, more = await raw.info("commandstats"), await raw.info("memory")
    took_us = after["cmdstat_eval"]["usec"] - before["cmdstat_eval"]["usec"]
    size = (more["used_memory"] - used["used_memory"]) / MOST
    say(f"a batch of {MOST} shadow quotas takes {took_us} us of the store; each keeps {size:.0f} bytes")
    assert size < 300


async def test_counts_are_in_one_slot_of_a_cluster() -> None:
    with clusters.running(replicas=False) as cluster:
        client = client_of(cluster.url, 60.0)
        counts = ShadowCounts(client)
        try:
            assert await counts.add("a", 1, [(each, [1, 2, 3, 4]) for each in OTHERS])
            assert (await counts.read(OTHERS))[1] == [[1, 2, 3, 4]] * 3
        finally:
            await client.aclose()
