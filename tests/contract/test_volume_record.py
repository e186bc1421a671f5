"""The lease and the record of the throttle factor in real stores: one leader at a time, no late writer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest
import redis.asyncio

from app.domain.volumes import Drill, Known, Rules, State, start
from app.store.lease import Lease
from app.store.port import StoreError
from app.store.volumes import LEASE, RECORD_KEY, VolumeRecord
from tests.stores import KINDS, running

RULES = Rules("kafka")


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
async def contenders(url: str, raw: redis.asyncio.Redis) -> AsyncIterator[tuple[Lease, Lease]]:
    async with AsyncExitStack() as stack:
        two = Lease.at(url, LEASE, "a", 60), Lease.at(url, LEASE, "b", 60)
        for one in two:
            stack.push_async_callback(one.close)
        yield two


async def test_what_is_written_is_read_as_it_was(record: VolumeRecord):
    before = await record.read()
    assert (before.state, before.drill, before.raw) == (None, None, b"")
    state = start(before.now_ms, RULES)
    full = State(
        **{name: getattr(state, name) for name in state.__slots__}
        | {"volumes": (Known("1", "/a", 2**53, None, None, False),), "trouble": "broker 2 is unknown"}
    )
    assert await record.replace(before.raw, full) == "written"
    await record.begin_drill(Drill(0.2, 1, 2, "alice"), before.now_ms)
    after = await record.read()
    assert (after.state, after.drill) == (full, Drill(0.2, 1, 2, "alice"))
    await record.end_drill()
    assert (await record.read()).drill is None


async def test_the_record_does_not_expire_and_a_drill_does(record: VolumeRecord, raw: redis.asyncio.Redis):
    now = (await record.read()).now_ms
    await record.replace(b"", start(now, RULES))
    await record.begin_drill(Drill(0.2, now, now + 1_000, "alice"), now)
    assert await raw.ttl(RECORD_KEY) == -1
    assert 0 < await raw.ttl(RECORD_KEY + b":drill") <= 86_401


async def test_of_two_writers_who_read_the_same_one_is_told_that_it_changed(record: VolumeRecord):
    seen = await record.read()
    assert await record.replace(seen.raw, start(1, RULES)) == "written"
    assert await record.replace(seen.raw, start(2, RULES)) == "changed"
    assert (await record.read()).state == start(1, RULES)


async def test_one_holds_the_lease_and_renews_it_under_its_token(contenders: tuple[Lease, Lease]):
    a, b = contenders
    token = await a.acquire()
    assert token is not None
    assert await b.acquire() is None
    assert await a.acquire() == token
    await a.release()
    assert await b.acquire() == token + 1
    await a.release()  # what it does not hold it cannot give up
    assert await a.acquire() is None


async def test_a_holder_that_hung_is_fenced_before_its_successor_wrote_anything(
    contenders: tuple[Lease, Lease], record: VolumeRecord, raw: redis.asyncio.Redis
):
    a, b = contenders
    old = await a.acquire()
    seen = await record.read()
    assert await record.replace(seen.raw, start(1, RULES), old) == "written"
    await raw.delete(f"qg1:{LEASE}:lease")  # which is what the end of a lease does
    new = await b.acquire()
    seen = await record.read()
    assert await record.replace(seen.raw, start(2, RULES), old) == "fenced"
    assert (await record.read()).state == start(1, RULES)
    assert await record.replace(seen.raw, start(3, RULES), new) == "written"


async def test_a_store_that_lost_the_token_gives_the_holder_a_new_one(
    contenders: tuple[Lease, Lease], record: VolumeRecord, raw: redis.asyncio.Redis
):
    a, _ = contenders
    await a.acquire()
    await raw.flushall()
    token = await a.acquire()
    assert await record.replace(b"", start(1, RULES), token) == "written"


async def test_a_record_that_another_version_wrote_is_an_error_and_not_none(
    record: VolumeRecord, raw: redis.asyncio.Redis
):
    await raw.set(RECORD_KEY, b"\xc1")
    with pytest.raises(StoreError, match="cannot be read"):
        await record.read()
