"""Decisions over a cluster of three primaries: all or nothing over several slots, whatever happens."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import cast

import pytest

from app.admission.admission import Admission
from app.admission.buckets import Buckets
from app.admission.cluster.gatherer import ClusterGatherer
from app.admission.leases.leases import Settlement
from app.catalog.snapshot import Snapshot
from app.decision_log.stream import LogStream, StreamReader
from app.domain.bucket import BucketName
from app.domain.caller import Caller
from app.domain.entity import ANY, Entity
from app.domain.ladder import applied_quotas
from app.domain.quota import Quota
from app.domain.slots import slot_of_tag
from app.domain.token_bucket import Tokens
from app.domain.volumes import Drill
from app.store import redis as redis_module
from app.store.client import client_of
from app.store.cluster import Address, PrimaryStore
from app.store.connection import Command
from app.store.leader_election import Contender
from app.store.loading import Load, Loader
from app.store.port import Plan
from app.store.volumes import VolumeRecord
from tests import clusters
from tests.charging import decisions_of
from tests.clusters import Cluster
from tests.contract.clustered import (
    IDS_LIMIT,
    IP_LIMIT,
    QUOTAS,
    RULES,
    USER_LIMIT,
    WITHOUT_REFILL,
    Lapses,
    address,
    ask_of,
    fresh,
    nodes,
    spent,
    status,
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with clusters.running(replicas=False) as running:
        yield running


@pytest.fixture(autouse=True)
def scanned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Check every script call; give examinations a long timeout, because a busy machine is no outage."""
    monkeypatch.setattr(redis_module, "EXAMINE_WITHIN_S", 30.0)
    return clusters.scan_calls(monkeypatch)


async def test_ask_of_two_slots_is_charged_in_both(cluster: Cluster) -> None:
    user, ip = fresh("u"), address()
    async with nodes(cluster) as (node,):
        assert node.circuit.error is None
        (decision,) = await decisions_of(node, [ask_of(user, ip, detail=True)])
        assert (decision.decision, decision.source, decision.charged) == ("admit", "store", True)
        assert [round(each.observed or 0) for each in decision.quotas or ()] == [1, 1]
        assert await spent(node, f"user={user}", "request_rate") == 1
        assert await spent(node, f"ip={ip}", "connection_creation_rate") == 1


async def test_error_of_one_slot_leaves_the_other_slots_their_answers(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store refuses the command of one slot, after it has charged another slot of the same call."""
    async with nodes(cluster) as (node,):
        first = primary_of(node, broken := fresh("u"))
        whole = next(user for user in iter(lambda: fresh("u"), "") if primary_of(node, user) == first)
        command = PrimaryStore.command

        def broken_for_one(self: PrimaryStore, plans: Sequence[Plan], slot: int) -> Command:
            if slot == slot_of_tag(f"user={broken}".encode()):
                return ("GET",)  # without its argument
            return command(self, plans, slot)

        monkeypatch.setattr(PrimaryStore, "command", broken_for_one)
        answers = await decisions_of(node, [ask_of(user, None) for user in (whole, broken, whole)])
        assert [each.source for each in answers] == ["store", "fallback", "store"]
        assert node.circuit.error is None
        assert await spent(node, f"user={whole}", "request_rate") == 2
        monkeypatch.setattr(PrimaryStore, "command", command)
        (decision,) = await decisions_of(node, [ask_of(broken, None)])
        assert decision.source == "store"


async def test_account_without_info_is_named_as_it_cannot_undo(cluster: Cluster) -> None:
    for primary in cluster.primaries:
        primary.call("ACL", "SETUSER", "node", "on", ">secret", "~*", "+@all", "-info")
    bound = copy(cluster)
    bound.url = cluster.url.replace("://", "://node:secret@")
    async with nodes(bound) as (node,):
        assert {fault.name for fault in node.circuit.faults} >= {"unchecked", "missing_right"}
    async with nodes(cluster) as (node,):
        assert not node.circuit.faults


def primary_of(node: Admission, user: str) -> Address:
    """The primary that has a user's buckets."""
    store = cast("ClusterGatherer", node.circuit)._cluster.primary_of(slot_of_tag(f"user={user}".encode()))
    assert store is not None
    return store.address


async def test_refused_ask_charges_nothing_anywhere(cluster: Cluster) -> None:
    ip = address()
    async with nodes(cluster) as (node,):
        users = [fresh("u") for _ in range(IP_LIMIT // USER_LIMIT + 1)]
        for user in users:
            decisions = await asyncio.gather(
                *(decisions_of(node, [ask_of(user, ip)]) for _ in range(USER_LIMIT))
            )
        assert {each.decision for (each,) in decisions} == {"throttle"}
        assert await spent(node, f"user={users[-1]}", "request_rate") == 0
        assert await spent(node, f"ip={ip}", "connection_creation_rate") == IP_LIMIT


async def test_flood_at_a_full_address_costs_a_user_nothing(cluster: Cluster) -> None:
    user, full, free = fresh("u"), address(), address()
    async with nodes(cluster, 2) as both:
        for _ in range(IP_LIMIT // USER_LIMIT):
            other = fresh("u")
            await asyncio.gather(*(both[0].decide([ask_of(other, full)]) for _ in range(USER_LIMIT)))
        flood = [decisions_of(node, [ask_of(user, full)]) for _ in range(200) for node in both]
        good = [decisions_of(both[n % 2], [ask_of(user, free)]) for n in range(USER_LIMIT)]
        answers = await asyncio.gather(*itertools.chain(flood, good))
        assert {each.decision for (each,) in answers[: len(flood)]} == {"throttle"}
        assert {each.decision for (each,) in answers[len(flood) :]} == {"admit"}


async def test_twins_on_two_nodes_are_charged_once(cluster: Cluster) -> None:
    async with nodes(cluster, 2) as both:
        for mode in ("admit", "record"):
            user, ip = fresh("u"), address()
            for number in range(10):
                ask = ask_of(user, ip, id=f"{mode}-{number}", detail=True, mode=mode)
                answers = await asyncio.gather(*(decisions_of(node, [ask]) for node in both * 2))
                assert len({str(each) for each in answers}) == 1, "every twin gets the same answer"
            assert await spent(both[0], f"user={user}", "request_rate") == 10
            assert await spent(both[0], f"ip={ip}", "connection_creation_rate") == 10


async def test_kept_answer_serves_asks_of_one_slot_and_without_a_principal(cluster: Cluster) -> None:
    async with nodes(cluster, 2) as both:
        ip = address()
        ask = ask_of(None, ip, id="once", detail=True)
        first, again = [await decisions_of(node, [ask]) for node in both]
        assert first == again
        assert await spent(both[0], f"ip={ip}", "connection_creation_rate") == 1
        back = replace(ask, mode="refund", id="back")
        first, again = [await decisions_of(node, [back]) for node in both]
        assert [first[0].charged, again[0].charged] == [True, True]
        assert await spent(both[0], f"ip={ip}", "connection_creation_rate") == 0


async def test_batch_is_decided_in_order(cluster: Cluster) -> None:
    user, other, ip = fresh("u"), fresh("u"), address()
    async with nodes(cluster) as (node,):
        asks = [ask_of(user, ip) for _ in range(USER_LIMIT + 5)]
        asks.insert(3, ask_of(other, None))
        asks.append(ask_of(None, ip))
        decisions = await decisions_of(node, asks)
        assert [each.decision for each in decisions] == [
            *["admit"] * (USER_LIMIT + 1),
            *["throttle"] * 5,
            "admit",
        ]
        assert await spent(node, f"ip={ip}", "connection_creation_rate") == USER_LIMIT + 1
        shown = await decisions_of(node, [ask_of(other, ip), ask_of(other, ip, mode="peek", detail=True)])
        assert [round(each.observed or 0) for each in shown[1].quotas or ()] == [2, USER_LIMIT + 2]


async def test_reset_empties_a_bucket_wherever_it_is(cluster: Cluster) -> None:
    async with nodes(cluster) as (node,):
        for user in (fresh("u") for _ in range(6)):
            await node.decide([ask_of(user, None)])
            buckets = Buckets(node.circuit, lambda: Snapshot.of(QUOTAS), RULES)
            keys, order = await buckets.reset(BucketName.parse(f"user={user}", RULES), None)
            assert sorted(keys) == ["consumer_byte_rate", "producer_ids_rate", "request_rate"]
            assert order is not None
            assert await spent(node, f"user={user}", "request_rate") == 0


async def test_id_that_was_reset_at_one_node_is_new_at_the_other(cluster: Cluster) -> None:
    """Nodes on a cluster ask the store about every id, so they notice each other's resets at once."""
    user, ip = fresh("u"), address()
    asks = [ask_of(user, ip, producer_ids=(number,)) for number in range(IDS_LIMIT)]
    async with nodes(cluster, 2) as (one, other):
        for each in (one, other):
            assert {decision.source for decision in await decisions_of(each, asks[:5])} == {"store"}
        shown = await status(one, f"user={user}", "producer_ids_rate")
        assert shown.charged_ids == 5
        assert [layer.ids for layer in shown.live_layers or ()] == [5]
        buckets = Buckets(one.circuit, lambda: Snapshot.of(QUOTAS), RULES)
        await buckets.reset(BucketName.parse(f"user={user}", RULES), None)
        assert (await status(other, f"user={user}", "producer_ids_rate")).charged_ids == 0
        decisions = await decisions_of(other, asks)
        assert {decision.decision for decision in decisions} == {"admit"}
        assert (await status(one, f"user={user}", "producer_ids_rate")).charged_ids == IDS_LIMIT


async def test_full_coverage_is_a_fault_that_is_named(cluster: Cluster) -> None:
    for each in cluster.primaries:
        each.call("CONFIG SET", "cluster-require-full-coverage", "yes")
    try:
        async with nodes(cluster) as (node,):
            assert "cluster_full_coverage" in {fault.name for fault in node.circuit.faults}
    finally:
        for each in cluster.primaries:
            each.call("CONFIG SET", "cluster-require-full-coverage", "no")
    async with nodes(cluster) as (node,):
        assert node.circuit.faults == ()


async def test_asks_of_one_request_are_decided_together_over_several_slots(cluster: Cluster) -> None:
    """The descriptors of Envoy: each bucket is charged once, in all slots or in none."""
    users, ip = [fresh("u") for _ in range(3)], address()
    async with nodes(cluster) as (node,):
        asks = [ask_of(user, ip, deny=True) for user in users]
        for _ in range(USER_LIMIT):
            atomic = await node.decide_atomically(asks)
            assert (atomic.decision.decision, atomic.decision.source) == ("admit", "store")
        assert (await node.decide_atomically(asks)).decision.decision == "throttle"
        assert [await spent(node, f"user={user}", "request_rate") for user in users] == [USER_LIMIT] * 3
        assert await spent(node, f"ip={ip}", "connection_creation_rate") == USER_LIMIT
        full = ask_of(users[0], None, deny=True)
        other = ask_of(fresh("u"), ip, deny=True)
        assert (await node.decide_atomically([other, full])).decision.decision == "throttle"
        assert await spent(node, f"ip={ip}", "connection_creation_rate") == USER_LIMIT


@pytest.mark.parametrize("several", [False, True], ids=["one slot", "two slots"])
async def test_lease_is_held_in_all_its_slots_and_settled(cluster: Cluster, several: bool) -> None:
    user, ip = fresh("u"), address()
    async with nodes(cluster, 2) as both:
        caller = Caller(key="own")
        wish = ask_of(user, ip if several else None, usage={"requests": 8, "connections": 8}, deny=True)
        taken = await both[0].leases.take(wish, 10_000, [], caller)
        assert (taken.decision.decision, taken.granted) == ("admit", {"requests": 8, "connections": 8})
        assert await spent(both[0], f"user={user}", "request_rate") == 8
        assert await spent(both[0], f"ip={ip}", "connection_creation_rate") == 8 * several
        lease = both[1].leases.named(taken.name or "", "own")
        nothing = replace(wish, usage={"requests": 0})
        settlement = Settlement(lease, {"requests": 3, "connections": 2})
        for ok in (True, False):
            settled = await both[1].leases.take(nothing, 10_000, [settlement], caller)
            assert settled.settled == [ok], "the second time it is over"
        assert await spent(both[0], f"user={user}", "request_rate") == 3
        assert await spent(both[0], f"ip={ip}", "connection_creation_rate") == 2 * several


async def test_lease_of_two_slots_is_granted_the_least_and_refused_if_one_refuses(cluster: Cluster) -> None:
    user, ip = fresh("u"), address()
    async with nodes(cluster) as (node,):
        caller, settlements = Caller(), list[Settlement]()
        for _ in range(2):  # the second time the node settles the first lease before it takes the new one
            wish = ask_of(user, ip, usage={"requests": 1_000, "connections": 1_000}, deny=True)
            taken = await node.leases.take(wish, 10_000, settlements, caller)
            assert taken.granted == {"requests": USER_LIMIT / 2, "connections": IP_LIMIT / 2}
            settlements = [Settlement(node.leases.named(taken.name or "", None), {})]
        await node.decide([ask_of(fresh("u"), ip, usage={"connections": IP_LIMIT / 2})])
        refused = await node.leases.take(ask_of(user, ip, deny=True), 10_000, settlements[:0], caller)
        assert (refused.decision.decision, refused.name, refused.granted) == ("throttle", None, {})
        assert refused.decision.limited_by is not None
        assert refused.decision.limited_by.bucket == f"ip={ip}"
        assert await spent(node, f"user={user}", "request_rate") == USER_LIMIT / 2, "what the first one holds"


async def test_asks_of_one_slot_in_a_batch_are_charged_once_whatever_a_shadow_quota_says(
    cluster: Cluster,
) -> None:
    user = fresh("u")
    shadow = Quota("request_rate", WITHOUT_REFILL, "token_bucket", "deny", burst=1, shadow=True)
    async with nodes(cluster, quotas=QUOTAS | {"request_rate": {Entity.of(user=ANY): shadow}}) as (node,):
        of_two_slots, of_one = ask_of(fresh("u"), address(), deny=True), ask_of(user, None, deny=True)
        decisions = await decisions_of(node, [of_two_slots, of_one, of_one, of_one])
        assert [decision.decision for decision in decisions] == ["admit"] * 4
        (peek,) = await decisions_of(node, [replace(of_one, mode="peek", detail=True)])
        assert peek.quotas is not None
        assert round(peek.quotas[0].observed or 0, 6) == 3


@pytest.mark.parametrize("how", ["a lease decided once more", "asks decided together"])
async def test_each_unit_that_a_lease_lost_is_counted_once(cluster: Cluster, how: str) -> None:
    """Also if a settlement has the lease decided once more, and for asks that are decided together."""
    user, ip, lapses = fresh("u"), address(), Lapses()
    async with nodes(cluster, caller_clock=True, metrics=lapses) as (node,):
        take, caller = node.leases.take, Caller()
        of_user = ask_of(user, None, usage={"requests": 1}, deny=True, at_ms=1_000_000)
        other = await take(of_user, 10_000, [], caller)
        both = ask_of(user, ip, usage={"requests": 8, "connections": 1_000}, deny=True, at_ms=1_000_000)
        taken = await take(both, 50, [], caller)
        assert taken.granted == {"requests": 8, "connections": IP_LIMIT / 2}
        rest = ask_of(None, ip, usage={"connections": IP_LIMIT / 2}, deny=True, at_ms=1_000_000)
        assert [decision.decision for decision in await decisions_of(node, [rest])] == ["admit"]
        assert lapses.units == 0
        later = replace(both, at_ms=1_000_050)
        if how == "asks decided together":
            atomic = await node.decide_atomically([replace(later, usage={"requests": 1, "connections": 1})])
            assert atomic.decision.decision == "throttle"
        else:
            settlement = Settlement(node.leases.named(other.name or "", None), {})
            refused = await take(later, 50, [settlement], caller)
            assert (refused.decision.decision, refused.settled) == ("throttle", [True])
        assert lapses.units == 8 + IP_LIMIT / 2


async def test_every_call_of_a_script_is_looked_at(cluster: Cluster, scanned: list[int]) -> None:
    user, ip = fresh("u"), address()
    async with nodes(cluster) as (node,):
        before = len(scanned)
        await node.decide([ask_of(user, ip)])
        own = {slot_of_tag(f"user={user}".encode()), slot_of_tag(f"ip={ip}".encode())}
        assert set(scanned[before:]) >= own


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
    lease = Contender.at(cluster.url, "volumes", "one", 10.0)
    other = Contender.at(cluster.url, "volumes", "two", 10.0)
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
