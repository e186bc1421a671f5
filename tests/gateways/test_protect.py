"""Answers to visitors of a site behind each gateway, while Quotagate answers."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateways import gateway as gateways
from tests.gateways.conftest import Limit
from tests.gateways.gateway import Gateway, Kind
from tests.ports import free_port
from tests.service import ADMIN_KEY, Service, eventually

FORGED = "203.0.113.66"
"""An address reserved for documentation (RFC 5737), from which no test connects."""


def burst(requests: int) -> dict[str, object]:
    """A quota that admits this many requests, and then one per 1,000 s."""
    return {"limit": 0.001, "algorithm": "token_bucket", "burst": requests}


def seen(answer: httpx.Response) -> dict[str, Any]:
    """The request as the site received it; headers by lower-case name, with repeated lines joined."""
    request: dict[str, Any] = json.loads(answer.content)
    headers: dict[str, str] = {}
    for name, value in request["headers"]:
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return request | {"headers": headers}


def is_throttled(answer: httpx.Response) -> bool:
    """Whether an answer is the gateway's complete 429, and not the site's."""
    if answer.status_code != 429:
        return False
    assert "x-site" not in answer.headers
    assert 1 <= int(answer.headers["retry-after"]) <= 1000
    assert 1 <= int(answer.headers["x-throttle-ms"]) <= 1_000_000
    assert answer.headers["ratelimit"].startswith('"request_rate";r=0;t=')
    assert answer.headers["ratelimit-policy"].startswith('"request_rate";q=')
    assert 0 < len(answer.content) < 500
    return True


# Admitted, throttled


def test_admitted_caller_sees_what_is_left(gateway: Gateway, limit: Limit):
    limit(gateway.kind.entity("alice"), burst(2))
    answers = [gateway.ask("alice", "/a?b=c") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert [answer.headers["ratelimit"] for answer in answers] == [
        '"request_rate";r=1;t=2000',
        '"request_rate";r=0;t=2000',
    ]
    assert {answer.headers["ratelimit-policy"] for answer in answers} == {'"request_rate";q=2;w=2000'}
    assert {answer.headers["x-throttle-ms"] for answer in answers} == {"0"}
    assert {seen(answer)["path"] for answer in answers} == {"/a"}


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_throttled_caller_gets_429_with_retry_after(gateway: Gateway, limit: Limit, method: str):
    limit(gateway.kind.entity("alice"), burst(1))
    assert gateway.ask("alice", method=method).status_code == 200
    assert is_throttled(gateway.ask("alice", method=method))


def test_rejected_caller_gets_429_without_retry_after(gateway: Gateway, limit: Limit):
    limit(gateway.kind.entity("alice"), 0)
    answer = gateway.ask("alice")
    assert answer.status_code == 429
    assert "retry-after" not in answer.headers
    assert answer.headers["x-throttle-ms"] == "0"
    assert answer.headers["ratelimit"].startswith('"request_rate";r=0;')


def test_kafkas_own_rate_is_decided_as_deny(gateway: Gateway, limit: Limit):
    limit(gateway.kind.entity("alice"), {"limit": 0.001, "samples": 2, "sample_ms": 3_600_000})
    statuses = [gateway.ask("alice").status_code for _ in range(6)]
    assert statuses == [200] * 3 + [429] * 3


def test_two_principals_are_counted_apart(gateway: Gateway, limit: Limit):
    limit("user=*", burst(1))
    for person in ("alice", "bob"):
        assert gateway.ask(person).status_code == 200
        assert is_throttled(gateway.ask(person))


def test_an_application_is_counted_by_the_name_it_gives(gateway: Gateway, limit: Limit):
    limit(f"{gateway.kind.entity('alice')},client-id=shop", burst(1))
    limit("client-id=*", 0)
    shop = [("X-Application", "shop")]
    assert gateway.ask("alice", headers=shop).status_code == 200
    assert is_throttled(gateway.ask("alice", headers=shop))
    assert gateway.ask("bob", headers=shop).status_code == 429
    # without a name there is no client-id, not even an empty one or a dash
    assert gateway.ask("alice").status_code == 200


# Addresses


def test_addresses_are_limited_apart(gateway: Gateway, limit: Limit):
    limit("ip=*", burst(1))
    for address in ("127.0.0.2", "127.0.0.3"):
        assert gateway.ask("alice", source=address).status_code == 200
        assert is_throttled(gateway.ask("bob", source=address))


def test_an_ipv6_address_is_limited(gateway: Gateway, limit: Limit):
    limit("ip=%3A%3A1", burst(1))
    assert gateway.ask("alice", source="::1").status_code == 200
    assert is_throttled(gateway.ask("alice", source="::1"))
    assert gateway.ask("alice").status_code == 200


# Headers and names from outside


def test_forged_headers_and_queries_have_no_effect(gateway: Gateway, limit: Limit):
    kind = gateway.kind
    alice = kind.entity("alice")
    for entity in (f"ip={FORGED}", f"{alice},client-id=forged", kind.entity("bob")):
        limit(entity, 0)
    limit(alice, burst(2))
    forged = [
        ("X-Quotagate-Principal", kind.principal.format("bob")),
        ("x-quotagate-principal", ""),
        ("X-Quotagate-Client-Id", "forged"),
        ("X-Quotagate-IP", FORGED),
        ("x-quotagate-ip", "no address"),
        ("X-Forwarded-For", FORGED),
        ("X-Real-IP", FORGED),
        ("Forwarded", f"for={FORGED}"),
        ("RateLimit", '"forged";r=9;t=9'),
        ("X-Throttle-Ms", "9"),
        # a header that Connection names goes no further than the first proxy (RFC 9110, 7.6.1)
        ("Connection", "close, X-Quotagate-Principal, X-Quotagate-IP"),
    ]
    path = "/?requests=0&produce_bytes=0&deny_status=403&listener=forged"
    first, *more = [gateway.ask("alice", path, headers=forged) for _ in range(3)]
    assert first.headers["ratelimit"] == '"request_rate";r=1;t=2000'
    assert [answer.status_code for answer in (first, *more)] == [200, 200, 429]
    assert not [name for name in seen(first)["headers"] if name.startswith("x-quotagate")]


def test_hops_named_by_a_client_are_ignored(gateway: Gateway, limit: Limit):
    limit("ip=127.0.0.2", burst(1))
    limit(f"ip={FORGED}", 0)
    hops = [("X-Forwarded-For", f"10.0.0.1, {FORGED}"), ("X-Forwarded-For", FORGED)]
    answer = gateway.ask("alice", source="127.0.0.2", headers=hops)
    assert answer.status_code == 200
    assert seen(answer)["headers"]["x-forwarded-for"].endswith("127.0.0.2")
    assert is_throttled(gateway.ask("alice", source="127.0.0.2", headers=hops))


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1"])
def test_site_receives_the_address_once(gateway: Gateway, address: str):
    assert seen(gateway.ask("alice", source=address))["headers"]["x-forwarded-for"] == address


def test_credentials_for_the_site_are_never_used_as_a_key(gateway: Gateway, limit: Limit):
    """Quotagate refuses an unknown key, so an answer shows that it received none."""
    own = [("Authorization", "Bearer of-the-site")] if gateway.kind.by_certificate else []
    answer = gateway.ask("alice", headers=own)
    assert answer.status_code == 200
    assert seen(answer)["headers"]["authorization"].startswith("Bearer" if own else "Basic")


def test_caller_without_a_name_is_refused(gateway: Gateway, limit: Limit):
    limit("ip=*", burst(1))
    if gateway.kind.by_certificate:
        with pytest.raises(httpx.TransportError):
            gateway.ask(None)
    else:
        assert gateway.ask(None).status_code == 401
        wrong = gateway.ask(None, headers=[("Authorization", "Basic YWxpY2U6Z3Vlc3NlZA==")])  # alice:guessed
        assert wrong.status_code == 401
        assert wrong.headers["www-authenticate"].startswith("Basic")
        assert "x-throttle-ms" not in wrong.headers
    # and nothing was charged for it
    assert gateway.ask("alice").status_code == 200


def test_invalid_request_is_400_and_not_admitted(gateway: Gateway, limit: Limit):
    answer = gateway.ask("alice", headers=[("X-Application", "x" * 600)])
    assert answer.status_code == 400
    assert "x-site" not in answer.headers
    assert "request is invalid" in answer.text


# The site


@pytest.mark.parametrize("status", [201, 400, 401, 403, 404, 429, 500, 502, 503])
def test_the_sites_own_answers_pass_unchanged(gateway: Gateway, limit: Limit, status: int):
    limit(gateway.kind.entity("alice"), burst(1000))
    limited, free = (gateway.ask(person, f"/status/{status}") for person in ("alice", "bob"))
    for answer in (limited, free):
        assert answer.status_code == status
        assert answer.headers["x-site"] == "yes"
        assert answer.headers["retry-after"] == "77"
        assert seen(answer)["path"] == f"/status/{status}"
    assert limited.headers.get_list("ratelimit") == ['"request_rate";r=999;t=1000000']
    assert "ratelimit" not in free.headers


def test_a_large_body_reaches_the_site_whole(gateway: Gateway, limit: Limit):
    limit(gateway.kind.entity("alice"), burst(1))
    content = random.Random(4).randbytes(8_000_000)
    answer = gateway.ask("alice", method="POST", content=content)
    assert answer.status_code == 200
    assert seen(answer)["method"] == "POST"
    assert (seen(answer)["size"], seen(answer)["sha256"]) == (
        len(content),
        hashlib.sha256(content).hexdigest(),
    )
    assert is_throttled(gateway.ask("alice", method="POST", content=content))


def test_site_that_is_down_does_not_count_as_an_outage_of_quotagate(kind: Kind, node: Service):
    closed = {kind.open_line: kind.closed_line}
    with gateways.running(kind, node.address[1], free_port(), kind.patience, closed) as gateway:
        answer = gateway.ask("alice", method="POST", content=b"posted")
        assert answer.status_code == (503 if kind.name == "envoy" else 502)
        assert "uota" not in answer.text


# The line to Quotagate


def test_checks_share_a_connection(kind: Kind, node: Service, site: int):
    _, port = node.address
    others = connections_to(port)
    with gateways.running(kind, port, site, kind.patience) as gateway:
        gateway.ask("alice")
        # Envoy's example has one more, by which it looks after the health of the node.
        eventually(lambda: len(connections_to(port) - others) == 1 + (kind.name == "envoy"))
        kept = connections_to(port) - others
        for _ in range(10):
            assert gateway.ask("alice").status_code == 200
        assert connections_to(port) - others == kept


def connections_to(port: int) -> set[str]:
    """The local ends of open connections to a local port, including those of the tests."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
    return {
        local for _, local, remote, state, *_ in rows if remote.endswith(f":{port:04X}") and state == "01"
    }


@pytest.mark.parametrize(("key", "status"), [(ADMIN_KEY, {200}), ("of-nobody", {401, 503})])
def test_gateway_sends_its_key_and_a_wrong_key_admits_nobody(
    kind: Kind, node: Service, site: int, key: str, status: set[int]
):
    change = {line: other.replace("KEY", key) for line, other in kind.key.items()}
    with gateways.running(kind, node.address[1], site, kind.patience, change) as with_key:
        answer = with_key.ask("alice")
        assert answer.status_code in status
        assert ("x-site" in answer.headers) == (key == ADMIN_KEY)
