"""API keys on real nodes: every route of the OpenAPI document with every kind of key, bounds, revocation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from app.domain.grant import PERMISSIONS
from tests.polls import follows_within_a_second, polls_until
from tests.service import Service, eventually, running

CLOSED = {"QUOTAGATE_OPEN_TO": ""}
OPEN_PATHS = {"/health/live", "/health/ready"}
"""Open paths of the OpenAPI document; /metrics is open to open networks, which these nodes lack."""
METHODS = ("get", "head", "post", "put", "patch", "delete", "options", "trace")
HARDLY_REFILLED = {"algorithm": "token_bucket", "limit": 0.001, "burst": 1_000, "enforcement": "deny"}
ASK = {"principal": "alice", "usage": {"requests": 1}}
ASKS = {
    "/v1/decisions": ASK,
    "/v1/decisions:batch": {"asks": [ASK]},
    "/v1/leases": {"ask": ASK, "lease_ms": 100},
}
"""Whether a key with the scope account may ask depends on these bodies."""
NO_LEASE = "/v1/leases/none"


Calling = Callable[..., "Caller"]


def created(node: Service, name: str, *scopes: str, **more: Any) -> str:
    """Create a key, and return its secret."""
    answer = node.http.post("/v1/keys", json={"name": name, "scopes": scopes, **more})
    assert answer.status_code == 201, answer.text
    key: str = answer.json()["key"]
    return key


class Caller:
    """A client that sends one key, or no key."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def status(self, method: str, path: str, body: Any = None) -> int:
        return self.http.request(method, path, json=body).status_code

    def decision(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(path, json=body)


@pytest.fixture
def calling() -> Iterator[Calling]:
    """Makes callers. A caller with its own address is not delayed because of other callers' wrong keys."""
    with ExitStack() as stack:

        def call(node: Service, key: str | None, address: str = "127.0.0.1") -> Caller:
            transport = httpx.HTTPTransport(local_address=address)
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            return Caller(
                stack.enter_context(
                    httpx.Client(base_url=node.url, headers=headers, timeout=60, transport=transport)
                )
            )

        yield call


@pytest.fixture(scope="module")
def closed() -> Iterator[Service]:
    """A node without open networks: each request needs a key."""
    with running(environment=CLOSED) as node:
        yield node


@pytest.fixture(scope="module")
def operations(closed: Service) -> list[tuple[str, str, set[str]]]:
    """Method, path and scopes of all operations in the node's own OpenAPI document."""
    document = closed.http.get("/openapi.json").json()
    found = []
    for template, item in document["paths"].items():
        path = template.replace("{entity}", "user=nobody").replace("{name}", "nobody")
        path = path.replace("/v1/leases/{lease}", NO_LEASE)
        assert "{" not in path, f"say here what {template} is to be asked with"
        for method in item.keys() & set(METHODS):
            security = item[method]["security"]
            scopes = {scope for way in security for scope in way.get("key", [])}
            assert bool(scopes) == (template not in OPEN_PATHS), template
            found.append((method.upper(), path, scopes))
    assert len(found) > 20
    return found


def test_each_route_but_the_open_ones_is_401_without_a_valid_key(
    closed: Service, operations: list[tuple[str, str, set[str]]], calling: Calling
):
    everything = [*PERMISSIONS]
    revoked = created(closed, "revoked", *everything)
    expired = created(closed, "expired", *everything, expires_ms=_soon())
    rotated = created(closed, "rotated", *everything)
    assert closed.http.delete("/v1/keys/revoked").status_code == 204
    assert closed.http.post("/v1/keys/rotated:rotate").status_code == 200
    until_expired = calling(closed, expired, "127.0.0.9")
    eventually(lambda: until_expired.status("GET", "/v1/quotas") == 401)
    kinds = {
        "none": None,
        "unknown": "qg_" + "x" * 43,
        "expired": expired,
        "revoked": revoked,
        "rotated": rotated,
    }
    for place, (kind, key) in enumerate(kinds.items()):
        caller = calling(closed, key, f"127.0.0.{place + 2}")
        for method, path, scopes in operations:
            answer = caller.http.request(method, path, json={})
            expected = 401 if scopes or key else 200
            assert answer.status_code == expected, f"{method} {path} with the {kind} key"
            if expected == 401 and method != "HEAD":
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.headers["www-authenticate"].startswith("Bearer")


def test_key_with_another_scope_is_403_and_with_the_right_one_passes(
    closed: Service, operations: list[tuple[str, str, set[str]]], calling: Calling
):
    callers = {scope: calling(closed, created(closed, f"only-{scope}", scope)) for scope in PERMISSIONS}
    for method, path, scopes in operations:
        for scope, caller in callers.items():
            status = caller.status(method, path, ASKS.get(path, {}))
            if scope in scopes or scope == "admin" or not scopes:
                assert status not in (401, 403), f"{method} {path} with the scope {scope}: {status}"
            else:
                assert status == 403, f"{method} {path} with the scope {scope}: {status}"


def test_bound_key_is_403_except_for_its_own_entities(
    closed: Service, operations: list[tuple[str, str, set[str]]], calling: Calling
):
    caller = calling(closed, created(closed, "bound", "decide", "account", bound_to=["user=acme"]))
    for method, path, scopes in operations:
        if scopes and path != NO_LEASE:
            assert caller.status(method, path, ASKS.get(path, {})) == 403, f"{method} {path}"
    assert caller.http.delete(NO_LEASE).json()["ok"] is False  # only the key that took a lease knows its name
    assert caller.status("POST", "/v1/decisions", {**ASK, "principal": "acme"}) == 200


def test_bound_caller_that_asks_for_another_tenant_is_403_and_charges_nothing(
    closed: Service, calling: Calling
):
    for user in ("acme", "other"):
        closed.put(f"user={user}", request_rate=HARDLY_REFILLED)
    caller = calling(closed, created(closed, "acme", "decide", "account", bound_to=["user=acme", "user=a-*"]))
    acme, other = ({"principal": name, "usage": {"requests": 1}} for name in ("acme", "other"))
    nobody = {"usage": {"requests": 1}}

    refused = caller.decision("/v1/decisions", other)
    assert refused.status_code == 403
    assert refused.json()["detail"] == "The key is bound, and may not ask for this."
    batch = caller.decision("/v1/decisions:batch", {"asks": [acme, acme, other]})
    assert batch.status_code == 403
    assert [error["field"] for error in batch.json()["errors"]] == ["/asks/2"]
    for ask in (
        nobody,
        {**other, "mode": "record"},
        {**other, "client_id": "acme"},
        {**other, "mode": "peek"},
    ):
        assert caller.decision("/v1/decisions", ask).status_code == 403, ask
    for headers in ({"X-Quotagate-Principal": "other"}, {}, {"X-Quotagate-Client-Id": "acme"}):
        assert caller.http.get("/v1/check", headers=headers).status_code == 403, headers
    assert caller.decision("/v1/decisions", {**other, "usage": {}}).status_code == 422, "it is decoded first"
    assert (_used(closed, "acme"), _used(closed, "other")) == (0, 0)

    assert caller.decision("/v1/decisions", acme).json()["decision"] == "admit"
    assert caller.decision("/v1/decisions:batch", {"asks": [acme, acme]}).status_code == 200
    assert caller.http.get("/v1/check", headers={"X-Quotagate-Principal": "acme"}).status_code == 200
    assert caller.decision("/v1/decisions", {**acme, "mode": "record"}).status_code == 200
    assert caller.decision("/v1/decisions", {**acme, "principal": "a-b"}).status_code == 200
    assert (_used(closed, "acme"), _used(closed, "other")) == (5, 0)


def test_bound_key_refunds_and_records_for_its_own_entities_only(closed: Service, calling: Calling):
    closed.put("user=own", request_rate=HARDLY_REFILLED)
    closed.put("ip=10.8.8.8", connection_creation_rate={"limit": 5})
    closed.put("client-id=everybodys", request_rate={**HARDLY_REFILLED, "enforcement": "delay"})
    others = {"ip": "10.8.8.8", "usage": {"connections": 50}}
    assert closed.ask(**others)["decision"] == "admit"
    caller = calling(closed, created(closed, "own", "decide", "account", bound_to=["user=own"]))
    own = {"principal": "own", "usage": {"requests": 1}}
    for mode in ("refund", "record"):
        refused = caller.decision("/v1/decisions", {**own, **others, "mode": mode})
        assert refused.status_code == 403
        assert refused.headers["content-type"] == "application/problem+json"
        assert [error["field"] for error in refused.json()["errors"]] == ["/ip"]
        assert "ip=10.8.8.8" in refused.json()["errors"][0]["message"]
        batch = {"asks": [own, {**own, **others, "mode": mode}]}
        refused = caller.decision("/v1/decisions:batch", batch)
        assert [error["field"] for error in refused.json()["errors"]] == ["/asks/1/ip"]
    assert closed.ask(**others)["decision"] == "throttle", "nothing was given back"
    assert _used(closed, "own") == 0, "nothing was charged"
    assert caller.decision("/v1/decisions", {**own, "mode": "record"}).status_code == 200
    assert caller.decision("/v1/decisions", {**own, "mode": "refund"}).status_code == 200
    assert _used(closed, "own") == 0


def test_bound_key_puts_no_other_principal_into_debt(closed: Service, calling: Calling):
    closed.put("client-id=all", request_rate={**HARDLY_REFILLED, "enforcement": "delay"})
    caller = calling(closed, created(closed, "no-debts", "decide", bound_to=["user=no-debts"]))
    ask = {"principal": "no-debts", "client_id": "all", "detail": True}
    for mode in ("peek", "admit"):
        everything = {**ask, "usage": {"requests": 2**53 - 1}, "mode": mode}
        decision = caller.decision("/v1/decisions", everything).json()
        assert (decision["decision"], decision["limited_by"]["bucket"]) == ("reject", "client-id=all")
        assert decision["quotas"][0]["enforcement"] == "deny"
    assert closed.ask(client_id="all", usage={"requests": 1_000})["decision"] == "admit", (
        "nothing was charged"
    )
    free = calling(closed, created(closed, "unbound", "decide"))
    assert free.decision("/v1/decisions", {**ask, "usage": {"requests": 1}}).json()["decision"] == "delay"


def test_kept_answer_is_bound_to_its_key_and_content(closed: Service, calling: Calling):
    closed.put("client-id=kept", controller_mutation_rate={"limit": 0.001, "burst": 1_000})
    callers = [calling(closed, created(closed, f"keeper-{n}", "decide")) for n in range(2)]
    ask = {"client_id": "kept", "usage": {"mutations": 1}, "id": "once", "detail": True}

    def left(caller: Caller, **more: Any) -> int:
        answer = caller.decision("/v1/decisions", {**ask, **more}).json()
        return round(float(answer["quotas"][0]["remaining"]))

    assert [left(callers[0]), left(callers[0]), left(callers[1]), left(callers[1])] == [999, 999, 998, 998]
    assert left(callers[0], usage={"mutations": 998}) == 0, "one mutation does not buy the rest"
    assert left(callers[0]) == 999, "the first answer is kept as well"
    assert (
        callers[0].decision("/v1/decisions", {**ask, "usage": {"mutations": 2}}).json()["decision"]
        == "throttle"
    )


def test_record_and_refund_need_the_scope_account(closed: Service, calling: Calling):
    plain = calling(closed, created(closed, "plain", "decide"))
    for more in ({"mode": "record"}, {"mode": "refund"}, {"cluster_action": True}):
        refused = plain.decision("/v1/decisions", ASK | more)
        assert refused.status_code == 403, more
        assert 'scope="account"' in refused.headers["www-authenticate"]
    for name, scopes in {"both": ["decide", "account"], "alone": ["account"]}.items():
        accounting = calling(closed, created(closed, name, *scopes))
        assert accounting.status("POST", "/v1/decisions", ASK | {"mode": "record"}) == 200
        assert accounting.status("POST", "/v1/decisions", ASK) == (200 if name == "both" else 403)


def test_wrong_key_is_refused_and_delayed_on_an_open_node_but_valid_key_is_not(
    calling: Calling,
):
    with running() as node:
        valid, wrong = calling(node, created(node, "valid", "decide")), calling(node, "qg_wrong")
        assert calling(node, None).status("POST", "/v1/decisions", ASK) == 200
        for path in ("/v1/decisions", "/v1/check", "/health/live", "/openapi.json", "/metrics"):
            assert wrong.status("POST", path, ASK) == 401, path
        slow = 0.0
        for _ in range(60):
            began = time.monotonic()
            assert wrong.status("POST", "/v1/decisions", ASK) == 401
            slow += time.monotonic() - began
        assert slow > 1, "of 65 wrong keys, 20 are answered at once, then 10 a second"
        assert valid.status("POST", "/v1/decisions", ASK) == 200
        metrics = node.http.get("/metrics").text
        assert 'quotagate_access_failures_total{reason="unknown"} 65.0' in metrics


def test_no_secret_is_logged_or_shown(closed: Service, calling: Calling):
    key = created(closed, "secret", "decide")
    mistyped = key[:-1]
    caller = calling(closed, mistyped)
    assert mistyped not in caller.http.get("/v1/quotas").text
    assert key not in closed.http.get("/v1/keys").text
    assert key not in closed.http.get("/metrics").text
    output = closed.logged()
    assert '"key": "secret"' in output, "the creation of the key is logged"
    assert mistyped not in output
    assert closed.admin_key not in output


def test_keys_reach_another_node_within_a_second(calling: Calling):
    with ExitStack() as stack:
        one = stack.enter_context(running(environment=CLOSED))
        other = stack.enter_context(
            running(environment=CLOSED, store_url=one.store_url, database_url=one.database_url)
        )
        polls: dict[str, list[int]] = {"made": [], "rotated": [], "revoked": []}
        for turn in range(5):
            key = created(one, f"key-{turn}", "decide")
            caller = calling(other, key, f"127.0.1.{turn + 1}")
            polls["made"].append(_polls_until(caller, 200))
            again = one.http.post(f"/v1/keys/key-{turn}:rotate", json={"grace_ms": 0}).json()["key"]
            polls["rotated"].append(_polls_until(caller, 401))
            renewed = calling(other, again, f"127.0.2.{turn + 1}")
            assert renewed.status("POST", "/v1/decisions", ASK) == 200
            assert one.http.delete(f"/v1/keys/key-{turn}").status_code == 204
            polls["revoked"].append(_polls_until(renewed, 401))
        for change, each in polls.items():
            follows_within_a_second(f"a key is {change} on another node", each)


def _polls_until(caller: Caller, status: int) -> int:
    return polls_until(lambda: caller.status("POST", "/v1/decisions", ASK) == status)


def _soon() -> int:
    """A time that is still in the future when a request arrives, even on a slow machine."""
    return time.time_ns() // 1_000_000 + 2_000


def _used(node: Service, user: str) -> int:
    """The number of requests charged to its bucket of 1,000."""
    ask = {"principal": user, "usage": {"requests": 0}, "mode": "peek", "detail": True}
    (quota,) = node.ask(**ask)["quotas"]
    return round(1_000 - float(quota["remaining"]))
