"""The rate-limit service for Envoy, asked over gRPC, on a real node with a real store."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import pytest
import redis

from app.envoy.server import SERVICE
from tests.decision_log import worker
from tests.envoy.calls import Client, Descriptor, Entries, connected, descriptor, request, serving
from tests.service import Service, eventually
from tests.system.test_log_contents import until


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[Service, int]]:
    with serving(environment={"QUOTAGATE_LOG": "all"}) as found:
        yield found


@pytest.fixture
def node(started: tuple[Service, int]) -> Iterator[Service]:
    """A node without quotas and counts."""
    service, _ = started
    with redis.Redis.from_url(service.store_url) as store:
        store.flushall()
    yield service
    for each in service.http.get("/v1/quotas").json()["quotas"]:
        service.http.delete(f"/v1/quotas/{each['entity']}").raise_for_status()


@pytest.fixture
def client(started: tuple[Service, int], node: Service) -> Iterator[Client]:
    with connected(started[1]) as found:
        yield found


def a_minute(limit: int, **fields: object) -> dict[str, object]:
    """A limit of so many a minute, which may all come at once."""
    return {"limit": limit / 60, "samples": 11, "sample_ms": 6_000, "enforcement": "deny", **fields}


def test_limit_is_enforced_with_the_headers_of_a_check(node: Service, client: Client):
    node.put("user=alice", request_rate=a_minute(2))
    first = client.ask({"principal": "alice"})
    assert (first.overall_code, len(first.statuses)) == (1, 1)
    status = first.statuses[0]
    assert (status.current_limit.requests_per_unit, status.current_limit.unit) == (2, 2)
    assert (status.limit_remaining, status.duration_until_reset.seconds) == (1, 60)
    assert not first.response_headers_to_add
    assert client.code({"principal": "alice"}) == "OK"
    refused = client.ask({"principal": "alice"})
    assert (refused.overall_code, refused.statuses[0].code) == (2, 2)
    headers = {header.key: header.value for header in refused.response_headers_to_add}
    assert headers["ratelimit-policy"] == '"request_rate";q=2;w=60'
    wait_s = int(headers["retry-after"])
    assert 0 < wait_s <= 66
    assert headers["ratelimit"] == f'"request_rate";r=0;t={wait_s}'
    assert 0 < int(headers["x-throttle-ms"]) <= wait_s * 1000
    assert refused.statuses[0].duration_until_reset.ToMilliseconds() == int(headers["x-throttle-ms"])


def test_hits_are_the_descriptors_own_before_the_requests(node: Service, client: Client):
    node.put("user=*", request_rate=a_minute(10))

    def left(asked: Descriptor, hits: int = 0) -> list[int]:
        return [status.limit_remaining for status in client.ask(asked, hits=hits).statuses]

    assert left({"principal": "a"}) == [9]
    assert left({"principal": "a"}, hits=3) == [6]
    assert left(descriptor({"principal": "a"}, hits=4), hits=1) == [2]
    assert left(descriptor({"principal": "a"}, hits=0), hits=1) == [2]
    assert client.code({"principal": "a"}, hits=3) == "OVER_LIMIT"
    assert left({"principal": "a"}, hits=2) == [0]
    assert client.code(descriptor({"principal": "a"}, hits=0)) == "OK"


def test_too_large_is_refused_for_as_long_as_the_window(node: Service, client: Client):
    node.put("user=alice", request_rate=a_minute(2))
    refused = client.ask({"principal": "alice"}, hits=3)
    assert refused.overall_code == 2
    assert refused.statuses[0].duration_until_reset.seconds == 60
    assert "retry-after" not in {header.key for header in refused.response_headers_to_add}


def test_usage_is_what_the_descriptor_says(node: Service, client: Client):
    node.put(
        "user=alice", consumer_byte_rate={"limit": 100, "samples": 11, "sample_ms": 1000}, request_rate=0
    )
    asked = {"principal": "alice", "usage": "fetch_bytes"}
    status = client.ask(asked, hits=400).statuses[0]
    assert (status.code, status.limit_remaining) == (1, 600)
    assert (status.current_limit.requests_per_unit, status.current_limit.unit) == (1000, 0)
    assert client.code(asked, hits=900) == "OVER_LIMIT"


def test_several_descriptors_are_all_or_nothing(node: Service, client: Client):
    node.put("user=rich", request_rate=a_minute(10))
    node.put("user=poor", request_rate=a_minute(1))
    rich, poor = {"principal": "rich"}, {"principal": "poor"}
    assert client.codes(rich, poor) == ["OK", "OK"]
    for _ in range(3):
        assert client.codes(rich, poor) == ["OK", "OVER_LIMIT"]
    answer = client.ask(rich)
    assert answer.statuses[0].limit_remaining == 8


def test_several_quotas_of_one_descriptor_are_all_or_nothing(node: Service, client: Client):
    node.put("user=alice", request_rate=a_minute(10))
    node.put("ip=*", request_rate=a_minute(1))
    asked = {"principal": "alice", "remote_address": "10.0.0.7"}
    assert client.code(asked) == "OK"
    refused = client.ask(asked)
    assert refused.overall_code == 2
    headers = {header.key: header.value for header in refused.response_headers_to_add}
    assert headers["ratelimit-policy"] == '"request_rate";q=10;w=60, "request_rate_ip";q=1;w=60'
    assert client.ask({"principal": "alice"}).statuses[0].limit_remaining == 8


def test_a_bucket_of_several_descriptors_is_charged_once_with_the_largest_usage(
    node: Service, client: Client
):
    node.put("user=alice", request_rate=a_minute(10))
    asked = [
        descriptor({"principal": "alice", "client_id": each}, hits) for each, hits in (("a", 2), ("b", 5))
    ]
    statuses = client.ask(*asked, {"principal": "alice"}).statuses
    assert [status.limit_remaining for status in statuses] == [5, 5, 5]
    assert client.codes(*asked) == ["OK", "OK"]
    assert client.codes(*asked) == ["OVER_LIMIT", "OVER_LIMIT"]


def test_headers_are_those_of_the_descriptor_that_waits_longest(node: Service, client: Client):
    node.put("user=soon", request_rate={"limit": 10, "samples": 2, "sample_ms": 100, "enforcement": "deny"})
    node.put("user=late", request_rate=a_minute(1))
    asked = [{"principal": "soon"}, {"principal": "late"}]
    assert client.codes(*asked) == ["OK", "OK"]
    headers = {header.key: header.value for header in client.ask(*asked).response_headers_to_add}
    assert headers["ratelimit-policy"] == '"request_rate";q=1;w=60'


def test_shadow_never_refuses(node: Service, client: Client):
    node.put("user=alice", request_rate=a_minute(1, shadow=True))
    assert [client.code({"principal": "alice"}) for _ in range(3)] == ["OK"] * 3
    node.put("user=bob", request_rate=a_minute(5))
    assert client.codes({"principal": "alice"}, {"principal": "bob"}) == ["OK", "OK"]
    shadowed = 'quotagate_shadow_decisions_total{decision="throttle",quota="request_rate"} '
    assert [line for line in metrics(node) if line.startswith(shadowed)]


def test_what_names_nothing_or_has_no_quota_is_unlimited(node: Service, client: Client):
    node.put("user=alice", request_rate=a_minute(5))
    before = metric(node, "quotagate_envoy_unmapped_descriptors_total")
    answer = client.ask({"path": "/"}, {"principal": "bob"}, {"principal": "alice"})
    assert [status.code for status in answer.statuses] == [1, 1, 1]
    assert [status.limit_remaining for status in answer.statuses] == [2**32 - 1, 2**32 - 1, 4]
    assert metric(node, "quotagate_envoy_unmapped_descriptors_total") == before + 1
    assert client.code({"path": "/"}) == "OK"


BAD = {
    "domain": (request({"principal": "alice"}, domain=""), "domain: must not be empty"),
    "none": (request(), "descriptors: must be 1 to 32"),
    "many": (request(*[{"principal": "alice"}] * 33), "descriptors: must be 1 to 32"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_have_a_clear_status_are_counted_and_charge_nothing(
    node: Service, client: Client, name: str
):
    asked, why = BAD[name]
    node.put("user=*", request_rate=a_minute(5))
    before = metric(node, 'quotagate_envoy_requests_total{outcome="invalid_argument"}')
    with pytest.raises(grpc.RpcError) as caught:
        client.send(asked)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(why)
    assert metric(node, 'quotagate_envoy_requests_total{outcome="invalid_argument"}') == before + 1
    assert client.ask({"principal": "alice"}).statuses[0].limit_remaining == 4


UNUSABLE: dict[str, Entries] = {
    "no_entries": {},
    "too_many_entries": [("principal", "odd"), *[("path", "/")] * 32],
    "empty_key": {"": "odd"},
    "usage": {"principal": "odd", "usage": "producer_ids"},
    "usage ": [("principal", "odd"), ("usage", b"\xff")],
    "remote_address": {"remote_address": "example.org"},
    "remote_address ": [("remote_address", b"10.0.0.\xff")],
    "remote_address  ": {"remote_address": "10.0.0.7, 10.0.0.8"},
}
"""Descriptors that bind nothing, by their reason in the metric."""


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_descriptor_that_cannot_be_used_matches_nothing_and_the_others_bind(
    node: Service, client: Client, name: str
):
    node.put("user=*", request_rate=a_minute(2))
    node.put("ip=*", request_rate=a_minute(0))
    counted = f'quotagate_envoy_unusable_descriptors_total{{reason="{name.strip()}"}}'
    before = metric(node, counted)
    asked: list[Descriptor] = [UNUSABLE[name], {"principal": "alice"}]
    for asks in (asked, asked[::-1]):
        assert client.code(*asks) == "OK"
    answer = client.ask(*asked)
    assert [(each.code, each.limit_remaining) for each in answer.statuses] == [(1, 2**32 - 1), (2, 0)]
    assert client.code(asked[0]) == "OK"
    assert metric(node, counted) == before + 4


def test_the_parts_of_a_descriptor_that_can_be_used_bind(node: Service, client: Client):
    """A visitor may have sent the unusable parts."""
    node.put("user=alice", request_rate=a_minute(4))
    asked: list[Descriptor] = [
        {"principal": "alice", "remote_address": "unknown"},
        [("principal", "alice"), ("principal", "bob")],
        [("principal", ""), ("principal", "alice")],
        {"principal": "alice", "": "x"},
    ]
    assert [client.ask(each).statuses[0].limit_remaining for each in asked] == [3, 2, 1, 0]
    for reason, times in (("remote_address", 1), ("duplicate_entry", 2), ("empty_key", 1)):
        assert metric(node, f'quotagate_envoy_unusable_descriptors_total{{reason="{reason}"}}') >= times
    node.put("ip=fe80%3A%3A1", request_rate=a_minute(1))
    assert [client.code({"remote_address": "fe80::1%eth0"}) for _ in range(2)] == ["OK", "OVER_LIMIT"]


def test_odd_hits_are_counted_and_a_limit_of_envoy_is_ignored(node: Service, client: Client):
    node.put("user=alice", request_rate=a_minute(5))

    def counted(reason: str) -> float:
        return metric(node, f'quotagate_envoy_unusable_descriptors_total{{reason="{reason}"}}')

    reasons = ("negative_hits", "limit_override", "hits_addend")
    before = [counted(reason) for reason in reasons]
    for hits, left in ((None, 4), (3, 3), (0, 2)):
        negative = descriptor({"principal": "alice"}, hits)
        negative.is_negative_hits = True
        assert client.ask(negative, hits=7).statuses[0].limit_remaining == left
    override = descriptor({"principal": "alice"})
    override.limit.requests_per_unit = 1_000
    assert client.ask(override).statuses[0].limit_remaining == 1
    for hits in (2**53, 2**64 - 1):
        assert client.code(descriptor({"principal": "alice"}, hits)) == "OVER_LIMIT"
    assert client.ask({"principal": "alice"}).statuses[0].limit_remaining == 0
    assert [counted(reason) for reason in reasons] == [before[0] + 3, before[1] + 1, before[2] + 2]


ODD = {
    "long": (b"a" * 600, "sha256:" + sha256(b"a" * 600).hexdigest()),
    "513": ("ä".encode() * 257, "sha256:" + sha256("ä".encode() * 257).hexdigest()),
    "not UTF-8": (b"jos\xe9", "jos%E9"),
    "cut off": (b"\xe2\x82", "%E2%82"),
    "surrogate": (b"\xed\xa0\x80", "%ED%A0%80"),
    "percent": (b"50%\xff", "50%25%FF"),
    "control": (b"a\nb\x00", "a%0Ab%00"),
    "C1": ("\x85".encode(), "%C2%85"),
    "long if spelled": (b"\xff" * 200, "sha256:" + sha256(b"\xff" * 200).hexdigest()),
    "longest": (b"a" * 512, "a" * 512),
    "large": (b"\xfe" * 60_000, "sha256:" + sha256(b"\xfe" * 60_000).hexdigest()),
}
"""Values, and the names that they get."""


@pytest.mark.parametrize("key", ["principal", "client_id"])
@pytest.mark.parametrize("name", ODD)
def test_any_value_is_a_name_with_a_bucket_of_its_own(node: Service, client: Client, key: str, name: str):
    value, spelled = ODD[name]
    entity = {"principal": "user", "client_id": "client-id"}[key]
    node.put(f"{entity}=*", request_rate=a_minute(2))
    asked = [(key, value)]
    assert [client.code(asked) for _ in range(3)] == ["OK", "OK", "OVER_LIMIT"]
    assert [client.code([(key, value + b"x")]) for _ in range(3)] == ["OK", "OK", "OVER_LIMIT"]
    bucket = f"{entity}={quote(spelled, safe='')}"
    (found,) = node.http.get("/v1/buckets", params={"bucket": bucket}).json()["buckets"]
    assert found["remaining"] < 1


def test_bytes_that_are_no_request_are_refused_and_counted(client: Client):
    with pytest.raises(grpc.RpcError) as caught:
        client.send_bytes(b"\xff\xff\xff")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_keys_come_in_the_metadata(started: tuple[Service, int], node: Service):
    made = node.http.post("/v1/keys", json={"name": "g", "scopes": ["decide"], "bound_to": ["user=acme"]})
    key = made.raise_for_status().json()["key"]
    reader = (
        node.http.post("/v1/keys", json={"name": "r", "scopes": ["read"]}).raise_for_status().json()["key"]
    )
    with connected(started[1], key=key) as bound, connected(started[1], key="wrong") as wrong:
        eventually(lambda: refusal(bound, {"principal": "acme"}) is None)
        assert refusal(bound, {"principal": "other"}) is grpc.StatusCode.PERMISSION_DENIED
        assert (
            refusal(bound, {"principal": "acme"}, {"principal": "other"}) is grpc.StatusCode.PERMISSION_DENIED
        )
        assert refusal(wrong, {"principal": "acme"}) is grpc.StatusCode.UNAUTHENTICATED
    with connected(started[1], key=reader) as other:
        assert refusal(other, {"principal": "acme"}) is grpc.StatusCode.PERMISSION_DENIED
    assert metric(node, 'quotagate_envoy_requests_total{outcome="unauthenticated"}') >= 1
    for name in ("g", "r"):
        node.http.delete(f"/v1/keys/{name}").raise_for_status()


def refusal(client: Client, *descriptors: Descriptor) -> grpc.StatusCode | None:
    try:
        client.ask(*descriptors)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return None


def test_health_is_that_of_the_process(client: Client):
    assert client.health() == client.health(SERVICE) == "SERVING"
    with pytest.raises(grpc.RpcError) as caught:
        client.health("another.Service")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_answers_are_counted(node: Service, client: Client):
    node.put("user=alice", request_rate=a_minute(1))
    names = [f'quotagate_envoy_requests_total{{outcome="{outcome}"}}' for outcome in ("ok", "over_limit")]
    before = [metric(node, name) for name in names]
    assert [client.code({"principal": "alice"}) for _ in range(3)] == ["OK", "OVER_LIMIT", "OVER_LIMIT"]
    assert [metric(node, name) for name in names] == [before[0] + 1, before[1] + 2]


def metrics(node: Service) -> list[str]:
    return node.http.get("/metrics").text.splitlines()


def metric(node: Service, name: str) -> float:
    """The value of a metric; 0 if it is absent."""
    found = [line for line in metrics(node) if line.startswith(f"{name} ")]
    return float(found[0].rpartition(" ")[2]) if found else 0.0


def test_log_has_a_row_for_each_descriptor(
    started: tuple[Service, int], node: Service, client: Client, tmp_path: Path
):
    node.put("user=row-rich", request_rate=a_minute(10))
    node.put("user=row-poor", request_rate=a_minute(1))
    node.put("ip=*", request_rate=a_minute(10))
    rich = {"principal": "row-rich", "remote_address": "10.0.0.7"}
    poor = descriptor({"principal": "row-poor", "remote_address": "10.0.0.7"}, hits=1)
    assert client.codes(rich, poor, {"principal": "row-free"}, {"path": "/"}) == ["OK"] * 4
    assert client.codes(rich, poor) == ["OK", "OVER_LIMIT"]
    with worker.inside(node.store_url, tmp_path / "log", limits={"age_s": 0.2}):
        rows = until(tmp_path / "log", lambda rows: len(of_this_test(rows)) >= 5)
    made = [
        (
            row["principal"],
            row["mode"],
            row["decision"],
            row["charged"],
            [v["bucket"] for v in row["verdicts"]],
        )
        for row in of_this_test(rows)
    ]
    assert made == [
        ("row-rich", "admit", "admit", True, ["user=row-rich", "ip=10.0.0.7"]),
        ("row-poor", "admit", "admit", True, ["user=row-poor"]),
        ("row-free", "admit", "admit", True, []),
        ("row-rich", "peek", "admit", False, ["user=row-rich", "ip=10.0.0.7"]),
        ("row-poor", "admit", "throttle", False, ["user=row-poor"]),
    ]


def of_this_test(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The decisions on its own principals; rows of earlier tests may come late."""
    return [row for row in rows if row["kind"] == "decision" and (row["principal"] or "").startswith("row-")]
