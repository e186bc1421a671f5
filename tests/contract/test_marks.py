"""The marks by which nodes notice that the store lost its state, or that a bucket was reset."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import redis.asyncio

from app.admission.known_ids.local import renewal_plan
from app.admission.known_ids.memory import Renewal
from app.domain.ask import Ask
from app.domain.entity import Entity
from app.domain.ladder import MatchingRules, applied_quotas
from app.domain.quota import Quota
from app.store.keys import BIRTH_KEY, RESETS_KEY, bucket_key, reset_key
from app.store.port import IdsResult, Plan
from app.store.redis import RedisStore
from tests.stores import running, server

SECRET = bytes(32)
QUOTAS = {
    "producer_ids_rate": {Entity.parse("user=*"): Quota("producer_ids_rate", 5, "producer_ids", "deny")}
}
ASK = Ask({}, (1, 2), "alice")
(APPLIED,) = applied_quotas(ASK, QUOTAS, MatchingRules())
KEY = bucket_key(APPLIED)


def renewal(resets: int, birth: bytes) -> Plan:
    """The plan of a renewal by a node that knows this newest reset and this birth of the store's state."""
    return renewal_plan(Renewal(KEY, APPLIED, "alice", resets, (1, 2), 0), birth, SECRET)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running("valkey") as url:
        yield url


@pytest.fixture
async def store(url: str) -> AsyncIterator[RedisStore]:
    store = RedisStore(url)
    await store.examine()
    yield store
    await store.close()


@pytest.fixture
async def raw(url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.from_url(url) as raw:
        await raw.flushall()
        yield raw


async def test_birth_stays_until_the_state_is_lost(store: RedisStore, raw: redis.asyncio.Redis):
    before = (await store.mark()).birth
    assert (await store.mark()).birth == before
    assert await raw.pttl(BIRTH_KEY) > 0
    await raw.flushall()
    assert (await store.mark()).birth not in {before, b""}


async def test_birth_is_unknown_in_a_store_that_takes_nothing(store: RedisStore, raw: redis.asyncio.Redis):
    await raw.config_set("maxmemory", 1)
    try:
        assert (await store.mark()).birth == b""
    finally:
        await raw.config_set("maxmemory", 0)


async def test_only_a_reset_of_what_nodes_know_is_numbered(store: RedisStore, raw: redis.asyncio.Redis):
    await store.forget([b"one", b"two"])
    assert (await store.mark()).resets == 0
    await store.forget([b"one", b"two"], {b"one": 5_000})
    first = (await store.mark()).resets
    assert int(await raw.get(reset_key(b"one")) or 0) == first > 0
    assert 0 < await raw.pttl(reset_key(b"one")) <= 5_000
    assert not await raw.exists(reset_key(b"two"))
    await store.forget([b"two"], {b"two": 5_000})
    assert (await store.mark()).resets > first
    assert await raw.pttl(RESETS_KEY) > 0


async def test_what_was_known_before_a_reset_is_not_written_again(
    store: RedisStore, raw: redis.asyncio.Redis
):
    mark = await store.mark()
    await store.forget([KEY], {KEY: 5_000})
    (refused,) = await store.decide([renewal(mark.resets, mark.birth)])
    assert (refused.results[0].outcome, await raw.exists(KEY)) == ("reject", 0)
    mark = await store.mark()
    (taken,) = await store.decide([renewal(mark.resets, mark.birth)])
    (result,) = taken.results
    assert isinstance(result, IdsResult)
    assert (result.outcome, result.remembered) == ("admit", 2)
    assert taken.results[0].observed == 0  # nothing is charged


async def test_what_was_known_before_a_loss_is_not_written_until_the_node_has_seen_the_loss(
    store: RedisStore, raw: redis.asyncio.Redis
):
    before = await store.mark()
    await raw.flushall()
    plan = renewal(0, before.birth)
    (refused,) = await store.decide([plan])  # the new state has no birth yet
    assert (refused.results[0].outcome, await raw.keys()) == ("throttle", [])
    after = await store.mark()
    (refused,) = await store.decide([plan])
    assert (refused.results[0].outcome, await raw.exists(KEY)) == ("throttle", 0)
    (taken,) = await store.decide([renewal(0, after.birth)])
    (result,) = taken.results
    assert isinstance(result, IdsResult)
    assert (result.outcome, result.remembered) == ("admit", 2)


async def test_state_of_a_server_that_started_again_is_another():
    """The birth is still there, but the newest reset may not be."""
    with server("valkey") as kept:
        store = RedisStore(kept.url)
        before = await store.mark()
        await store.close()
        with redis.Redis.from_url(kept.url) as raw:
            raw.save()
        kept.kill()
        kept.start()
        kept.until_it_answers()
        store = RedisStore(kept.url)
        await store.examine()
        (refused,) = await store.decide([renewal(0, before.birth)])
        after = await store.mark()
        (taken,) = await store.decide([renewal(0, after.birth)])
        assert (refused.results[0].outcome, taken.results[0].outcome) == ("throttle", "admit")
        await store.close()
