"""Buckets of running nodes: each kind as shown by the API, reads change nothing, and resets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest
import redis

from tests.service import ADMIN_KEY, Service, eventually, running
from tests.stores import KINDS, server

CALLER: Final = {"QUOTAGATE_CLOCK": "caller"}
NOT_OF_IDS: Final = {
    "layers": None,
    "live_layers": None,
    "fill": None,
    "remembered_ids": None,
    "charged_ids": None,
}


class Node:
    """A node and its buckets."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def show(self, bucket: str, **parameters: str | int) -> list[dict[str, Any]]:
        answer = self.service.http.get("/v1/buckets", params={"bucket": bucket, **parameters})
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["buckets"]
        return found

    def one(self, bucket: str, **parameters: str | int) -> dict[str, Any]:
        (found,) = self.show(bucket, **parameters)
        return found

    def reset(self, **body: str) -> None:
        answer = self.service.http.post("/v1/buckets:reset", json=body)
        assert (answer.status_code, answer.content) == (204, b""), answer.text

    def ask(self, **ask: object) -> dict[str, Any]:
        return self.service.ask(**ask)


@pytest.fixture(scope="module", params=KINDS)
def nodes(request: pytest.FixtureRequest) -> Iterator[tuple[Node, Node]]:
    """Two nodes with one store and one catalog."""
    with (
        running(store=request.param) as one,
        running(store_url=one.store_url, database_url=one.database_url) as other,
    ):
        yield Node(one), Node(other)


@pytest.fixture(scope="module")
def by_the_caller() -> Iterator[Node]:
    """A node under the caller's clock."""
    with running(environment=CALLER) as node:
        yield Node(node)


# Buckets as shown


def test_producer_ids(by_the_caller: Node):
    node = by_the_caller
    node.service.put("user=ids", producer_ids_rate={"limit": 5, "window_ms": 3000})  # layers: 1 s, 4 s

    def seen(at_ms: int) -> list[float]:
        shown = node.one("user=ids", at_ms=at_ms)
        assert (shown["bucket"], shown["quota"], shown["tokens"]) == ("user=ids", "producer_ids_rate", None)
        assert shown["observed"] == shown["charged_ids"]
        return [shown[name] for name in ("charged_ids", "remaining", "remembered_ids", "layers")]

    def ask(at_ms: int, *ids: int) -> str:
        decided: str = node.ask(principal="ids", usage={"producer_ids": ids}, at_ms=at_ms)["decision"]
        return decided

    assert seen(0) == [0, 5, 0, 0]
    assert node.one("user=ids", at_ms=0)["live_layers"] == []
    assert ask(1_000, 1, 2, 3) == "admit"
    assert seen(1_000) == [3, 2, 3, 1]
    assert node.one("user=ids", at_ms=1_000)["fill"] == 3 / 32  # of the first segment's smallest size
    assert ask(2_500, 3, 4) == "admit"  # a second layer, which 3 moves to
    assert seen(2_500) == [4, 1, 4, 2]
    assert node.one("user=ids", at_ms=2_500)["fill"] == 2 / 32
    assert ask(2_600, 5, 6) == "throttle"  # remembers neither
    first, second = {"number": 1, "began_ms": 1_000, "ids": 2}, {"number": 2, "began_ms": 2_500, "ids": 2}
    assert node.one("user=ids", at_ms=2_600)["live_layers"] == [first, second]
    assert seen(2_600) == [4, 1, 4, 2]
    assert seen(4_000) == [1, 4, 4, 2]  # the first three charges are outside the window
    assert node.one("user=ids", at_ms=5_000)["live_layers"] == [second]
    assert seen(5_000) == [1, 4, 2, 1]  # 1 and 2 expired with the first layer
    assert seen(6_500) == [0, 5, 0, 0]
    assert node.one("user=ids", at_ms=6_500)["fill"] == 0


def test_rates_and_buckets_of_pairs_clients_and_users(by_the_caller: Node):
    node = by_the_caller
    node.service.put("user=*,client-id=*", request_rate=100, producer_byte_rate=1_000)
    node.service.put("client-id=*", request_rate=10)
    node.service.put("user=alone", request_rate={"limit": 5, "enforcement": "deny"})
    asked = {"usage": {"requests": 20, "produce_bytes": 500}, "mode": "record", "at_ms": 1_000}
    for who in ({"principal": "a", "client_id": "etl"}, {"client_id": ""}, {"principal": "alone"}):
        node.ask(**who, **asked)

    def shown(bucket: str, quota: str, observed: float, remaining: float) -> dict[str, Any]:
        numbers = {"observed": observed, "remaining": remaining, "tokens": None}
        return {"bucket": bucket, "quota": quota, **numbers, **NOT_OF_IDS}

    pair = "user=a,client-id=etl"
    both = [shown(pair, "request_rate", 2, 980), shown(pair, "producer_byte_rate", 50, 9_500)]
    assert node.show("client-id=etl,user=a", at_ms=1_000) == both
    assert node.show(pair, quota="producer_byte_rate", at_ms=1_000) == both[1:]
    assert node.show(pair, quota="producer_ids_rate", at_ms=1_000) == []
    assert node.show("client-id=", at_ms=1_000) == [shown("client-id=", "request_rate", 2, 80)]
    assert node.show("user=alone", at_ms=1_000) == [shown("user=alone", "request_rate", 2, 30)]
    assert node.show("user=a", at_ms=1_000) == []  # no quota charges this bucket
    # a user with a quota has that bucket with any client too
    assert [one["quota"] for one in node.show("user=alone,client-id=etl")] == ["producer_byte_rate"]


def test_a_token_bucket_in_debt(by_the_caller: Node):
    node = by_the_caller
    node.service.put("user=owing", controller_mutation_rate={"limit": 2, "burst": 10})
    node.ask(principal="owing", usage={"mutations": 25}, mode="record", at_ms=1_000)
    owing = {"bucket": "user=owing", "quota": "controller_mutation_rate", **NOT_OF_IDS}
    assert node.one("user=owing", at_ms=1_000) == owing | {"observed": 25, "remaining": -15, "tokens": -15}
    assert node.one("user=owing", at_ms=2_500) == owing | {"observed": 22, "remaining": -12, "tokens": -12}
    assert node.one("user=owing", at_ms=99_000) == owing | {"observed": 0, "remaining": 10, "tokens": 10}


def test_addresses_and_networks(by_the_caller: Node):
    node = by_the_caller
    node.service.put("ip=*", connection_creation_rate=100)
    node.service.put("ip=2001:db8::", connection_creation_rate=7)
    for ip in ("10.0.0.7", "::ffff:10.0.0.7", "2001:db8::1", "2001:db8::2", "2001:db8::"):
        node.ask(ip=ip, usage={"connections": 10}, mode="record", at_ms=1_000)

    def seen(bucket: str) -> list[tuple[str, float]]:
        return [(one["bucket"], one["observed"]) for one in node.show(bucket, at_ms=1_000)]

    assert seen("ip=10.0.0.7") == seen("ip=::ffff:10.0.0.7") == [("ip=10.0.0.7", 2)]
    assert seen("ip=2001:db8::/64") == [("ip=2001%3Adb8%3A%3A%2F64", 2)]
    assert seen("ip=2001:db8:0::7/64") == seen("ip=2001%3Adb8%3A%3A%2F64") == seen("ip=2001:db8::/64")
    assert seen("ip=2001:db8::") == [("ip=2001%3Adb8%3A%3A", 1)]  # has a quota of its own
    assert seen("ip=2001:db8::1") == []  # shares the bucket of its network


def test_brokers_and_listeners(by_the_caller: Node):
    node = by_the_caller
    node.service.put("broker=*", max_connection_creation_rate=100)
    node.service.put("listener=EXTERNAL", max_connection_creation_rate=100)  # of scope broker by default
    node.service.put("broker=2,listener=EXTERNAL", max_connection_creation_rate=100)
    for broker, connections in (("1", 10), ("2", 20), (None, 30)):
        usage = {"connections": connections}
        node.ask(broker=broker, listener="EXTERNAL", usage=usage, mode="record", at_ms=1_000)

    def seen(bucket: str) -> list[float]:
        shown = node.show(bucket, at_ms=1_000)
        assert all(one["bucket"] == bucket for one in shown)
        return [one["observed"] for one in shown]

    assert seen("listener=EXTERNAL;broker=1") == [1]
    assert seen("broker=2,listener=EXTERNAL") == [2]
    assert seen("listener=EXTERNAL") == [3]
    assert (seen("broker=1"), seen("broker=2"), seen("broker=3")) == ([1], [2], [0])
    assert seen("listener=EXTERNAL;broker=2") == seen("broker=1,listener=EXTERNAL") == []


def test_bucket_is_shown_at_the_newest_time_seen_without_at_ms(by_the_caller: Node):
    node = by_the_caller
    node.service.put("user=late", controller_mutation_rate={"limit": 1, "burst": 100})
    node.ask(principal="late", usage={"mutations": 50}, at_ms=1_000_000)
    assert node.one("user=late")["tokens"] == 50
    assert node.one("user=late", at_ms=1_010_000)["tokens"] == 60
    assert node.one("user=late")["tokens"] == 50  # reading does not move the clock
    node.ask(principal="another", usage={"mutations": 1}, at_ms=1_020_000)
    assert node.one("user=late")["tokens"] == 70


def test_shown_bucket_equals_the_detail_of_a_peek(nodes: tuple[Node, Node]):
    node, other = nodes
    node.service.put("user=peeked", request_rate=50, producer_ids_rate=9, controller_mutation_rate=4)
    usage = {"requests": 30, "producer_ids": [1, 2, 3], "mutations": 40}
    node.ask(principal="peeked", usage=usage)
    nothing = {"requests": 0, "producer_ids": [], "mutations": 0}

    def peeked() -> dict[str, tuple[float, float]]:
        decision = node.ask(principal="peeked", usage=nothing, mode="peek", detail=True)
        return {one["quota"]: (one["observed"], one["remaining"]) for one in decision["quotas"]}

    def follows() -> bool:
        return len(other.show("user=peeked")) == 3

    eventually(follows)
    before, shown, after = peeked(), other.show("user=peeked"), peeked()
    assert [one["quota"] for one in shown] == list(before)
    for one in shown:  # time passes between the three calls, in which the numbers can only recover
        (most, least), (fewest, highest) = before[one["quota"]], after[one["quota"]]
        assert fewest <= one["observed"] <= most
        assert least <= one["remaining"] <= highest


# Reading changes nothing


def test_reading_changes_nothing(nodes: tuple[Node, Node]):
    node, _ = nodes
    quotas = {"request_rate": 50, "producer_ids_rate": 9, "controller_mutation_rate": 4}
    node.service.put("user=watched", **quotas)
    node.service.put("user=unknown", **quotas)
    node.ask(principal="watched", usage={"requests": 30, "producer_ids": [1, 2], "mutations": 8})
    with redis.Redis.from_url(node.service.store_url) as store:

        def stored() -> dict[Any, Any]:
            keys: Any = store.keys("*watched*")
            return {key: (store.dump(key), store.pexpiretime(key)) for key in keys}

        before = stored()
        assert len(before) == 3
        metrics = node.service.http.get("/metrics").text
        for _ in range(5):
            assert len(node.show("user=watched")) == 3
            assert len(node.show("user=unknown")) == 3
        assert stored() == before
        assert store.keys("*unknown*") == []
    counted = [line for line in metrics.splitlines() if line.startswith("quotagate_decisions_total")]
    assert counted
    assert set(counted) <= set(node.service.http.get("/metrics").text.splitlines())


# Resets


def test_other_node_admits_at_once_after_a_reset(nodes: tuple[Node, Node]):
    one, other = nodes
    one.service.put(
        "user=reset",
        producer_ids_rate=2,
        controller_mutation_rate={"limit": 0.001, "burst": 5},
        request_rate={"limit": 1, "enforcement": "deny"},
    )
    eventually(lambda: len(other.show("user=reset")) == 3)
    spent = {"producer_ids": [1, 2], "mutations": 5, "requests": 10}
    assert one.ask(principal="reset", usage=spent)["decision"] == "admit"
    more = {"producer_ids": [3, 4], "mutations": 5, "requests": 10}
    for usage in ({name: usage} for name, usage in more.items()):
        assert other.ask(principal="reset", usage=usage)["decision"] == "throttle"
    one.reset(bucket="user=reset")
    assert other.ask(principal="reset", usage=more, mode="peek")["decision"] == "admit"
    shown = {found["quota"]: found for found in other.show("user=reset")}
    assert {name: found["observed"] for name, found in shown.items()} == dict.fromkeys(shown, 0)
    assert shown["controller_mutation_rate"]["tokens"] == 5
    assert [shown["producer_ids_rate"][name] for name in ("layers", "fill", "remembered_ids")] == [0, 0, 0]
    # the ids seen before are unseen again, and too many together with two new ones
    assert (
        other.ask(principal="reset", usage={"producer_ids": [1, 3, 4]}, mode="peek")["decision"] == "reject"
    )
    assert other.ask(principal="reset", usage=more)["decision"] == "admit"


def test_reset_of_one_quota_affects_no_other_bucket(nodes: tuple[Node, Node]):
    one, _ = nodes
    for principal in ("first", "second"):
        limits = {"producer_ids_rate": 2, "controller_mutation_rate": {"limit": 0.001, "burst": 5}}
        one.service.put(f"user={principal}", **limits)
        assert one.ask(principal=principal, usage={"producer_ids": [1, 2], "mutations": 5})["charged"]
    one.reset(bucket="user=first", quota="controller_mutation_rate")
    assert [found["observed"] for found in one.show("user=first")] == [2, 0]
    ids, mutations = one.show("user=second")
    assert ids["remaining"] == 0
    assert mutations["tokens"] < 1
    logged = [json.loads(line) for line in one.service.logged().splitlines() if "a bucket was reset" in line]
    assert (logged[-1]["bucket"], logged[-1]["quotas"]) == ("user=first", ["controller_mutation_rate"])
    assert logged[-1]["who"] == "admin"
    assert ADMIN_KEY not in one.service.logged()


def test_bucket_without_state_can_be_reset(nodes: tuple[Node, Node]):
    one, _ = nodes
    one.service.put("user=quiet", request_rate=5)
    one.reset(bucket="user=quiet")
    one.reset(bucket="user=quiet", quota="producer_ids_rate")
    one.reset(bucket="listener=NOWHERE;broker=9")


def test_answers_kept_for_retries_survive_a_reset(nodes: tuple[Node, Node]):
    one, _ = nodes
    one.service.put("user=retrying", controller_mutation_rate={"limit": 0.001, "burst": 5})
    ask = {"principal": "retrying", "usage": {"mutations": 5}, "id": "first"}
    answer = one.ask(**ask)
    one.reset(bucket="user=retrying")
    assert one.ask(**ask) == answer
    assert one.one("user=retrying")["tokens"] == 5


def test_a_key_is_needed(nodes: tuple[Node, Node]):
    url = nodes[0].service.url
    assert httpx.get(f"{url}/v1/buckets?bucket=user=alice", timeout=60).status_code == 401
    body = {"bucket": "user=alice"}
    assert httpx.post(f"{url}/v1/buckets:reset", json=body, timeout=60).status_code == 401


# The store is away


@pytest.mark.parametrize("hung", [False, True], ids=["killed", "hung"])
def test_nothing_is_shown_or_reset_while_the_store_is_away(hung: bool):
    with server("valkey", "--appendonly", "yes") as store, running(store_url=store.url) as service:
        node = Node(service)
        node.service.put(
            "user=kept", producer_ids_rate=5, controller_mutation_rate={"limit": 1e-6, "burst": 9}
        )
        eventually(lambda: node.ask(principal="kept", usage={"producer_ids": [1], "mutations": 4})["charged"])
        before = node.show("user=kept")
        if hung:
            store.hold()
        else:
            store.kill()
        show = service.http.get("/v1/buckets?bucket=user=kept")  # this waits for a hung store
        reset = service.http.post("/v1/buckets:reset", json={"bucket": "user=kept"})  # this does not wait
        for answer in (show, reset):
            assert answer.status_code == 503, answer.text
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.headers["retry-after"] == "1"
            assert "The store does not answer (" in answer.json()["detail"]
        wrong = service.http.get("/v1/buckets?bucket=user=*")
        assert wrong.status_code == 422
        if hung:
            store.go_on()
        else:
            store.start()
            store.until_it_answers()
        eventually(lambda: service.http.get("/v1/buckets?bucket=user=kept").is_success)
        after = node.show("user=kept")
        assert [one["remembered_ids"] for one in after] == [one["remembered_ids"] for one in before]
        assert [one["observed"] for one in after] == pytest.approx(
            [one["observed"] for one in before], abs=0.01
        )
        node.reset(bucket="user=kept")
        assert [one["observed"] for one in node.show("user=kept")] == [0, 0]
