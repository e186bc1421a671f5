"""The lease and the record of the throttle factor in real stores: one leader, and no late writes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest
import redis.asyncio

from app.domain.volumes import Drill, FactorState, KnownVolume, VolumeRules, start_state
from app.store.leader_election import Contender
from app.store.port import StoreError
from app.store.volumes import LEASE, RECORD_KEY, VolumeRecord
from tests.stores import KINDS, running

RULES = VolumeRules("kafka")


@pytest.fixture(scope="module", params=KINDS)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param) as found:
        yield found


@pytest.fixture
async def raw(url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.from_url(url) as client:
        await client.flushall()
        yield client


@pytest.fixture
async def record(url: str, raw: redis.asyncio.Redis) -> AsyncIterator[VolumeRecord]:
    found = VolumeRecord.at(url)
    yield found
    await found.close()


@pytest.fixture
async def contenders(url: str, raw: redis.asyncio.Redis) -> AsyncIterator[tuple[Contender, Contender]]:
    async with AsyncExitStack() as stack:
        two = Contender.at(url, LEASE, "a", 60), Contender.at(url, LEASE, "b", 60)
        for one in two:
            stack.push_async_callback(one.close)
        yield two


async def test_record_is_read_as_it_was_written(record: VolumeRecord):
    before = await record.read()
    assert (before.state, before.drill, before.raw) == (None, None, b"")
    state = start_state(before.now_ms, RULES)
    full = FactorState(
        **{name: getattr(state, name) for name in state.__slots__}
        | {"volumes": (KnownVolume("1", "/a", 2**53, None, None, False),), "trouble": "broker 2 is unknown"}
    )
    assert await record.replace(before.raw, full) == "written"
    await record.begin_drill(Drill(0.2, 1, 2, "alice"), before.now_ms)
    after = await record.read()
    assert (after.state, after.drill) == (full, Drill(0.2, 1, 2, "alice"))
    await record.end_drill()
    assert (await record.read()).drill is None


async def test_record_does_not_expire_but_a_drill_does(record: VolumeRecord, raw: redis.asyncio.Redis):
    now = (await record.read()).now_ms
    await record.replace(b"", start_state(now, RULES))
    await record.begin_drill(Drill(0.2, now, now + 1_000, "alice"), now)
    assert await raw.ttl(RECORD_KEY) == -1
    assert 0 < await raw.ttl(RECORD_KEY + b":drill") <= 86_401


async def test_second_of_two_writers_that_read_the_same_record_learns_that_it_changed(record: VolumeRecord):
    seen = await record.read()
    assert await record.replace(seen.raw, start_state(1, RULES)) == "written"
    assert await record.replace(seen.raw, start_state(2, RULES)) == "changed"
    assert (await record.read()).state == start_state(1, RULES)


async def test_holder_renews_the_lease_under_its_token(contenders: tuple[Contender, Contender]):
    a, b = contenders
    token = await a.acquire()
    assert token is not None
    assert await b.acquire() is None
    assert await a.acquire() == token
    await a.release()
    assert await b.acquire() == token + 1
    await a.release()  # it cannot release a lease that it does not hold
    assert await a.acquire() is None


async def test_hung_holder_is_fenced_before_its_successor_writes(
    contenders: tuple[Contender, Contender], record: VolumeRecord, raw: redis.asyncio.Redis
):
    a, b = contenders
    old = await a.acquire()
    seen = await record.read()
    assert await record.replace(seen.raw, start_state(1, RULES), old) == "written"
    await raw.delete(f"qg1:{LEASE}:lease")  # like an expired lease
    new = await b.acquire()
    seen = await record.read()
    assert await record.replace(seen.raw, start_state(2, RULES), old) == "fenced"
    assert (await record.read()).state == start_state(1, RULES)
    assert await record.replace(seen.raw, start_state(3, RULES), new) == "written"


async def test_store_that_lost_the_token_gives_the_holder_a_new_one(
    contenders: tuple[Contender, Contender], record: VolumeRecord, raw: redis.asyncio.Redis
):
    a, _ = contenders
    await a.acquire()
    await raw.flushall()
    token = await a.acquire()
    assert await record.replace(b"", start_state(1, RULES), token) == "written"


async def test_record_of_another_version_is_an_error(record: VolumeRecord, raw: redis.asyncio.Redis):
    await raw.set(RECORD_KEY, b"\xc1")
    with pytest.raises(StoreError, match="cannot be read"):
        await record.read()
