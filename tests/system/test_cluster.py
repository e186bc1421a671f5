"""Nodes as programs on a cluster: every route, and a node that is killed midway under load."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from contextlib import suppress
from typing import Any, Final

from app.http.problems import OVERLOADED
from tests import clusters
from tests.line import line
from tests.report import say
from tests.service import Service, eventually, running
from tests.waiting import until

CALLERS: Final = 25
USERS, IPS = 40, 15
USER_LIMIT, IP_LIMIT = 40, 120
ANSWERS: Final = 200
"""The number of answers before a node is killed, and after."""


def without_refill(burst: int) -> dict[str, Any]:
    return {"limit": 1e-9, "algorithm": "token_bucket", "burst": burst, "enforcement": "deny"}


def put_quotas(node: Service) -> None:
    """Give each user and each address a bucket."""
    node.put("user=*", request_rate=without_refill(USER_LIMIT))
    node.put("ip=*", request_rate=without_refill(IP_LIMIT))


def spent(node: Service, bucket: str) -> int:
    answer = node.http.get("/v1/buckets", params={"bucket": bucket, "quota": "request_rate"})
    (found,) = answer.json()["buckets"]
    taken: int = round(found["observed"])
    return taken


def test_routes_decide_on_a_cluster() -> None:
    with clusters.running(replicas=False) as own, running(store_url=own.url) as node:
        assert node.http.get("/health/ready").json()["store"] == "ok"
        put_quotas(node)
        ask = {"principal": "alice", "ip": "10.0.0.1", "usage": {"requests": 1}}
        decision = node.ask(**ask)
        assert (decision["decision"], decision["source"], decision["charged"]) == ("admit", "store", True)
        asks = [*[ask] * USER_LIMIT, {**ask, "principal": "bob"}]
        assert [one["decision"] for one in node.batch(asks)] == [
            *["admit"] * (USER_LIMIT - 1),
            "throttle",
            "admit",
        ]
        assert spent(node, "ip=10.0.0.1") == USER_LIMIT + 1
        once = node.ask(**ask, id="once", mode="refund")
        assert node.ask(**ask, id="once", mode="refund") == once
        assert spent(node, "user=alice") == USER_LIMIT - 1
        wish = {"principal": "alice", "ip": "10.0.0.2", "usage": {"requests": 1_000}}
        leased = node.http.post("/v1/leases", json={"ask": wish, "lease_ms": 10_000}).json()
        assert (leased["decision"], leased["granted"]) == ("admit", {"requests": 1})
        settle = [{"lease": leased["lease"], "usage": {"requests": 0}}]
        renewed = node.http.post(
            "/v1/leases", json={"ask": wish, "lease_ms": 10_000, "settle": settle}
        ).json()
        assert (renewed["granted"], renewed["settled"][0]["ok"]) == ({"requests": 1}, True)
        assert (spent(node, "user=alice"), spent(node, "ip=10.0.0.2")) == (USER_LIMIT, 1)
        ended = node.http.request("DELETE", f"/v1/leases/{renewed['lease']}", json={"usage": {"requests": 0}})
        assert ended.json()["ok"] is True
        assert (spent(node, "user=alice"), spent(node, "ip=10.0.0.2")) == (USER_LIMIT - 1, 0)
        answer = node.http.post("/v1/buckets:reset", json={"bucket": "user=alice"})
        assert answer.is_success, answer.text
        assert spent(node, "user=alice") == 0


class Callers:
    """Callers over users and addresses, until they are stopped or their node dies.

    Attributes:
        charged: by bucket, the asks that were admitted.
        unanswered: by bucket, the asks that had no answer when their node died.
        shed: how many asks a crowded node has shed.
    """

    def __init__(self) -> None:
        self.charged: Counter[str] = Counter()
        self.unanswered: Counter[str] = Counter()
        self.answers = 0
        self.refused = 0
        self.cut_off = 0
        self.shed = 0
        self.stopping = False

    async def call(self, node: Service, number: int) -> None:
        with suppress(OSError):  # a connection that its node left cannot be closed in good order
            await self._call(node, number)

    async def _call(self, node: Service, number: int) -> None:
        chance = random.Random(number)
        async with line(node.address) as own:
            while not self.stopping:
                user, ip = f"u{chance.randrange(USERS)}", f"10.0.0.{chance.randrange(IPS)}"
                ask = {"principal": user, "ip": ip, "usage": {"requests": 1}}
                buckets = (f"user={user}", f"ip={ip}")
                try:
                    status, body = await own.ask(ask)
                except (OSError, asyncio.IncompleteReadError):
                    self.unanswered.update(buckets)
                    self.cut_off += 1
                    return
                if status == 503:  # it waited too long in its node: nothing was charged
                    assert body["type"] == OVERLOADED, json.dumps(body)
                    self.shed += 1
                    continue
                assert status == 200, json.dumps(body)
                assert body["source"] == "store"
                self.answers += 1
                if body["decision"] == "admit":
                    self.charged.update(buckets)
                else:
                    self.refused += 1

    async def more(self, answers: int) -> None:
        """Wait until so many more answers came."""
        before = self.answers
        await until(lambda: self.answers >= before + answers, within_s=200)


def test_node_killed_midway_leaves_at_most_what_it_had_not_answered() -> None:
    """No bucket exceeds its limit; beyond the answered asks it holds at most the usage of unanswered ones."""
    with (
        clusters.running(replicas=False) as own,
        running(store_url=own.url) as one,
        running(store_url=own.url, database_url=one.database_url) as other,
    ):
        put_quotas(one)
        probe = {"principal": "probe", "ip": "10.1.0.1", "usage": {"requests": 1}}
        eventually(lambda: other.ask(**probe)["applied"] == 2)
        callers = Callers()
        asyncio.run(_kill_midway(one, other, callers))
        orphans = 0
        for names, limit in (
            ([f"user=u{number}" for number in range(USERS)], USER_LIMIT),
            ([f"ip=10.0.0.{number}" for number in range(IPS)], IP_LIMIT),
        ):
            for name in names:
                used, charged = spent(one, name), callers.charged[name]
                assert used <= limit, f"{name} is beyond its limit"
                assert charged <= used <= charged + callers.unanswered[name], name
                orphans += used - charged
        assert callers.cut_off > 0
        say(
            f"a node killed midway: {callers.answers:,} asks answered, {callers.refused:,} refused,"
            f" {callers.shed} shed, {callers.cut_off} cut off, {orphans} units orphaned"
        )


async def _kill_midway(one: Service, other: Service, callers: Callers) -> None:
    async with asyncio.TaskGroup() as group:
        for number, node in zip(range(2 * CALLERS), itertools.cycle((one, other)), strict=False):
            group.create_task(callers.call(node, number))
        await callers.more(ANSWERS)
        other.process.kill()
        await callers.more(ANSWERS)
        callers.stopping = True
