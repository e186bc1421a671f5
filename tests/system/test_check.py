"""/v1/check of a real node with a real store: the exact answers that a gateway gets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests import stores
from tests.service import Service, eventually, running

PRINCIPAL, CLIENT, IP = "X-Quotagate-Principal", "X-Quotagate-Client-Id", "X-Quotagate-IP"


@pytest.fixture(scope="module")
def timed() -> Iterator[Service]:
    """A node under the caller's clock, so that all numbers are predictable."""
    with running(environment={"QUOTAGATE_CLOCK": "caller"}) as node:
        yield node


@pytest.fixture(scope="module")
def node() -> Iterator[Service]:
    """A node with default settings."""
    with running() as node:
        yield node


def check(node: Service, query: str = "", *headers: tuple[str, str], key: bool = False) -> httpx.Response:
    """The answer to a gateway on this machine."""
    sent = [*headers, ("Authorization", f"Bearer {node.admin_key}")] if key else list(headers)
    with httpx.Client(trust_env=False, timeout=60) as http:
        return http.get(f"{node.url}/v1/check{query}", headers=sent)


def at(node: Service, at_ms: int, principal: str, query: str = "", **headers: str) -> httpx.Response:
    """The answer for a principal at a given time."""
    named = [(name.replace("_", "-"), value) for name, value in headers.items()]
    return check(node, f"?at_ms={at_ms}{query}", (PRINCIPAL, principal), *named)


def limits(answer: httpx.Response) -> tuple[str | None, str | None]:
    return answer.headers.get("RateLimit-Policy"), answer.headers.get("RateLimit")


def admitted(answer: httpx.Response) -> httpx.Response:
    assert (answer.status_code, answer.json()["decision"]) == (200, "admit"), answer.text
    assert answer.headers["X-Throttle-Ms"] == "0"
    assert "Retry-After" not in answer.headers
    return answer


def throttled(answer: httpx.Response, status: int = 429) -> int:
    """The wait in ms of a throttled request, which must agree with its headers."""
    assert (answer.status_code, answer.json()["decision"]) == (status, "throttle"), answer.text
    wait: int = answer.json()["throttle_ms"]
    assert wait >= 1
    assert answer.headers["X-Throttle-Ms"] == str(wait)
    assert answer.headers["Retry-After"] == str(-(-wait // 1000))
    return wait


def rejected(answer: httpx.Response, status: int = 429) -> dict[str, Any]:
    """The quota that rejected a request."""
    assert (answer.status_code, answer.json()["decision"]) == (status, "reject"), answer.text
    assert answer.headers["X-Throttle-Ms"] == "0"
    assert "Retry-After" not in answer.headers
    by: dict[str, Any] = answer.json()["limited_by"]
    return by


# The numbers


def test_rate_is_counted_down_then_refused_and_free_after_the_stated_wait(timed: Service):
    """5 a second over 10 samples of a second: 50 requests, and no more until the wait is over."""
    timed.put("user=rate", request_rate=5)
    policy = '"request_rate";q=50;w=10'
    assert limits(admitted(at(timed, 0, "rate"))) == (policy, '"request_rate";r=49;t=10')
    assert limits(admitted(at(timed, 0, "rate", "&requests=20"))) == (policy, '"request_rate";r=29;t=10')
    assert limits(admitted(at(timed, 0, "rate", "&requests=29"))) == (policy, '"request_rate";r=0;t=10')
    refused = at(timed, 1, "rate")
    wait = throttled(refused)
    assert limits(refused) == (policy, f'"request_rate";r=0;t={-(-wait // 1000)}')
    assert refused.json() == {
        "decision": "throttle",
        "throttle_ms": wait,
        "charged": False,
        "applied": 1,
        "source": "store",
        "limited_by": {"quota": "request_rate", "entity": "user=rate", "bucket": "user=rate"},
    }
    assert throttled(at(timed, wait, "rate")) == 1
    admitted(at(timed, 1 + wait, "rate"))


def test_refusal_can_be_403_for_nginx(timed: Service):
    timed.put("user=nginx", request_rate=1)
    admitted(at(timed, 0, "nginx", "&requests=10&deny_status=403"))
    throttled(at(timed, 0, "nginx", "&deny_status=403"), 403)
    throttled(at(timed, 0, "nginx", "&deny_status=429"), 429)
    assert rejected(at(timed, 0, "nginx", "&requests=11&deny_status=403"), 403)["reason"] == "too_large"


def test_usage_above_the_bucket_size_is_rejected(timed: Service):
    timed.put("user=large", request_rate=5)
    refused = at(timed, 0, "large", "&requests=51")
    assert rejected(refused) == {
        "quota": "request_rate",
        "entity": "user=large",
        "bucket": "user=large",
        "reason": "too_large",
        "largest": 50,
    }
    assert limits(refused) == ('"request_rate";q=50;w=10', '"request_rate";r=50;t=10')
    timed.put("user=none", request_rate=0)
    refused = at(timed, 0, "none")
    assert rejected(refused)["largest"] == 0
    assert limits(refused) == ('"request_rate";q=0;w=10', '"request_rate";r=0;t=10')


def test_each_usage_has_its_quota_and_its_unit(timed: Service):
    timed.put(
        "user=units",
        request_percentage=200,
        producer_byte_rate={"limit": 1_000, "samples": 6, "sample_ms": 500},
        consumer_byte_rate=2_000,
        controller_mutation_rate={"limit": 0.5, "burst": 20},
    )
    asked = "&request_time_ms=100&produce_bytes=0.5&fetch_bytes=20000&mutations=3"
    policy, limit = limits(admitted(at(timed, 0, "units", asked)))
    assert (policy or "").split(", ") == [
        '"request_percentage";q=2000;w=10',
        '"producer_byte_rate";q=2500;w=2',
        '"consumer_byte_rate";q=20000;w=10',
        '"controller_mutation_rate";q=20;w=40',
    ]
    assert (limit or "").split(", ") == [
        '"request_percentage";r=1990;t=10',
        '"producer_byte_rate";r=2499;t=2',
        '"consumer_byte_rate";r=0;t=10',
        '"controller_mutation_rate";r=17;t=40',
    ]
    refused = at(timed, 0, "units", "&mutations=18")
    assert throttled(refused) == 2_000  # one token is missing, and two seconds refill one
    assert limits(refused)[1] == '"controller_mutation_rate";r=17;t=2'
    admitted(at(timed, 2_000, "units", "&mutations=18"))


def test_delaying_quotas_are_decided_as_deny_and_one_sample_as_two(timed: Service):
    timed.put("user=one", request_rate={"limit": 3, "samples": 1, "sample_ms": 2_000})
    assert timed.ask(at_ms=0, principal="one", usage={"requests": 0})["decision"] == "admit"
    assert limits(admitted(at(timed, 0, "one", "&requests=6")))[0] == '"request_rate";q=6;w=2'
    throttled(at(timed, 0, "one"))
    assert timed.ask(at_ms=0, principal="one", usage={"requests": 1})["decision"] == "delay"


def test_shadow_quota_is_shown_but_refuses_nothing(timed: Service):
    timed.put("user=shadow", request_rate={"limit": 1, "shadow": True})
    for left in (5, 0, 0):
        _, limit = limits(admitted(at(timed, 0, "shadow", "&requests=5")))
        assert limit == f'"request_rate";r={left};t=10'


def test_principal_without_a_quota_is_admitted_without_a_limit(timed: Service):
    answer = admitted(at(timed, 0, "nobody"))
    assert limits(answer) == (None, None)
    assert (answer.json()["applied"], answer.json()["source"]) == (0, "local")


def test_newest_time_seen_by_the_node_applies_without_at_ms(timed: Service):
    timed.put("user=late", request_rate=1)
    newest = 10**9
    admitted(at(timed, newest, "late", "&requests=10"))
    throttled(check(timed, "", (PRINCIPAL, "late")))
    timed.ask(at_ms=newest + 10**6, principal="somebody else", usage={"requests": 1})
    admitted(check(timed, "", (PRINCIPAL, "late")))


# Shared buckets


def test_principals_have_separate_buckets_and_clients_of_one_share(timed: Service):
    timed.put("user=*", request_rate=1)
    admitted(at(timed, 0, "anna", "&requests=10"))
    admitted(at(timed, 0, "bert", "&requests=10"))
    throttled(at(timed, 0, "anna", X_Quotagate_Client_Id="other"))
    timed.put("user=pair,client-id=*", request_rate=1)
    admitted(at(timed, 0, "pair", "&requests=10", X_Quotagate_Client_Id="one"))
    admitted(at(timed, 0, "pair", "&requests=10", X_Quotagate_Client_Id=""))
    throttled(at(timed, 0, "pair", X_Quotagate_Client_Id=""))
    assert timed.http.delete("/v1/quotas/user=*").status_code == 204


def test_addresses_have_separate_buckets_and_those_of_one_ipv6_network_share(timed: Service):
    timed.put("ip=*", request_rate=1)
    for first, same, other in (
        ("192.0.2.1", "::ffff:192.0.2.1", "192.0.2.2"),
        ("2001:db8::1", "2001:DB8:0:0:ffff::9", "2001:db8:0:1::1"),
    ):
        admitted(at(timed, 0, "", "&requests=10", X_Quotagate_IP=first))
        throttled(at(timed, 0, "", X_Quotagate_IP=same))
        answer = admitted(at(timed, 0, "", X_Quotagate_IP=other))
        assert limits(answer) == ('"request_rate";q=10;w=10', '"request_rate";r=9;t=10')
    timed.put("user=both", request_rate=2)
    answer = admitted(at(timed, 0, "both", "&requests=4", X_Quotagate_IP="192.0.2.3"))
    assert limits(answer) == (
        '"request_rate";q=20;w=10, "request_rate_ip";q=10;w=10',
        '"request_rate";r=16;t=10, "request_rate_ip";r=6;t=10',
    )
    refused = at(timed, 0, "both", "&requests=7", X_Quotagate_IP="192.0.2.3")
    seconds = -(-throttled(refused) // 1000)
    assert refused.json()["limited_by"]["entity"] == "ip=*"
    assert limits(refused)[1] == f'"request_rate";r=16;t={seconds}, "request_rate_ip";r=6;t={seconds}'
    admitted(at(timed, 0, "both", "&requests=6", X_Quotagate_IP="192.0.2.3"))


def test_connections_are_counted_for_broker_listener_and_address(timed: Service):
    timed.put("broker=*", max_connection_creation_rate=4)
    timed.put("listener=A", max_connection_creation_rate=2)
    timed.put("ip=198.51.100.1", connection_creation_rate=1)
    asked = "&connections=5&broker=7&listener=A"
    answer = admitted(at(timed, 0, "", asked, X_Quotagate_IP="198.51.100.1"))
    assert (limits(answer)[1] or "").split(", ") == [
        '"connection_creation_rate";r=5;t=10',
        '"max_connection_creation_rate";r=15;t=10',
        '"max_connection_creation_rate_broker";r=35;t=10',
    ]


# Access, and the principal of a request


def test_duplicate_principal_headers_are_refused(node: Service):
    for header in (PRINCIPAL, CLIENT, IP):
        answer = check(node, "", (header, "192.0.2.1"), (header.lower(), "192.0.2.1"))
        assert (answer.status_code, answer.headers["X-Throttle-Ms"]) == (400, "0")
        assert answer.json()["errors"] == [{"field": f"/{header}", "message": "is duplicated"}]
    forwarded = check(node, "", ("X-Forwarded-For", "6.6.6.6"), ("X-Forwarded-For", "not read"))
    assert forwarded.status_code == 200


def test_by_the_stores_clock_it_throttles_too(node: Service):
    node.put("user=storm", request_rate=1)
    answers = [check(node, "?requests=5", (PRINCIPAL, "storm")) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    wait = throttled(check(node, "?requests=5", (PRINCIPAL, "storm")))
    assert wait <= 11_000
    assert check(node, "?at_ms=1").json()["errors"] == [{"field": "/at_ms", "message": "is unknown"}]


def test_key_is_needed_outside_open_networks():
    with running(environment={"QUOTAGATE_OPEN_TO": "10.0.0.0/8"}) as node:
        forged = ("X-Forwarded-For", "10.0.0.1"), ("X-Real-IP", "10.0.0.1"), (IP, "10.0.0.1")
        refused = check(node, "", *forged)
        assert (refused.status_code, "X-Throttle-Ms" in refused.headers) == (401, False)
        assert check(node, "?deny_status=403").status_code == 401
        assert check(node, key=True).status_code == 200
        assert check(node, "", ("Authorization", "Bearer wrong")).status_code == 401


def test_address_behind_trusted_proxies_is_the_rightmost_untrusted_one():
    environment = {
        "QUOTAGATE_TRUSTED_PROXIES": "10.0.0.0/8, 2001:db8:ffff::/48",
        "QUOTAGATE_CHECK_PRINCIPAL_HEADER": "X-User",
    }
    with running(environment=environment) as node:
        node.put("ip=*", request_rate=1)
        node.put("user=*", request_rate=2)
        hops = ("X-Forwarded-For", "203.0.113.9, 10.0.0.1"), ("X-Forwarded-For", "2001:db8:ffff::1")
        forged = (IP, "6.6.6.6"), (PRINCIPAL, "mallory"), ("X-User", "alice")
        first = admitted(check(node, "?requests=10", *forged, *hops))
        assert limits(first)[0] == '"request_rate";q=20;w=10, "request_rate_ip";q=10;w=10'
        again = check(node, "?requests=10", ("X-Forwarded-For", "6.6.6.6, 203.0.113.9,10.0.0.2"))
        throttled(again)
        assert again.json()["limited_by"]["bucket"] == "ip=203.0.113.9"
        other = admitted(check(node, "?requests=10", ("X-Forwarded-For", "203.0.113.9, 203.0.113.10")))
        assert other.json()["applied"] == 1
        inside = admitted(check(node, "?requests=10", ("X-Forwarded-For", "10.0.0.1"), (IP, "203.0.113.9")))
        assert inside.json()["applied"] == 0
        hidden = check(node, "", ("X-Forwarded-For", "203.0.113.11, unknown, 10.0.0.1"))
        assert hidden.status_code == 400
        assert hidden.json()["errors"][0]["field"] == "/X-Forwarded-For"


# Without the store


def test_each_quota_answers_by_its_policy_without_the_store(tmp_path):
    store = stores.Server("valkey", tmp_path)
    store.start()
    store.until_it_answers()
    try:
        with running(store_url=store.url) as node:
            node.put("user=open", request_rate=5)
            node.put("user=strict", request_rate={"limit": 5, "on_store_failure": "throttle"})
            node.put("user=none", request_rate=0)
            store.kill()
            open_ = admitted(check(node, "", (PRINCIPAL, "open")))
            assert (open_.json()["source"], open_.json()["charged"]) == ("fallback", False)
            assert limits(open_) == ('"request_rate";q=50;w=10', None)
            strict = check(node, "", (PRINCIPAL, "strict"))
            assert throttled(strict) == 1_000
            assert strict.json()["limited_by"]["reason"] == "store_failure"
            assert limits(strict) == ('"request_rate";q=50;w=10', None)
            throttled(check(node, "?deny_status=403", (PRINCIPAL, "strict")), 403)
            assert rejected(check(node, "", (PRINCIPAL, "none")))["largest"] == 0
            store.start()
            back = eventually(lambda: "RateLimit" in check(node, "", (PRINCIPAL, "open")).headers)
            assert back
    finally:
        store.kill()
