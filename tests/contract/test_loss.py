"""After the store has lost all its state, no node throttles an ask with an id that was admitted before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from random import Random

import pytest
import redis

from app.admission.admission import Admission
from app.admission.metrics.metrics import Metrics
from app.catalog.snapshot import Snapshot
from app.domain.ask import Ask
from app.domain.entity import Entity
from app.domain.ladder import MatchingRules
from app.domain.quota import Quota
from app.store.redis import RedisStore
from tests.charging import decisions_of
from tests.stores import Server, server

SECRET = bytes(32)
LIMIT, IDS, REQUESTS, NODES = 50, 500, 10_000, 3
"""Ten times as many ids are in use as a window admits, so ids that count as new would be throttled."""


class Deployment:
    """Nodes on one store, and the quota that all of them have."""

    def __init__(self, store: Server, nodes: int) -> None:
        self.store = store
        self.snapshot = Snapshot()
        self._stores: list[RedisStore] = []
        self.nodes = [self._node() for _ in range(nodes)]

    def _node(self) -> Admission:
        store = RedisStore(self.store.url, logged=True)
        self._stores.append(store)
        return Admission(
            store,
            lambda: self.snapshot,
            rules=MatchingRules(),
            secret=lambda: SECRET,
            sequential=False,
            budget_s=30.0,
            metrics=Metrics(),
            mark=store.mark,
        )

    def limit(self, limit: float) -> None:
        quota = Quota("producer_ids_rate", limit, "producer_ids", "deny", on_store_failure="throttle")
        self.snapshot = Snapshot.of({"producer_ids_rate": {Entity.parse("user=*"): quota}})

    async def open(self) -> None:
        """Open every node, which examines the store and reads its marks."""
        for node in self.nodes:
            await node.open()

    async def close(self) -> None:
        for node in self.nodes:
            await node.close()
        for store in self._stores:
            await store.close()

    async def join(self) -> Admission:
        """Add a node, which knows no ids."""
        node = self._node()
        await node.open()
        self.nodes.append(node)
        return node


def ask(each: int) -> Ask:
    return Ask({}, (each,), f"team-{each % 5}")


@pytest.fixture
async def deployment() -> AsyncIterator[Deployment]:
    with server("valkey") as store:
        deployment = Deployment(store, NODES)
        await deployment.open()
        deployment.limit(10 * IDS)
        for node in deployment.nodes:
            for first in range(0, IDS, 100):
                decisions = await decisions_of(node, [ask(each) for each in range(first, first + 100)])
                assert {decision.decision for decision in decisions} == {"admit"}
        deployment.limit(LIMIT)
        yield deployment
        await deployment.close()


async def test_no_admitted_id_is_throttled_after_the_loss_of_all_state(deployment: Deployment):
    chosen, refused, alone, new = Random(1), 0, 0, 0
    with redis.Redis.from_url(deployment.store.url) as raw:
        raw.flushall()
        for _ in range(REQUESTS):
            node = chosen.choice(deployment.nodes)
            (decision,) = await decisions_of(node, [ask(chosen.randrange(IDS))])
            refused += decision.decision != "admit"
            alone += decision.source == "local"
            if chosen.random() < 0.05:  # and new ids use up the quota
                new += 1
                await decisions_of(node, [ask(10**6 + new)])
        assert (refused, alone) == (0, REQUESTS)
        for node in deployment.nodes:
            await node.local._poll()  # a node renews nothing before it has noticed the loss
        while any(node.local.waits for node in deployment.nodes):  # noqa: ASYNC110  it is in three objects
            await asyncio.sleep(0.01)  # until the nodes have renewed their known ids
    stranger = await deployment.join()
    decisions = await decisions_of(stranger, [ask(each) for each in range(IDS)])
    assert {(decision.decision, decision.source) for decision in decisions} == {("admit", "store")}


async def test_known_ids_pass_while_the_store_is_away(deployment: Deployment):
    deployment.store.kill()
    for node in deployment.nodes:
        known, unknown, detailed = await decisions_of(
            node, [ask(1), ask(10**6), replace(ask(1), detail=True)]
        )
        assert (known.decision, known.source) == ("admit", "local")
        assert (unknown.decision, unknown.source) == ("throttle", "fallback")
        assert (detailed.decision, detailed.source) == ("admit", "fallback")


async def test_known_ids_pass_beside_quotas_that_the_missing_store_would_count(deployment: Deployment):
    quotas = dict(deployment.snapshot.quotas)
    for policy in ("admit", "throttle"):
        rate = Quota("request_rate", 5, "sampled_rate", "delay", on_store_failure=policy)
        deployment.snapshot = Snapshot.of({**quotas, "request_rate": {Entity.parse("user=*"): rate}})
        deployment.store.kill()
        for node in deployment.nodes:
            (decision,) = await decisions_of(node, [replace(ask(1), usage={"requests": 1})])
            assert (decision.decision, decision.source, decision.applied) == (policy, "fallback", 2)
