"""The script's reports to the decision log, in real stores: the order of calls, and id outcomes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from app.decision_log.batch import CHARGED, REFRESHED, SEEN
from app.domain.ask import Ask
from app.domain.entity import ANY, Entity
from app.domain.ladder import MatchingRules, Quotas
from app.domain.quota import PRODUCER_IDS_RATE, REQUEST_RATE, Layers, Quota
from app.store.encoding import ORDER_STEP
from app.store.keys import ORDER_KEY
from app.store.port import Answer, Plan
from app.store.redis import RedisStore
from tests.charging import plan_for
from tests.stores import KINDS, running

SECRET = b"s" * 32
HOUR = 3_600_000
IDS = Quota(
    PRODUCER_IDS_RATE, 5, "producer_ids", "deny", window_ms=HOUR, layers=Layers.named("layered", HOUR)
)
EVERYONE = Entity.of(user=ANY)
QUOTAS: Quotas = {
    PRODUCER_IDS_RATE: {EVERYONE: IDS},
    REQUEST_RATE: {EVERYONE: Quota(REQUEST_RATE, 1000, "sampled_rate", "deny")},
}


def plan(ask: Ask) -> Plan:
    found = plan_for(ask, QUOTAS, MatchingRules(), SECRET)
    assert found is not None
    return found


def asks(*ids: int, at_ms: int, mode: str = "admit", user: str = "alice") -> Plan:
    return plan(Ask({"requests": 1}, ids, principal=user, mode=mode, at_ms=at_ms))  # type: ignore[arg-type]


@pytest.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest) -> AsyncIterator[RedisStore]:
    with running(request.param) as url:
        found = RedisStore(url, caller_clock=True, logged=True)
        await found.connect()
        yield found
        await found.close()


async def id_outcomes(store: RedisStore, *plans: Plan) -> list[bytes]:
    return [answer.id_outcomes for answer in await store.decide(plans)]


async def test_ids_are_charged_once_and_refreshed_once_per_layer(store: RedisStore):
    first, again = await id_outcomes(store, asks(1, 2, at_ms=0), asks(2, 3, at_ms=1))
    assert first == bytes([CHARGED, CHARGED])
    assert again == bytes([SEEN, CHARGED])
    later = IDS.layers.interval_ms
    moved, stays = await id_outcomes(store, asks(1, 4, at_ms=later), asks(1, at_ms=later + 1))
    assert moved == bytes([REFRESHED, CHARGED])
    assert stays == bytes([SEEN])


async def test_refusal_refreshes_but_does_not_charge_and_peek_does_neither(store: RedisStore):
    await id_outcomes(store, asks(1, 2, 3, at_ms=0))
    later = IDS.layers.interval_ms
    peeked, refused, again = await id_outcomes(
        store,
        asks(1, 4, at_ms=later, mode="peek"),
        asks(1, 4, 5, 6, at_ms=later),
        asks(1, 2, at_ms=later),
    )
    assert peeked == bytes(2)
    assert refused == bytes([REFRESHED, SEEN, SEEN, SEEN])
    assert again == bytes([SEEN, REFRESHED])


async def test_ask_that_only_refreshes_has_the_effect_of_a_refusal(store: RedisStore):
    await id_outcomes(store, asks(1, at_ms=0))
    later = IDS.layers.interval_ms
    found = asks(1, 9, at_ms=later)
    refresh = Plan("refresh", found.charges[:1], at_ms=later)
    assert await id_outcomes(store, refresh, found) == [bytes([REFRESHED, SEEN]), bytes([SEEN, CHARGED])]


async def test_each_ask_has_its_place_in_the_order_and_calls_follow_each_other(store: RedisStore):
    one = await store.decide([asks(1, at_ms=0), asks(2, at_ms=0, user="bob")])
    two = await store.decide([asks(3, at_ms=0)])
    places = [answer.order for answer in (*one, *two)]
    assert None not in places
    first, second, third = (place or 0 for place in places)
    reset = await store.forget([asks(1, at_ms=0).charges[0].key]) or 0
    assert (second - first, first % ORDER_STEP) == (1, 0)
    assert reset >= third + ORDER_STEP >= first + 2 * ORDER_STEP


async def test_read_only_call_takes_no_number_and_writes_nothing(store: RedisStore):
    (peeked,) = await store.decide([asks(1, at_ms=0, mode="peek")])
    await store.examine()
    assert peeked.order is None
    async with redis.asyncio.from_url(store_url(store)) as raw:
        assert await raw.dbsize() == 0


async def test_order_keeps_growing_after_the_store_lost_it(store: RedisStore):
    def place(answers: list[Answer]) -> int:
        return answers[0].order or 0

    before = place(await store.decide([asks(1, at_ms=0)]))
    async with redis.asyncio.from_url(store_url(store)) as raw:
        await raw.flushall()
        after = place(await store.decide([asks(1, at_ms=0)]))
        assert after > before
        assert await raw.pttl(ORDER_KEY) > 0
        await raw.flushall()
    assert (await store.forget([b"none"]) or 0) > after


@pytest.mark.parametrize("shift_s", [-3600, 3600])
async def test_no_number_repeats_after_the_store_lost_the_last_ones_or_its_clock_went_back(
    store: RedisStore, shift_s: int
):
    (answer,) = await store.decide([asks(1, at_ms=0)])
    async with redis.asyncio.from_url(store_url(store)) as raw:
        moved = int(await raw.get(ORDER_KEY) or 0) + shift_s * 1_000_000
        await raw.set(ORDER_KEY, moved)
        calls = [await store.decide([asks(1, at_ms=0)]) for _ in range(3)]
        places = [found.order or 0 for (found,) in calls]
        assert await raw.pttl(ORDER_KEY) > 0
    assert places == sorted(set(places))
    assert places[0] > max(answer.order or 0, moved * ORDER_STEP)
    if shift_s > 0:
        assert places == [(moved + n) * ORDER_STEP for n in (1, 2, 3)]


async def test_store_without_a_log_reports_and_writes_no_order():
    with running("valkey") as url:
        plain = RedisStore(url, caller_clock=True)
        await plain.connect()
        (answer,) = await plain.decide([asks(1, at_ms=0)])
        assert (answer.order, answer.id_outcomes) == (None, b"")
        async with redis.asyncio.from_url(url) as raw:
            assert not await raw.exists(ORDER_KEY)
        await plain.close()


async def test_unreadable_bucket_has_no_id_outcomes_and_affects_no_other_ask(store: RedisStore):
    broken = asks(1, at_ms=0)
    async with redis.asyncio.from_url(store_url(store)) as raw:
        await raw.lpush(broken.charges[0].key, "x")
    one, two = await store.decide([broken, asks(2, at_ms=0, user="bob")])
    assert one.error is not None
    assert (two.id_outcomes, one.order) == (bytes([CHARGED]), None)


def store_url(store: RedisStore) -> str:
    return f"unix://{store._client.connection_pool.connection_kwargs['path']}"
