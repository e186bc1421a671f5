"""Traffic over users, addresses and ids: a cluster that is resharded and loses primaries, exact to a unit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from app.admission.admission import Admission
from app.domain.slots import slot_of_tag
from app.store import cluster as cluster_module
from app.store import redis as redis_module
from tests import clusters
from tests.clusters import Cluster, Node, migrate_slot, move_slot
from tests.contract.clustered import USER_LIMIT, Traffic, nodes
from tests.report import say
from tests.waiting import until

QUICK, MANY = 1_500, 8_000
SOON_S = 180.0
"""The timeout of conditions, for a machine with hardly any processor."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with clusters.running() as running:
        yield running


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check every script call; set long timeouts, because slow moves and a busy machine are no outage."""
    clusters.scan_calls(monkeypatch)
    monkeypatch.setattr(cluster_module, "FOLLOW_WITHIN_S", 60.0)
    monkeypatch.setattr(cluster_module, "EXAMINE_WITHIN_S", 30.0)
    monkeypatch.setattr(redis_module, "EXAMINE_WITHIN_S", 30.0)


@pytest.mark.parametrize("asks", [QUICK, pytest.param(MANY, marks=pytest.mark.prove)])
async def test_buckets_equal_the_admissions(cluster: Cluster, asks: int) -> None:
    """No ask is refused needlessly either: every user spends its whole limit."""
    traffic = Traffic(users=asks // 200, ips=asks // 400)
    async with nodes(cluster, 2) as both:
        await traffic.send(both, asks)
        assert traffic.by_policy == 0
        assert await traffic.check(both[0]) == 0
        assert traffic.admitted == len(traffic.users) * USER_LIMIT
    say(
        f"{traffic.asks:,} asks, 50 callers, 2 nodes: {traffic.admitted:,} of users admitted, all"
        f" that there was room for, {traffic.refused:,} asks refused"
    )


def _has_gone_on(traffic: Traffic, since: int) -> bool:
    """Whether more than a hundred asks were sent since then."""
    return traffic.asks > since + 100


@pytest.mark.parametrize("move", [move_slot, migrate_slot], ids=["key by key", "as a whole"])
@pytest.mark.parametrize("moves", [4, pytest.param(40, marks=pytest.mark.prove)])
async def test_buckets_equal_the_admissions_while_slots_move(
    cluster: Cluster, move: Callable[[Cluster, int], None], moves: int
) -> None:
    traffic = Traffic(users=60 * moves // 4, ips=40 * moves // 4)
    names = [f"user={user}" for user in traffic.users] + [f"ip={ip}" for ip in traffic.ips]
    loop = asyncio.get_running_loop()
    async with nodes(cluster, 2) as both:
        async with traffic.flowing(both):
            for name in (*names[: moves // 2], *names[-(moves // 2) :]):
                before = traffic.asks
                await loop.run_in_executor(None, move, cluster, slot_of_tag(name.encode()))
                await until(partial(_has_gone_on, traffic, before), within_s=SOON_S)
        assert traffic.by_policy == 0
        assert await traffic.check(both[0]) == 0
    say(f"{traffic.asks:,} asks while {moves} slots moved: {traffic.refused:,} refused, none by policy")


async def test_lost_primary_costs_its_own_quotas_only() -> None:
    """A command promotes the replica, so that the node timeout does not matter."""
    with clusters.running() as own:
        traffic = Traffic(users=60, ips=40)
        lost, replica = own.primaries[1], own.replicas[1]
        affected = _owned(own, traffic, lost)
        async with nodes(own, 2) as both:
            await _lose(both, traffic, affected, lost, lambda: replica.call("CLUSTER FAILOVER", "TAKEOVER"))
            orphans = await traffic.check(both[0], lost=sorted(affected))
    say(
        f"{traffic.asks:,} asks, {traffic.by_policy:,} with a quota answered by policy, all of the lost"
        f" primary; {orphans} units that no answer accounts for"
    )


@pytest.mark.prove
async def test_replica_takes_over_by_itself() -> None:
    timeout_ms = 2_000
    with clusters.running("--cluster-node-timeout", str(timeout_ms)) as own:
        traffic = Traffic(users=300, ips=200)
        lost = own.primaries[1]
        affected = _owned(own, traffic, lost)
        async with nodes(own, 2) as both:
            await _lose(both, traffic, affected, lost, lambda: None)
            await traffic.check(both[0], lost=sorted(affected))
    assert traffic.policy_s is not None
    away_s = traffic.policy_s[1] - traffic.policy_s[0]
    say(
        f"node timeout {timeout_ms / 1000:g} s: the lost primary's quotas by policy for {away_s:.1f} s;"
        f" of {traffic.asks:,} asks {traffic.by_policy:,}, 0 of the others"
    )


def _owned(own: Cluster, traffic: Traffic, node: Node) -> set[str]:
    """The buckets of a primary."""
    names = [f"user={user}" for user in traffic.users] + [f"ip={ip}" for ip in traffic.ips]
    return {name for name in names if own.owner(slot_of_tag(name.encode())) is node}


async def _lose(
    both: Sequence[Admission],
    traffic: Traffic,
    affected: set[str],
    lost: Node,
    take_over: Callable[[], object],
) -> None:
    """Kill a primary under traffic, and wait until asks of all buckets are decided by the store again."""
    loop = asyncio.get_running_loop()
    async with traffic.flowing(both):
        await until(lambda: traffic.asks > 200, within_s=SOON_S)
        assert traffic.by_policy == 0
        lost.kill()
        await until(lambda: traffic.by_policy > 0, within_s=SOON_S)
        assert {fault.name for node in both for fault in node.circuit.faults} <= {"primary_away"}
        await loop.run_in_executor(None, take_over)
        await until(lambda: all(node.circuit.faults == () for node in both), within_s=SOON_S)
        before, policy = traffic.asks, traffic.by_policy

        def is_back() -> bool:
            nonlocal before, policy
            if traffic.by_policy > policy:
                before, policy = traffic.asks, traffic.by_policy
            return traffic.asks > before + 300

        await until(is_back, within_s=SOON_S)
    assert set(traffic.unsure) <= affected, "a quota of another primary was answered by policy"
