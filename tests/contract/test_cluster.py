"""Decisions over a cluster of three primaries: all or nothing over several slots, whatever happens."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from app.admission.admission import Admission
from app.admission.buckets import Buckets
from app.admission.metrics import Metrics
from app.catalog.snapshot import Snapshot
from app.decision_log.stream import LogStream, StreamReader
from app.domain.ask import Ask
from app.domain.bucket import BucketName
from app.domain.entity import ANY, Entity
from app.domain.ladder import MatchingRules, applied_quotas
from app.domain.quota import Quota
from app.domain.slots import slot_of, slot_of_tag
from app.domain.token_bucket import Tokens
from app.domain.volumes import Drill
from app.store import cluster as cluster_module
from app.store import redis as redis_module
from app.store.client import client_of
from app.store.cluster import ClusterStore, PrimaryStore
from app.store.lease import Lease
from app.store.loading import Load, Loader
from app.store.volumes import VolumeRecord
from tests import clusters
from tests.clusters import Cluster
from tests.report import say

RULES = MatchingRules()
SECRET = bytes(range(32))
USER_LIMIT, IP_LIMIT, IDS_LIMIT = 40, 120, 30
CALLERS, ASKS = 50, 2_000
WITHOUT_REFILL = 1e-9

EACH_USER = Quota("request_rate", WITHOUT_REFILL, "token_bucket", "deny", burst=USER_LIMIT)
EACH_IP = Quota("connection_creation_rate", WITHOUT_REFILL, "token_bucket", "deny", burst=IP_LIMIT)
EACH_IDS = Quota("producer_ids_rate", IDS_LIMIT, "producer_ids", "deny")
QUOTAS: dict[str, dict[Entity, Quota]] = {
    "request_rate": {Entity.of(user=ANY): EACH_USER},
    "connection_creation_rate": {Entity.of(ip=ANY): EACH_IP},
    "producer_ids_rate": {Entity.of(user=ANY): EACH_IDS},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with clusters.running(replicas=False) as running:
        yield running


@pytest.fixture(autouse=True)
def one_slot_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of a script is looked at: its keys are in one slot."""
    command = PrimaryStore.command
    run_script = redis_module.run_script

    def scanned(self: PrimaryStore, plans: Any, slot: int) -> Any:
        sent = command(self, plans, slot)
        assert {slot_of(key) for key in sent[3 : 3 + int(sent[2])]} == {slot}, sent
        return sent

    async def scanned_script(client: Any, script: str, keys: Sequence[Any], *arguments: Any) -> Any:
        named = [key if isinstance(key, bytes) else key.encode() for key in keys]
        assert len({slot_of(key) for key in named}) == 1, keys
        return await run_script(client, script, keys, *arguments)

    monkeypatch.setattr(cluster_module.PrimaryStore, "command", scanned)
    for module in (
        redis_module,
        __import__("app.store.volumes", fromlist=["_"]),
        __import__("app.store.lease", fromlist=["_"]),
    ):
        monkeypatch.setattr(module, "run_script", scanned_script)


@asynccontextmanager
async def nodes(
    cluster: Cluster, count: int = 1, quotas: Any = None, **more: Any
) -> AsyncIterator[list[Admission]]:
    """Nodes that share the cluster."""
    snapshot = Snapshot(1, QUOTAS if quotas is None else quotas)
    async with AsyncExitStack() as stack:
        opened = []
        for _ in range(count):
            store = ClusterStore(cluster.url, logged=True)
            admission = Admission(
                store,
                lambda: snapshot,
                rules=RULES,
                secret=lambda: SECRET,
                sequential=False,
                **{"budget_s": 10.0, "metrics": Metrics(), **more},
            )
            await admission.open()
            stack.push_async_callback(admission.close)
            opened.append(admission)
        yield opened


names = itertools.count()


def fresh(prefix: str) -> str:
    """A name that no other test uses."""
    return f"{prefix}{next(names)}"


def address() -> str:
    number = next(names)
    return f"10.{number // 65536 % 256}.{number // 256 % 256}.{number % 256}"


def ask_of(user: str | None, ip: str | None, **more: Any) -> Ask:
    usage = {"requests": 1, "connections": 1}
    return Ask(**{"usage": usage, "principal": user, "ip": ip, **more})


async def status(admission: Admission, bucket: str, quota: str) -> Any:
    buckets = Buckets(admission.circuit, lambda: Snapshot(1, QUOTAS), RULES)
    (found,) = await buckets.status(BucketName.parse(bucket, RULES), quota, None)
    return found


async def spent(admission: Admission, bucket: str, quota: str) -> int:
    return round((await status(admission, bucket, quota)).observed)


async def test_ask_of_two_slots_is_charged_in_both(cluster: Cluster) -> None:
    user, ip = fresh("u"), address()
    async with nodes(cluster) as (node,):
        assert node.circuit.error is None
        (decision,) = await node.decide([ask_of(user, ip, detail=True)])
        assert (decision.decision, decision.source, decision.charged) == ("admit", "store", True)
        assert [round(each.observed or 0) for each in decision.quotas or ()] == [1, 1]
        assert await spent(node, f"user={user}", "request_rate") == 1
        assert await spent(node, f"ip={ip}", "connection_creation_rate") == 1


async def test_refused_ask_charges_nothing_anywhere(cluster: Cluster) -> None:
    ip = address()
    async with nodes(cluster) as (node,):
        users = [fresh("u") for _ in range(IP_LIMIT // USER_LIMIT + 1)]
        for user in users:
            decisions = await asyncio.gather(*(node.decide([ask_of(user, ip)]) for _ in range(USER_LIMIT)))
        assert {each.decision for (each,) in decisions} == {"throttle"}
        assert await spent(node, f"user={users[-1]}", "request_rate") == 0
        assert await spent(node, f"ip={ip}", "connection_creation_rate") == IP_LIMIT


async def test_nothing_is_admitted_beyond_a_limit_and_buckets_equal_the_admissions(cluster: Cluster) -> None:
    """Two nodes, 50 callers, over users, addresses and ids."""
    users, ips = [fresh("u") for _ in range(12)], [address() for _ in range(5)]
    admitted: Counter[str] = Counter()
    fallbacks = 0
    async with nodes(cluster, 2) as both:
        work = iter(range(ASKS))

        async def call(number: int) -> None:
            nonlocal fallbacks
            chance = random.Random(number)
            for _ in work:
                user, ip = chance.choice(users), chance.choice(ips)
                ids = (chance.randrange(60),) if chance.random() < 0.3 else None
                (decision,) = await chance.choice(both).decide([ask_of(user, ip, producer_ids=ids)])
                fallbacks += decision.source != "store"
                if decision.decision == "admit":
                    admitted[f"user={user}"] += 1
                    admitted[f"ip={ip}"] += 1

        await asyncio.gather(*map(call, range(CALLERS)))
        assert fallbacks == 0
        for user in users:
            used = await spent(both[0], f"user={user}", "request_rate")
            assert used == admitted[f"user={user}"] <= USER_LIMIT
            ids = await status(both[0], f"user={user}", "producer_ids_rate")
            assert ids.charged_ids <= IDS_LIMIT
        for ip in ips:
            assert await spent(both[0], f"ip={ip}", "connection_creation_rate") == admitted[f"ip={ip}"]
            assert admitted[f"ip={ip}"] <= IP_LIMIT
        total = sum(admitted[f"user={user}"] for user in users)
        assert total == min(len(users) * USER_LIMIT, len(ips) * IP_LIMIT), "nobody was refused needlessly"
    say(f"{ASKS:,} asks of several slots, {CALLERS} callers, 2 nodes: {total} admitted, none beyond a limit")


async def test_flood_at_a_full_address_costs_a_user_nothing(cluster: Cluster) -> None:
    user, full, free = fresh("u"), address(), address()
    async with nodes(cluster, 2) as both:
        for _ in range(IP_LIMIT // USER_LIMIT):
            other = fresh("u")
            await asyncio.gather(*(both[0].decide([ask_of(other, full)]) for _ in range(USER_LIMIT)))
        flood = [node.decide([ask_of(user, full)]) for _ in range(200) for node in both]
        good = [both[n % 2].decide([ask_of(user, free)]) for n in range(USER_LIMIT)]
        answers = await asyncio.gather(*itertools.chain(flood, good))
        assert {each.decision for (each,) in answers[: len(flood)]} == {"throttle"}
        assert {each.decision for (each,) in answers[len(flood) :]} == {"admit"}


async def test_twins_on_two_nodes_are_charged_once(cluster: Cluster) -> None:
    async with nodes(cluster, 2) as both:
        for mode in ("admit", "record"):
            user, ip = fresh("u"), address()
            for number in range(10):
                ask = ask_of(user, ip, id=f"{mode}-{number}", detail=True, mode=mode)
                answers = await asyncio.gather(*(node.decide([ask]) for node in both * 2))
                assert len({str(each) for each in answers}) == 1, "every twin gets the same answer"
            assert await spent(both[0], f"user={user}", "request_rate") == 10
            assert await spent(both[0], f"ip={ip}", "connection_creation_rate") == 10


async def test_kept_answer_serves_asks_of_one_slot_and_without_a_principal(cluster: Cluster) -> None:
    async with nodes(cluster, 2) as both:
        ip = address()
        ask = ask_of(None, ip, id="once", detail=True)
        first, again = [await node.decide([ask]) for node in both]
        assert first == again
        assert await spent(both[0], f"ip={ip}", "connection_creation_rate") == 1
        back = replace(ask, mode="refund", id="back")
        first, again = [await node.decide([back]) for node in both]
        assert [first[0].charged, again[0].charged] == [True, True]
        assert await spent(both[0], f"ip={ip}", "connection_creation_rate") == 0


async def test_batch_is_decided_in_order(cluster: Cluster) -> None:
    user, other, ip = fresh("u"), fresh("u"), address()
    async with nodes(cluster) as (node,):
        asks = [ask_of(user, ip) for _ in range(USER_LIMIT + 5)]
        asks.insert(3, ask_of(other, None))
        asks.append(ask_of(None, ip))
        decisions = await node.decide(asks)
        assert [each.decision for each in decisions] == [
            *["admit"] * (USER_LIMIT + 1),
            *["throttle"] * 5,
            "admit",
        ]
        assert await spent(node, f"ip={ip}", "connection_creation_rate") == USER_LIMIT + 1
        shown = await node.decide([ask_of(other, ip), ask_of(other, ip, mode="peek", detail=True)])
        assert [round(each.observed or 0) for each in shown[1].quotas or ()] == [2, USER_LIMIT + 2]


async def test_reset_empties_a_bucket_wherever_it_is(cluster: Cluster) -> None:
    async with nodes(cluster) as (node,):
        for user in (fresh("u") for _ in range(6)):
            await node.decide([ask_of(user, None)])
            buckets = Buckets(node.circuit, lambda: Snapshot(1, QUOTAS), RULES)
            keys, order = await buckets.reset(BucketName.parse(f"user={user}", RULES), None)
            assert sorted(keys) == ["producer_ids_rate", "request_rate"]
            assert order is not None
            assert await spent(node, f"user={user}", "request_rate") == 0


async def test_lost_primary_leaves_the_others_as_they_are() -> None:
    with clusters.running(replicas=False) as own:
        async with nodes(own, budget_s=0.05) as (node,):
            lost = own.primaries[1]
            users = [fresh("u") for _ in range(30)]
            await asyncio.gather(*(node.decide([ask_of(user, None)]) for user in users))
            owners = {user: own.owner(slot_of_tag(f"user={user}".encode())) for user in users}
            lost.kill()
            async with asyncio.timeout(60):
                while True:
                    answers = {user: (await node.decide([ask_of(user, None)]))[0] for user in users}
                    if {each.source for user, each in answers.items() if owners[user] is lost} == {
                        "fallback"
                    }:
                        break
            others = [user for user in users if owners[user] is not lost]
            assert others
            answers = {user: (await node.decide([ask_of(user, None)]))[0] for user in others}
            assert {each.source for each in answers.values()} == {"store"}
            assert node.circuit.error is None
            assert "primary_away" in {fault.name for fault in node.circuit.faults}


async def test_slots_that_move_key_by_key_are_followed(cluster: Cluster) -> None:
    """SETSLOT and MIGRATE, while asks go on; nothing is lost."""
    users = [fresh("u") for _ in range(8)]
    slots = [slot_of_tag(f"user={user}".encode()) for user in users]
    admitted: Counter[str] = Counter()
    stopping = False
    async with nodes(cluster, 2) as both:

        async def call(number: int) -> None:
            chance = random.Random(number)
            while not stopping:
                user = chance.choice(users)
                (decision,) = await chance.choice(both).decide([ask_of(user, None)])
                admitted[user] += decision.decision == "admit" and decision.charged
                await asyncio.sleep(0.001)

        callers = [asyncio.create_task(call(number)) for number in range(10)]
        loop = asyncio.get_running_loop()
        for slot in slots:
            await loop.run_in_executor(None, move_slot, cluster, slot)
        stopping = True
        await asyncio.gather(*callers)
        for user in users:
            assert await spent(both[0], f"user={user}", "request_rate") == admitted[user] <= USER_LIMIT


def move_slot(cluster: Cluster, slot: int) -> None:
    """Move a slot to another primary, key by key."""
    source = cluster.owner(slot)
    target = next(node for node in cluster.primaries if node is not source)
    target.call("CLUSTER SETSLOT", slot, "IMPORTING", source.call("CLUSTER MYID"))
    source.call("CLUSTER SETSLOT", slot, "MIGRATING", target.call("CLUSTER MYID"))
    while keys := source.call("CLUSTER GETKEYSINSLOT", slot, 10):
        source.call("MIGRATE", clusters.HOST, target.port, "", 0, 5_000, "KEYS", *keys)
    for node in (target, source, *cluster.primaries):
        node.call("CLUSTER SETSLOT", slot, "NODE", target.call("CLUSTER MYID"))


async def test_history_is_loaded_into_buckets_of_many_slots(cluster: Cluster) -> None:
    users = [fresh("u") for _ in range(6)]
    loader = Loader(cluster.url, fresh("load"))
    try:
        now_ms = await loader.now_ms()
        asked = [ask_of(user, None, usage={"requests": 1}) for user in users]
        loads = [
            Load(applied, [Tokens(7.0, now_ms)])
            for ask in asked
            for applied in applied_quotas(ask, QUOTAS, RULES)
        ]
        orders = await loader.next_orders(loads)
        assert len(orders) == len(users)
        assert min(orders) > 0
        for results in (await loader.load(loads, 6), await loader.load(loads, 6)):
            assert sum(each.added + each.there for each in results) == len(users)
        assert await loader.done() == 6
        await loader.finish()
        assert await loader.done() == 0
    finally:
        await loader.close()
    async with nodes(cluster) as (node,):
        for user in users:
            assert (await status(node, f"user={user}", "request_rate")).tokens == pytest.approx(7)


async def test_batches_of_the_log_travel_through_a_cluster(cluster: Cluster) -> None:
    stream, client = LogStream.at(cluster.url), client_of(cluster.url, 30.0)
    reader = StreamReader(client)
    try:
        assert await reader.read(10, 1) == []
        assert await stream.append(b"batch", 3, "node", 1)
        async with asyncio.timeout(60):
            while not (entries := await reader.read(10, 50)):
                pass
        assert [(entry.packed, entry.rows) for entry in entries] == [(b"batch", 3)]
        assert (await stream.status()).waiting == 1
        await reader.done([(entry.id, 3, 0) for entry in entries])
        found = await stream.status()
        assert (found.waiting, found.written, [node.node for node in found.nodes]) == (0, 3, ["node"])
    finally:
        await stream.close()
        await client.aclose()


async def test_factor_leases_and_places_in_the_order_are_kept_on_a_cluster(cluster: Cluster) -> None:
    record = VolumeRecord.at(cluster.url)
    lease = Lease.at(cluster.url, "volumes", "one", 10.0)
    other = Lease.at(cluster.url, "volumes", "two", 10.0)
    try:
        token = await lease.acquire()
        assert token is not None
        assert await other.acquire() is None
        reading = await record.read()
        assert (reading.state, reading.drill) == (None, None)
        await record.begin_drill(Drill(0.5, reading.now_ms, reading.now_ms + 60_000, "test"), reading.now_ms)
        assert (await record.read()).drill is not None
        await record.end_drill()
        await lease.release()
        assert await other.acquire() is not None
    finally:
        await record.close()
        await lease.close()
        await other.close()
