"""A bucket is shown as a peek reports it, showing it writes nothing, and a reset leaves nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from app.admission import buckets as buckets_module
from app.admission.buckets import Buckets, BucketStatus
from app.catalog.snapshot import Snapshot
from app.domain.ask import Ask
from app.domain.bucket import NOTHING
from app.domain.entity import Entity
from app.domain.ladder import AppliedQuota, MatchingRules, Quotas, applied_quotas
from app.domain.oracle import IdsBucket, Oracle
from app.domain.quota import KEYS, Quota
from app.store.port import LiveLayer
from app.store.redis import RedisStore
from tests.charging import decision_on, plan_for
from tests.contract.conftest import PATIENCE_S
from tests.contract.histories import asks, entities_of, layers, quotas
from tests.stores import KINDS, running

SECRET = b"0123456789abcdef0123456789abcdef"
RULES = MatchingRules(inter_broker_listener="REPLICATION")
MAX_IDS = 160
PAUSES_MS = (0, 0, 1, 99, 200, 334, 500, 1_001, 1_334, 6_001)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch, patient_connections: None) -> None:
    """Wait long for a status too: it is the same on a busy machine."""
    monkeypatch.setattr(buckets_module, "WITHIN_S", PATIENCE_S)


class Both:
    """A store and the oracle, which get the same asks, and the store's buckets."""

    def __init__(self, store: RedisStore, all_quotas: Quotas, *, timed: bool) -> None:
        self.store, self.quotas, self.timed = store, all_quotas, timed
        self.oracle = Oracle(SECRET, max_ids=MAX_IDS)
        self.buckets = Buckets(store, lambda: Snapshot.of(all_quotas), RULES)
        self.now = 1_000_000
        self.layers_with_ids = 0
        """How many live layers of the bucket that was looked at hold ids."""
        self.segments = 0
        """How many segments hold ids of one of these layers, the one with the most."""

    async def ask(self, ask: Ask) -> None:
        """Have both decide, and compare their answers."""
        ask = replace(ask, at_ms=None if self.timed else self.now)
        plan = plan_for(ask, self.quotas, RULES, SECRET)
        if plan is None:
            return
        (answer,) = await self.store.decide([plan])
        got = decision_on(ask, plan, answer)
        assert got == self.oracle.decide(ask, self.quotas, RULES, self._time())

    async def look(self, found: AppliedQuota, ask: Ask) -> None:
        """Compare a bucket in the store, found by its name in a decision, with the oracle."""
        name = self.buckets.parse(found.bucket)
        (shown,) = await self.buckets.status(name, found.quota.key, None if self.timed else self.now)
        assert shown == self._expected(found, ask)

    async def reset(self, found: AppliedQuota) -> None:
        """Reset the bucket of one quota, in the oracle too."""
        emptied, _ = await self.buckets.reset(self.buckets.parse(found.bucket), found.quota.key)
        assert emptied == [found.quota.key]
        quota = found.quota
        self.oracle.buckets.pop((quota.key, found.bucket, quota.identity, quota.epoch), None)

    def _expected(self, found: AppliedQuota, ask: Ask) -> BucketStatus:
        """The expected bucket, from a peek of the oracle and the ids it remembers."""
        quota, now = found.quota, self._time()
        verdicts = self.oracle.decide(ask, self.quotas, RULES, now).quotas or ()
        (verdict,) = [v for v in verdicts if (v.quota, v.bucket) == (quota.key, found.bucket)]
        assert verdict.observed is not None
        assert verdict.remaining is not None
        shown = (found.bucket, quota.key, verdict.observed, verdict.remaining)
        if quota.algorithm != "producer_ids":
            tokens = verdict.remaining if quota.algorithm == "token_bucket" else None
            return BucketStatus(*shown, tokens, None, None, None, None, None)
        bucket = self.oracle.buckets[quota.key, found.bucket, quota.identity, quota.epoch]
        assert isinstance(bucket, IdsBucket)
        now = max(now, bucket.newest_ms or 0)  # with a clock behind, a bucket is shown as of its newest time
        ids = bucket.state
        live = [
            LiveLayer(number, ids.layers[number], sum(each.counts.get(number, 0) for each in ids.segments))
            for number in ids.live_layers(now, quota.layers)
        ]
        fill = ids.fill() if live else 0
        self.layers_with_ids = sum(layer.ids > 0 for layer in live)
        self.segments = max(
            (sum(each.counts.get(layer.number, 0) > 0 for each in ids.segments) for layer in live), default=0
        )
        return BucketStatus(
            *shown,
            None,
            len(live),
            live,
            fill,
            ids.remembered(now, quota.layers),
            ids.charged(now, quota.window_ms),
        )

    def _time(self) -> int:
        return self.store.now_ms if self.timed else self.now


@pytest.mark.parametrize("timed", [False, True], ids=["by the caller's clock", "by the store's clock"])
@pytest.mark.parametrize("kind", KINDS)
def test_shown_bucket_equals_a_peek(kind: str, timed: bool):
    looked: Counter[str] = Counter()

    async def history(data: st.DataObject, url: str, server: redis.Redis) -> None:
        all_quotas: Any = {}
        for key in KEYS:
            chosen = data.draw(
                st.lists(st.sampled_from(entities_of(key)), min_size=1, max_size=2, unique=True)
            )
            all_quotas[key] = {entity: data.draw(quotas(key, MAX_IDS)) for entity in chosen}
        store = RedisStore(url, caller_clock=not timed, max_ids=MAX_IDS)
        await store.connect()
        both = Both(store, all_quotas, timed=timed)
        try:
            for ask in data.draw(st.lists(asks(), min_size=5, max_size=15)):
                both.now += data.draw(st.sampled_from(PAUSES_MS))
                await both.ask(ask)
                peek = replace(
                    ask, usage=NOTHING, producer_ids=(), mode="peek", deny=False, cluster_action=False
                )
                found = applied_quotas(peek, all_quotas, RULES)
                before = stored(server)
                for one, behind_ms in product(found, (0,) if timed else (0, 300, 90_000)):
                    both.now -= behind_ms
                    await both.look(one, peek)
                    both.now += behind_ms
                    looked[one.quota.key] += 1
                assert stored(server) == before
                if found and data.draw(st.integers(0, 3)) == 0:
                    await both.reset(data.draw(st.sampled_from(found)))
        finally:
            await store.close()

    try_histories(kind, history)
    assert all(looked[key] > 30 for key in KEYS), looked


def try_histories(
    kind: str, history: Callable[[st.DataObject, str, redis.Redis], Coroutine[Any, Any, None]]
) -> None:
    """Run random histories, each on an empty store of a kind: its address and a client are given."""
    with running(kind) as url, redis.Redis.from_url(url) as server, asyncio.Runner() as runner:

        @settings(
            max_examples=25,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(st.data())
        def histories(data: st.DataObject) -> None:
            server.flushall()
            runner.run(history(data, url, server))

        histories()


def stored(server: Any) -> dict[Any, Any]:
    """The content and the expiry time of each key."""
    return {key: (server.dump(key), server.pexpiretime(key)) for key in server.keys("*")}


@pytest.mark.parametrize("kind", KINDS)
def test_live_layers_equal_those_of_the_oracle(kind: str):
    """Histories of one principal, whose ids are spread over several layers and segments."""
    met: Counter[str] = Counter()
    entity = Entity.of(user="a")
    few_or_many = st.sampled_from((0, 1, 5, 30))
    steps = st.tuples(st.sampled_from((0, 50, 150, 334, 500)), st.integers(1, MAX_IDS), few_or_many)

    async def history(data: st.DataObject, url: str, _server: redis.Redis) -> None:
        quota = Quota("producer_ids_rate", 90, "producer_ids", "deny", window_ms=1_000)
        quota = replace(quota, layers=data.draw(layers(quota.window_ms)))
        store = RedisStore(url, caller_clock=True, max_ids=MAX_IDS)
        await store.connect()
        both = Both(store, {quota.key: {entity: quota}}, timed=False)
        try:
            for pause_ms, first, ids in data.draw(st.lists(steps, min_size=10, max_size=20)):
                both.now += pause_ms
                ask = Ask(
                    usage=NOTHING, producer_ids=tuple(range(first, first + ids)), principal="a", detail=True
                )
                await both.ask(ask)
                peek = replace(ask, producer_ids=(), mode="peek")
                (found,) = applied_quotas(peek, both.quotas, RULES)
                for behind_ms in (300, 90_000, 0):
                    both.now -= behind_ms
                    await both.look(found, peek)
                    both.now += behind_ms
                met[f"{both.layers_with_ids} layers"] += 1
                met["several segments in a layer"] += both.segments > 1
        finally:
            await store.close()

    try_histories(kind, history)
    assert all(met[each] > 3 for each in ("1 layers", "2 layers", "several segments in a layer")), met


@pytest.mark.parametrize("kind", KINDS)
async def test_bucket_that_was_never_charged_is_shown_in_its_initial_state(kind: str):
    with running(kind) as url:
        store = RedisStore(url, caller_clock=True)
        await store.connect()
        both = Both(store, {key: {} for key in KEYS}, timed=False)
        assert await both.buckets.status(both.buckets.parse("user=a"), None, 0) == []
        assert await both.buckets.reset(both.buckets.parse("user=a"), None) == ([], None)
        await store.close()
