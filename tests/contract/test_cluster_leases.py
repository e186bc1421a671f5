"""Leases over several slots of a cluster, taken at two nodes at once: buckets hold the granted units."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

import pytest

from app.admission.admission import Admission
from app.admission.leases.leases import Settlement
from app.domain.caller import ANYONE
from app.domain.slots import slot_of_tag
from app.store import cluster as cluster_module
from app.store import redis as redis_module
from tests import clusters
from tests.charging import decisions_of
from tests.clusters import Cluster, move_slot
from tests.contract.clustered import IP_LIMIT, USER_LIMIT, address, ask_of, fresh, nodes, spent
from tests.report import say
from tests.waiting import until

QUICK, MANY = 300, 3_000
SOON_S = 180.0
LEASE_MS = 10_000
USAGES = {"requests": "user", "connections": "ip"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with clusters.running(replicas=False) as running:
        yield running


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check every script call; set long timeouts, because slow moves and a busy machine are no outage."""
    clusters.scan_calls(monkeypatch)
    monkeypatch.setattr(cluster_module, "FOLLOW_WITHIN_S", 60.0)
    monkeypatch.setattr(redis_module, "EXAMINE_WITHIN_S", 30.0)


class Holders:
    """Holders of leases over users and addresses, who spend a part of each; some die, some ask directly.

    Attributes:
        used: by bucket, the units spent, and the units in leases of dead holders.
        turns: the number of requests for leases, and of asks.
    """

    def __init__(self, users: int, ips: int) -> None:
        self.users = [fresh("u") for _ in range(users)]
        self.ips = [address() for _ in range(ips)]
        self.used: Counter[str] = Counter()
        self.granted = self.refused = self.turns = 0

    async def run(self, nodes: Sequence[Admission], turns: int, holders: int = 20) -> None:
        work = iter(range(turns))
        await asyncio.gather(*(self._hold(nodes, work, number) for number in range(holders)))

    async def _hold(self, nodes: Sequence[Admission], work: Iterator[int], number: int) -> None:
        chance = random.Random(number)
        lease: tuple[Settlement, dict[str, float], dict[str, str]] | None = None
        for _ in work:
            self.turns += 1
            node = chance.choice(nodes)
            user, ip = chance.choice(self.users), chance.choice(self.ips)
            names = {"requests": f"user={user}", "connections": f"ip={ip}"}
            if chance.random() < 0.2:
                (decision,) = await decisions_of(node, [ask_of(user, ip)])
                self.used.update(names.values() if decision.decision == "admit" else ())
                continue
            if lease is not None and chance.random() < 0.2:
                self._ended(lease, settled=False)  # its holder dies
                lease = None
            wish = ask_of(user, ip, deny=True, usage=dict.fromkeys(USAGES, chance.randint(1, 4)))
            settlements = [] if lease is None else [lease[0]]
            taken = await node.leases.take(wish, LEASE_MS, settlements, ANYONE)
            assert taken.decision.source == "store"
            if lease is not None:
                self._ended(lease, settled=taken.settled[0])
            self.granted += taken.name is not None
            self.refused += taken.name is None
            lease = None
            if taken.name is not None:
                left = {field: float(chance.randint(0, int(units))) for field, units in taken.granted.items()}
                lease = Settlement(node.leases.named(taken.name, None), left), taken.granted, names
        if lease is not None:
            self._ended(lease, settled=False)

    def _ended(self, lease: tuple[Settlement, dict[str, float], dict[str, str]], *, settled: bool) -> None:
        """Count the used units of a lease: all of them if it was over or its holder died."""
        settlement, granted, names = lease
        for field, units in (settlement.spent if settled else granted).items():
            self.used[names[field]] += int(units)

    async def check(self, node: Admission) -> None:
        """Check that every bucket has exactly its `used` units, and no more than its limit."""
        for names, quota, limit in (
            ([f"user={user}" for user in self.users], "request_rate", USER_LIMIT),
            ([f"ip={ip}" for ip in self.ips], "connection_creation_rate", IP_LIMIT),
        ):
            for name in names:
                assert await spent(node, name, quota) == self.used[name] <= limit, name


@pytest.mark.parametrize("turns", [QUICK, pytest.param(MANY, marks=pytest.mark.prove)])
async def test_buckets_hold_what_was_granted(cluster: Cluster, turns: int) -> None:
    holders = Holders(users=turns // 50, ips=turns // 150)
    async with nodes(cluster, 2) as both:
        await holders.run(both, turns)
        await holders.check(both[0])
        assert holders.granted > turns / 10
        assert holders.refused > 0
    say(
        f"{holders.turns:,} leases and asks of 20 holders at 2 nodes: {holders.granted:,} leases granted,"
        f" {holders.refused:,} refused; the buckets have what was spent, to a unit"
    )


async def test_buckets_hold_what_was_granted_while_slots_move(cluster: Cluster) -> None:
    holders = Holders(users=8, ips=4)
    names = [f"user={holders.users[0]}", f"ip={holders.ips[0]}"]
    loop = asyncio.get_running_loop()
    async with nodes(cluster, 2) as both:
        running = asyncio.ensure_future(holders.run(both, QUICK))
        for place, name in enumerate(names):
            await until(partial(_has_taken, holders, (place + 1) * 50), within_s=SOON_S)
            await loop.run_in_executor(None, move_slot, cluster, slot_of_tag(name.encode()))
        await running
        await holders.check(both[0])


async def test_lease_with_a_lost_primary_is_decided_by_policy_and_holds_nothing() -> None:
    with clusters.running(replicas=False) as own:
        lost = own.primaries[1]
        user = next(name for name in _users() if own.owner(slot_of_tag(f"user={name}".encode())) is not lost)
        ip = next(name for name in _ips() if own.owner(slot_of_tag(f"ip={name}".encode())) is lost)
        wish = ask_of(user, ip, deny=True, usage=dict.fromkeys(USAGES, 4))
        async with nodes(own) as (node,):
            taken = await node.leases.take(wish, LEASE_MS, [], ANYONE)
            assert taken.granted == {"requests": 4, "connections": 4}
            lost.kill()
            refused = await node.leases.take(wish, LEASE_MS, [], ANYONE)
            assert (refused.decision.decision, refused.decision.source) == ("admit", "fallback")
            assert (refused.name, refused.granted, refused.decision.charged) == (None, {}, False)
            settlement = Settlement(node.leases.named(taken.name or "", None), {"requests": 1})
            settled = await node.leases.take(
                ask_of(user, None, deny=True, usage={"requests": 0}), LEASE_MS, [settlement], ANYONE
            )
            assert settled.settled == [True], "where it can be"
            assert await spent(node, f"user={user}", "request_rate") == 1, "the second wish holds nothing"


def _users() -> Iterator[str]:
    while True:
        yield fresh("u")


def _ips() -> Iterator[str]:
    while True:
        yield address()


def _has_taken(holders: Holders, turns: int) -> bool:
    return holders.turns >= turns
