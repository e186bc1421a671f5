"""A store that charges after the budget: the ask was answered without it, but the charge is logged."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis.asyncio

from app.admission.admission import Admission
from app.admission.gathering.gatherer import Gatherer
from app.admission.log.decision_log import DecisionLog, Which
from app.admission.metrics.metrics import Metrics
from app.catalog.snapshot import Snapshot
from app.decision_log.batch import CHARGED, NODES, STREAM, Row
from app.decision_log.status import ALIVE_MS
from app.decision_log.stream import LogStream
from app.domain.ask import Ask
from app.domain.digest import digest
from app.domain.entity import ANY, Entity
from app.domain.ladder import MatchingRules
from app.domain.quota import Quota
from app.store.redis import RedisStore
from tests import stores
from tests.charging import decisions_of
from tests.waiting import until
from workers.decision_log.rows import decode

SECRET = b"s" * 32
BUDGET_S, AMPLE_S = 0.05, 30.0
EVERYONE = Entity.of(user=ANY)
QUOTAS = Snapshot().apply(
    1,
    [
        ("producer_ids_rate", EVERYONE, Quota("producer_ids_rate", 5, "producer_ids", "deny")),
        ("request_rate", EVERYONE, Quota("request_rate", 1e9, "sampled_rate", "delay")),
    ],
)
ASK = Ask({"requests": 3}, (1, 2), principal="alice")


@asynccontextmanager
async def logged(url: str, which: Which) -> AsyncIterator[tuple[Admission, DecisionLog]]:
    store = RedisStore(url, logged=True, timeout_s=AMPLE_S)
    stream = LogStream.at(url)
    log = DecisionLog(stream, which=which, node="n", secret=lambda: SECRET, now_ms=lambda: 1)
    admission = Admission(
        store,
        lambda: QUOTAS,
        rules=MatchingRules(),
        secret=lambda: SECRET,
        sequential=False,
        budget_s=BUDGET_S,
        metrics=Metrics(),
        recorder=log,
    )
    await admission.open()
    try:
        yield admission, log
    finally:
        await admission.close()
        await store.close()
        await stream.close()


async def rows(url: str, log: DecisionLog) -> list[Row]:
    await log._send()
    async with redis.asyncio.from_url(url) as raw:
        entries: list[Any] = await raw.xrange(STREAM) or []
    return [row for _, entry in entries for row in decode(entry[b"batch"]).rows]


@pytest.mark.parametrize("kind", stores.KINDS)
@pytest.mark.parametrize("which", ["all", "denied"])
async def test_late_charge_of_a_hung_store_is_logged(kind: str, which: Which):
    with stores.server(kind) as server:
        async with logged(server.url, which) as (admission, log):
            gatherer = admission._gatherer
            assert isinstance(gatherer, Gatherer)
            server.hold()
            (first,) = await decisions_of(admission, [ASK])
            server.go_on()
            await until(lambda: not (gatherer.is_late or admission.circuit.error), every_s=0)
            gatherer._patience.budget_s = AMPLE_S
            (again,) = await decisions_of(admission, [ASK])
            found = await rows(server.url, log)
    assert (first.source, again.source, again.decision) == ("fallback", "store", "admit")
    ids = digest(SECRET, "alice", 1) + digest(SECRET, "alice", 2)
    if which == "denied":
        by_policy, late = found
        assert (by_policy.kind, by_policy.source, by_policy.failure) == ("decision", "fallback", "budget")
        assert (late.kind, late.ids, late.verdicts[0].ids) == ("ids", ids, bytes([CHARGED] * 2))
        return
    fallback, late, seen = found
    assert (fallback.kind, fallback.order, fallback.failure) == ("decision", None, "budget")
    assert (late.kind, late.source, late.decision, late.ids) == ("late", "store", "admit", ids)
    assert [verdict.ids for verdict in late.verdicts] == [bytes([CHARGED] * 2), b""]
    assert late.verdicts[1].usage == 3
    assert (seen.kind, seen.verdicts[0].ids) == ("decision", bytes(2))
    assert (late.order or 0) < (seen.order or 0)


@pytest.mark.parametrize("kind", stores.KINDS)
async def test_heartbeat_counts_the_batches_in_the_stream(kind: str):
    with stores.running(kind) as url:
        stream = LogStream.at(url)
        try:
            assert (await stream.status()).nodes == ()
            for node, number in (("a", 1), ("b", 1), ("a", 2)):
                assert await stream.append(b"", 0, node, number)
            status = await stream.status()
            assert sorted(each[:2] for each in status.nodes) == [("a", 2), ("b", 1)]
            assert all(0 <= status.now_ms - at_ms < 60_000 for _, _, at_ms in status.nodes)
            async with redis.asyncio.from_url(url) as raw:
                await raw.hset(NODES, "b", f"1:{status.now_ms - ALIVE_MS - 1}")
                assert [each[0] for each in (await stream.status()).nodes] == ["a"]
                assert await raw.hkeys(NODES) == [b"a"], "a node that stopped long ago is removed"
        finally:
            await stream.close()
