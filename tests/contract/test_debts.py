"""The key of a token bucket expires when the bucket is full again, also after a debt or a refund."""

from __future__ import annotations

import struct
import time

import pytest
from redis.asyncio import Redis

from app.domain.ask import Ask
from app.domain.entity import Entity
from app.domain.ladder import MatchingRules
from app.domain.quota import MAX_EXACT, Quota
from app.store.port import UnitsResult
from app.store.redis import RedisStore
from tests.charging import plan_for
from tests.stores import KINDS, running

LIMIT, BURST, DEBT_S = 10.0, 50.0, 3_600
SLACK_MS = 60_000
QUOTA = Quota(
    "controller_mutation_rate", LIMIT, "token_bucket", "delay", burst=BURST, max_debt=LIMIT * DEBT_S
)


@pytest.mark.parametrize("kind", KINDS)
async def test_key_of_a_bucket_in_debt_lasts_until_it_is_full_again(kind: str):
    quotas = {"controller_mutation_rate": {Entity.of(user="alice"): QUOTA}}
    ask = Ask({"mutations": MAX_EXACT}, principal="alice", mode="record")
    plan = plan_for(ask, quotas, MatchingRules(), b"")
    assert plan is not None
    with running(kind) as url:
        store, client = RedisStore(url), Redis.from_url(url)
        await store.connect()
        (answer,) = await store.decide([plan])
        (left_ms,) = [await client.pttl(charge.key) for charge in plan.charges]
        await client.aclose()
        await store.close()
    assert (answer.results[0].throttle_ms, answer.results[0].remaining) == (DEBT_S * 1000, -LIMIT * DEBT_S)
    (result,) = answer.results
    assert isinstance(result, UnitsResult)
    assert result.forgiven == MAX_EXACT - BURST - LIMIT * DEBT_S
    full_ms = (DEBT_S + BURST / LIMIT) * 1000 + SLACK_MS
    assert full_ms - 1_000 < left_ms <= full_ms


@pytest.mark.parametrize("kind", KINDS)
async def test_refund_that_fills_an_old_bucket_lets_it_expire(kind: str):
    """With the refund the bucket has been full for longer than the slack; without, that takes an hour."""
    quotas = {"controller_mutation_rate": {Entity.of(user="alice"): QUOTA}}
    ask = Ask({"mutations": MAX_EXACT}, principal="alice", mode="refund")
    plan = plan_for(ask, quotas, MatchingRules(), b"")
    assert plan is not None
    (charge,) = plan.charges
    with running(kind) as url:
        store, client = RedisStore(url), Redis.from_url(url)
        await store.connect()
        old_ms = time.time() * 1000 - 2 * SLACK_MS
        await client.set(charge.key, struct.pack("<dd", -LIMIT * DEBT_S, old_ms), px=DEBT_S * 1000)
        (answer,) = await store.decide([plan])
        left_ms = await client.pttl(charge.key)
        await client.aclose()
        await store.close()
    assert answer.results[0].remaining == BURST
    assert 0 < left_ms <= SLACK_MS
