"""A store that new names have filled: existing buckets stay exact, and new ones follow on_store_failure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import redis

from app.decision_log.batch import STREAM
from app.decision_log.stream import LogStream
from tests import stores
from tests.report import say
from tests.service import Service, eventually, running

FILLERS = 60_000
"""Principals that fill the store. Its table of keys grew just before, and the next growth is far away: each
takes a twelfth of its memory."""
SHUT = {"limit": 1e-6, "algorithm": "token_bucket", "burst": 40, "enforcement": "deny"}
"""Refills so slowly that a bucket admits its burst and no more."""
BURST = 300


@contextmanager
def filled(kind: str) -> Iterator[tuple[Service, Any, Any]]:
    """Run a node with a store of limited memory; also give an endless supply of new names."""
    with (
        stores.server(kind, "--maxmemory", "64mb") as server,
        running(store_url=server.url) as node,
        redis.Redis.from_url(server.url) as store,
    ):
        # for the fillers
        node.put("user=*", request_rate={"limit": 1e-6, "algorithm": "token_bucket", "burst": 5})
        node.put("user=old", request_rate={**SHUT, "burst": BURST}, producer_ids_rate=5)
        for user in ("open", "shut"):
            policy = "admit" if user == "open" else "throttle"
            node.put(f"user={user}", request_rate={**SHUT, "on_store_failure": policy})
        yield node, store, (f"filler-{n}" for n in count())


def one(node: Service, principal: str, ids: tuple[int, ...] = (), **more: Any) -> dict[str, Any]:
    """Return the decision on one request, perhaps with ids."""
    usage = {"requests": 1, **({"producer_ids": list(ids)} if ids else {})}
    return node.ask(principal=principal, usage=usage, detail=True, **more)


def flood(node: Service, names: Iterator[str], asks: int = 1_000) -> Counter[str]:
    """Ask with new names in a batch; return the sources of the answers."""
    batch = [{"principal": next(names), "usage": {"requests": 1}} for _ in range(asks)]
    return Counter(decision["source"] for decision in node.batch(batch))


def metric(node: Service, name: str) -> float:
    lines = node.http.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def store_of(node: Service) -> str:
    state: str = node.http.get("/health/ready").json()["store"]
    return state


def fill(node: Service, store: Any, names: Iterator[str]) -> None:
    """Ask with new names, then limit the store's memory so that it is clearly more than 7/8 full."""

    def is_filled() -> bool:
        flood(node, names)
        return int(store.dbsize()) > FILLERS

    def is_grown() -> bool:
        return not store.info("memory").get("mem_overhead_db_hashtable_rehashing")  # only Valkey has it

    def is_full() -> bool:
        memory = store.info("memory")
        used, most = int(memory["used_memory"]), int(memory["maxmemory"])
        if not 0.89 < used / most < 0.92:  # reading of the reply freed memory
            store.config_set("maxmemory", used * 110 // 100)
            return False
        return flood(node, names, 1) == {"fallback": 1} and store_of(node) == "full"

    eventually(is_filled)
    eventually(is_grown)
    eventually(is_full)


@pytest.mark.parametrize("kind", stores.KINDS)
def test_existing_buckets_stay_exact_and_new_ones_follow_policy(kind: str):
    check_full_store(kind, seconds=1)


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", stores.KINDS)
def test_existing_buckets_stay_exact_for_a_minute(kind: str):
    check_full_store(kind, seconds=60)


def check_full_store(kind: str, seconds: float) -> None:
    with filled(kind) as (node, store, names):
        assert store_of(node) == "ok"
        assert one(node, "old", (1, 2))["charged"]
        fill(node, store, names)
        assert metric(node, 'quotagate_store_faults{fault="full"}') == 1
        used, most = (
            metric(node, "quotagate_store_memory_bytes"),
            metric(node, "quotagate_store_memory_max_bytes"),
        )
        assert most * 7 / 8 < used < most

        opened, shut = one(node, "open", id="a"), one(node, "shut", id="b")
        for answer, decision, throttle_ms in ((opened, "admit", 0), (shut, "throttle", 1_000)):
            assert (answer["decision"], answer["throttle_ms"]) == (decision, throttle_ms)
            assert (answer["source"], answer["charged"], answer["applied"]) == ("fallback", False, 1)
        assert shut["limited_by"]["reason"] == "store_full"
        assert metric(node, 'quotagate_fallback_total{reason="store_full"}') > 0

        before, ends, admitted, asked = (
            metric(node, "quotagate_fallback_total"),
            time.monotonic() + seconds,
            0,
            0,
        )
        while time.monotonic() < ends or asked < BURST + 50:
            flood(node, names, 100)
            store.xtrim(STREAM, maxlen=0)  # as the worker does, which has written the batches to files
            for answer in node.batch([{"principal": "old", "usage": {"requests": 1}}] * 10):
                assert answer["source"] == "store"
                assert answer["decision"] in {"admit", "throttle"}
                admitted += answer["decision"] == "admit"
                asked += 1
        assert admitted == BURST - 1, "exactly the tokens that were left"
        new = [one(node, "old", (n,))["decision"] for n in (1, 2, 3)]
        assert new == ["throttle"] * 3, "its tokens are spent"
        info = store.info("memory")
        say(f"{kind}: {asked:,} asks of an old bucket, {info['used_memory']:,} of {most:,.0f} bytes used")
        assert info["used_memory"] < most
        assert metric(node, "quotagate_fallback_total") > before
        assert metric(node, "quotagate_store_circuit_open") == 0
        assert metric(node, "quotagate_log_dropped_total") == 0, "the log may use the last eighth"

        store.delete(*store.scan_iter("*filler*", count=10_000))
        eventually(lambda: store_of(node) == "ok")
        assert flood(node, names, 100) == {"store": 100}
        for user in ("open", "shut"):
            answers = [one(node, user) for _ in range(41)]
            assert Counter(each["decision"] for each in answers) == {"admit": 40, "throttle": 1}
            assert {each["source"] for each in answers} == {"store"}
        assert one(node, "old")["decision"] == "throttle", "the old bucket is unchanged"


async def test_unread_log_leaves_memory_for_leases():
    """The worker that empties the stream needs a lease, which the store would refuse above maxmemory."""
    with stores.server("valkey") as server, redis.Redis.from_url(server.url) as store:
        log = LogStream.at(server.url)
        assert await log.append(b"batch", 1, "node", 1)
        store.config_set("maxmemory", store.info("memory")["used_memory"] * 65 // 64)
        assert not await log.append(b"batch", 1, "node", 2)
        await log.close()
        assert store.xlen(STREAM) == 1
        assert store.set("a lease", "of the worker", nx=True, px=1_000)


def test_ids_that_need_a_larger_bucket_are_throttled_and_seen_ids_pass():
    with filled("valkey") as (node, store, names):
        node.put("user=ids", producer_ids_rate=1_000)

        def ids(*some: int, **more: Any) -> dict[str, Any]:
            return node.ask(principal="ids", usage={"producer_ids": list(some)}, detail=True, **more)

        assert ids(*range(100))["charged"]
        fill(node, store, names)
        assert ids(*range(100))["decision"] == "admit", "seen"
        grown = ids(*range(100, 400))
        assert (grown["decision"], grown["source"], grown["charged"]) == ("throttle", "store", False)
        assert grown["limited_by"]["reason"] == "capacity"
        assert grown["throttle_ms"] == 1_000
        done = ids(*range(400, 900), mode="record")
        assert (done["decision"], done["source"], done["charged"]) == ("admit", "store", True)
        store.delete(*store.scan_iter("*filler*", count=10_000))
        eventually(lambda: ids(*range(100, 400))["decision"] == "admit")


def test_hundred_new_principals_under_a_large_limit_cost_little_memory_and_time():
    with (
        stores.server("valkey") as server,
        running(store_url=server.url) as node,
        redis.Redis.from_url(server.url) as store,
    ):
        node.put("user=*", producer_ids_rate=500_000)
        node.ask(principal="first", usage={"producer_ids": [1]})
        before_s = stores.processor_s(store)
        decisions = node.batch(
            [{"principal": f"new-{n}", "usage": {"producer_ids": [1]}} for n in range(100)]
        )
        took_ms = (stores.processor_s(store) - before_s) * 1_000
        cost = [int(store.memory_usage(key, samples=0) or 0) for key in store.scan_iter("*user=new-*")]
        say(f"100 new principals: at most {max(cost):,} bytes each, {took_ms:.1f} ms of the store")
        assert {each["source"] for each in decisions} == {"store"}
        assert len(cost) == 100
        assert max(cost) <= 4_096
        assert took_ms < 50
