"""Leases of the script keep the bounds that quotas state, under the same adversaries as the oracle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
import redis

from app.admission.plan import granted_by, hold_plan, settle_plan
from app.domain.quota import KEYS, Algorithm, Quota
from app.store.port import Answer, Plan
from app.store.redis import RedisStore
from tests.bounds.leases import RULES, asking, of_alice, worst
from tests.charging import charges_of, decision_on, plan_for
from tests.report import say
from tests.stores import running

FEW, MANY = 60, 500
QUOTAS: dict[str, tuple[Algorithm, int]] = {
    "sampled rate": ("sampled_rate", 3),
    "token bucket": ("token_bucket", 11),
}


class StoreLessor:
    """The script as the target; each target begins with an empty store."""

    def __init__(self, store: RedisStore, server: redis.Redis, loop: asyncio.AbstractEventLoop) -> None:
        server.flushdb()
        self._store = store
        self._loop = loop

    def admits(self, quota: Quota, amount: int, now_ms: int) -> bool:
        ask = replace(asking(quota, amount), at_ms=now_ms)
        plan = plan_for(ask, of_alice(quota), RULES, b"")
        assert plan is not None
        return all(result.outcome == "admit" for result in self._answer(plan).results)

    def lease(self, quota: Quota, wish: int, now_ms: int, name: bytes, lease_ms: int) -> float:
        ask = replace(asking(quota, wish), deny=True, at_ms=now_ms)
        plan = hold_plan(ask, charges_of(ask, of_alice(quota), RULES, b""), name, lease_ms)
        answer = self._answer(plan)
        decision = decision_on(ask, plan, answer)
        return granted_by(ask, plan, answer)[KEYS[quota.key].usage] if decision.decision == "admit" else 0.0

    def settle(self, quota: Quota, spent: float, now_ms: int, name: bytes) -> bool:
        ask = replace(asking(quota, spent), mode="record", at_ms=now_ms)
        answer = self._answer(settle_plan(ask, charges_of(ask, of_alice(quota), RULES, b""), name))
        return any(result.outcome == "admit" for result in answer.results)

    def _answer(self, plan: Plan) -> Answer:
        (answer,) = self._loop.run_until_complete(self._store.decide([plan]))
        assert answer.error is None
        return answer


@pytest.fixture
def store() -> Iterator[tuple[RedisStore, redis.Redis, asyncio.AbstractEventLoop]]:
    loop = asyncio.new_event_loop()
    with running("valkey") as url, redis.Redis.from_url(url) as server:
        store = RedisStore(url, caller_clock=True)
        loop.run_until_complete(store.connect())
        yield store, server, loop
        loop.run_until_complete(store.close())
    loop.close()


@pytest.mark.timeout(3600)  # a minute on an idle machine
@pytest.mark.parametrize("plans", [FEW, pytest.param(MANY, marks=pytest.mark.prove, id="long")])
@pytest.mark.parametrize("name", QUOTAS)
def test_leases_of_the_script_keep_the_bound(
    name: str, plans: int, store: tuple[RedisStore, redis.Redis, asyncio.AbstractEventLoop]
):
    """The long test tries 1,000 plans over the two algorithms."""
    algorithm, samples = QUOTAS[name]
    quota = Quota(
        "consumer_byte_rate",
        1_000,
        algorithm,
        "deny",
        samples=samples,
        sample_ms=100,
        burst=1_100.0,
        max_debt=2_000.0,
    )
    stated, _ = quota.bound
    ratio = worst(lambda: StoreLessor(*store), quota, plans)
    say(f"leases of a {name} in the store: {ratio:.4f} of at most {stated} in {plans:,} plans")
    assert stated is not None
    assert 1.0 < ratio <= stated
