"""Leases over HTTP: a real node and store, under the caller's clock."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.http.application import fields
from tests.service import Service, running

NAMES = (f"user-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running(environment={"QUOTAGATE_CLOCK": "caller", "QUOTAGATE_LOG": "denied"}) as service:
        yield service


class Holder:
    """A principal with a quota of its own: 10 bytes a second to fetch, so a window of 100."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.name = next(NAMES)
        service.put(f"user={self.name}", consumer_byte_rate=10)

    def take(self, at: int, wish: float = 1_000, key: str = "", **more: Any) -> dict[str, Any]:
        answer = self.post(at, wish, key, **more)
        assert answer.status_code == 200, answer.text
        leased: dict[str, Any] = answer.json()
        return leased

    def post(self, at: int, wish: float = 1_000, key: str = "", **more: Any) -> httpx.Response:
        ask = {"principal": self.name, "usage": {"fetch_bytes": wish}, "at_ms": 1_000_000 + at}
        body = {"ask": ask, "lease_ms": 1_000} | more
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return self.service.http.post("/v1/leases", json=body, headers=headers)

    def end(self, at: int, lease: str, spent: float | None, key: str = "") -> httpx.Response:
        url = f"/v1/leases/{lease}?at_ms={1_000_000 + at}"
        body = None if spent is None else {"usage": {"fetch_bytes": spent}}
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return self.service.http.request("DELETE", url, json=body, headers=headers)

    def left(self, at: int) -> float:
        usage = {"fetch_bytes": 0}
        ask = {"principal": self.name, "usage": usage, "mode": "peek", "detail": True}
        remaining: float = self.service.ask(**ask, at_ms=1_000_000 + at)["quotas"][0]["remaining"]
        return remaining


@pytest.fixture
def holder(service: Service) -> Holder:
    return Holder(service)


def new_key(service: Service, *scopes: str, **more: Any) -> str:
    body = {"name": next(NAMES), "scopes": [*scopes], **more}
    made = service.http.post("/v1/keys", json=body)
    assert made.status_code == 201, made.text
    key: str = made.json()["key"]
    return key


def test_lease_is_held_settled_on_the_way_and_given_back(holder: Holder):
    first = holder.take(0)
    lease = first.pop("lease")
    assert isinstance(lease, str)
    assert first == {
        "granted": {"fetch_bytes": 50},
        "lease_ms": 1_000,
        "renew_ms": 800,
        "decision": "admit",
        "throttle_ms": 0,
        "limited_by": None,
        "source": "store",
        "settled": [],
    }
    assert holder.left(0) == 50
    second = holder.take(0, 40, settle=[{"lease": lease, "usage": {"fetch_bytes": 20}}])
    assert second["settled"] == [{"lease": lease, "ok": True}]
    assert second["granted"] == {"fetch_bytes": 40}
    assert holder.left(0) == 40
    ended = holder.end(0, second["lease"], 1)
    assert (ended.status_code, ended.json()) == (200, {"lease": second["lease"], "ok": True})
    assert holder.left(0) == 79
    again = holder.take(0, 0, settle=[{"lease": lease, "usage": {"fetch_bytes": 20}}])
    assert again["settled"] == [{"lease": lease, "ok": False}], "it is over"
    assert (again["lease"], again["granted"], again["decision"]) == (None, {}, "admit")
    assert holder.left(0) == 79


def test_lease_that_nobody_settles_counts_as_spent(holder: Holder):
    lease = holder.take(0, 30, lease_ms=500)["lease"]
    assert holder.end(500, lease, 0).json()["ok"] is False
    assert holder.left(500) == pytest.approx(75), "30 of 105"


def test_lease_ended_without_a_body_was_spent(holder: Holder):
    lease = holder.take(0, 30)["lease"]
    assert holder.end(0, lease, None).json()["ok"] is True
    assert holder.left(0) == 70


def test_refused_wish_says_how_long_to_wait(holder: Holder):
    holder.service.ask(principal=holder.name, usage={"fetch_bytes": 100}, at_ms=1_000_000)
    refused = holder.take(0)
    assert (refused["lease"], refused["granted"], refused["decision"]) == (None, {}, "throttle")
    assert refused["throttle_ms"] == 100
    assert refused["limited_by"]["quota"] == "consumer_byte_rate"


def test_wish_without_a_quota_is_granted(service: Service):
    ask = {"principal": next(NAMES), "usage": {"mutations": 5}, "at_ms": 1_000_000}
    leased = service.http.post("/v1/leases", json={"ask": ask, "lease_ms": 10}).json()
    assert (leased["granted"], leased["source"]) == ({"mutations": 5}, "local")
    ended = service.http.request("DELETE", f"/v1/leases/{leased['lease']}")
    assert ended.json()["ok"] is True


def test_leases_of_produce_bytes_are_short(service: Service):
    ask = {"principal": next(NAMES), "usage": {"produce_bytes": 5}, "at_ms": 1_000_000}
    leased = service.http.post("/v1/leases", json={"ask": ask, "lease_ms": 10_000}).json()
    assert (leased["lease_ms"], leased["renew_ms"]) == (1_000, 800)


def test_more_than_granted_is_refused_before_anything_is_settled(holder: Holder):
    lease = holder.take(0, 30)["lease"]
    settle = [
        {"lease": lease, "usage": {"fetch_bytes": 1}},
        {"lease": lease, "usage": {"fetch_bytes": 31, "mutations": 1}},
    ]
    refused = holder.post(0, 30, settle=settle)
    assert fields(refused) == ["/settle/1/usage/mutations", "/settle/1/usage/fetch_bytes"]
    assert fields(holder.end(0, lease, 31)) == ["/usage/fetch_bytes"]
    assert holder.left(0) == 70, "all of it is still held"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"lease_ms": 0}, "/lease_ms"),
        ({"lease_ms": 10_001}, "/lease_ms"),
        ({"ask": {"principal": "a", "usage": {"producer_ids": [1]}, "at_ms": 1}}, "/ask/usage/producer_ids"),
        ({"ask": {"principal": "a", "usage": {}, "at_ms": 1}}, "/ask/usage"),
        ({"ask": {"principal": "a", "usage": {"requests": 1}, "mode": "peek", "at_ms": 1}}, "/ask/mode"),
        ({"ask": {"usage": {"requests": 1}}}, "/ask/at_ms"),
        ({"settle": [{"lease": "", "usage": {}}]}, "/settle/0/lease"),
        ({"more": 1}, "/more"),
    ],
)
def test_what_is_wrong_is_named(holder: Holder, change: dict[str, Any], field: str):
    assert fields(holder.post(0, **change)) == [field]


@pytest.mark.parametrize("body", [b"", b"{", b"[]x", b'{"ask": NaN}'])
def test_body_that_is_no_json_is_refused(service: Service, body: bytes):
    assert fields(service.http.post("/v1/leases", content=body), 400) == []


def test_lease_is_good_for_the_key_that_got_it(holder: Holder):
    mine, other = (new_key(holder.service, "account") for _ in range(2))
    lease = holder.take(0, 30, mine)["lease"]
    assert holder.end(0, lease, 0, other).json()["ok"] is False
    assert holder.end(0, lease[:-2] + "AA", 0, mine).json()["ok"] is False, "a name that was changed"
    assert holder.end(0, lease, 0, mine).json()["ok"] is True


def test_key_made_again_under_the_same_name_does_not_settle_leases_of_the_former_one(holder: Holder):
    http = holder.service.http
    body = {"name": next(NAMES), "scopes": ["account"]}
    former = http.post("/v1/keys", json=body).json()["key"]
    first, second = (holder.take(0, 20, former)["lease"] for _ in range(2))
    rotated = http.post(f"/v1/keys/{body['name']}:rotate").json()["key"]
    assert holder.end(0, first, 0, rotated).json()["ok"] is True, "a rotated key is the same key"
    assert http.delete(f"/v1/keys/{body['name']}").status_code == 204
    again = http.post("/v1/keys", json=body).json()["key"]
    settled = holder.take(0, 0, again, settle=[{"lease": second, "usage": {"fetch_bytes": 0}}])
    assert settled["settled"] == [{"lease": second, "ok": False}]
    assert holder.end(0, second, 0, again).json()["ok"] is False
    assert holder.left(0) == 80, "the units of the revoked key's lease are still held"


def test_lease_needs_the_scope_account(holder: Holder):
    assert holder.post(0, key=new_key(holder.service, "decide")).status_code == 403
    with httpx.Client(base_url=holder.service.url, trust_env=False, timeout=60) as keyless:
        assert keyless.post("/v1/leases", json={}).status_code == 401
        assert keyless.delete("/v1/leases/x").status_code == 401
    assert holder.service.http.get("/v1/leases").status_code == 405


def test_bound_key_gets_leases_of_its_own_buckets_only(service: Service):
    service.put("client-id=etl", consumer_byte_rate=1_000)
    mine = Holder(service)
    key = new_key(service, "account", bound_to=[f"user={mine.name}"])
    assert mine.take(0, 30, key)["granted"] == {"fetch_bytes": 30}
    other = Holder(service)
    assert other.post(0, 30, key).status_code == 403
    shared = {"principal": mine.name, "client_id": "etl", "usage": {"fetch_bytes": 1}, "at_ms": 1_000_000}
    service.http.delete(f"/v1/quotas/user={mine.name}")
    refused = mine.post(0, key=key, ask=shared)
    assert refused.status_code == 403
    assert refused.json()["errors"][0]["field"] == "/ask/client_id"


def test_metrics_count_leases(holder: Holder):
    lease = holder.take(0, 30)["lease"]
    page = holder.service.http.get("/metrics").text
    assert f'quotagate_leased{{entity="user={holder.name}",quota="consumer_byte_rate"}} 30.0' in page
    holder.end(1_000, lease, 0)
    page = holder.service.http.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("quotagate_lease"))
    assert float(values["quotagate_lease_lapsed_units_total"]) >= 30
    for outcome in ("granted", "unknown"):
        assert float(values[f'quotagate_leases_total{{outcome="{outcome}"}}']) >= 1
