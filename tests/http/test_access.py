"""Access control: keys, networks, and open paths."""

from __future__ import annotations

import json
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from hashlib import sha256
from ipaddress import ip_address, ip_network
from typing import Any

import httpx
import pytest
import structlog

from app.domain.ask import Ask
from app.domain.binding import Binding
from app.domain.errors import EntityError
from app.domain.grant import EVERYTHING, Grant, Permission
from app.http.access.access import NOBODY, OPEN, Access
from app.http.access.refusals import AT_ONCE, Refusals
from app.http.access.slowdown import REMEMBERED, Slowdown
from app.http.head import RequestHead, head_of
from app.http.problems import ProblemError
from app.http.routes.health import Readiness
from tests.http.conftest import ADMIN, Node, serving

KEY = f"Bearer {ADMIN}"
ASK = {"usage": {"requests": 1}}


def head(address: str | None = "127.0.0.1", *authorization: str, **more: str) -> RequestHead:
    headers = [(b"authorization", value.encode()) for value in authorization]
    headers += [(name.replace("_", "-").encode(), value.encode()) for name, value in more.items()]
    client = None if address is None else (address, 5)
    return head_of({"path": "/", "query_string": b"", "client": client, "headers": headers})


@pytest.fixture
def log_lines() -> Iterator[list[MutableMapping[str, Any]]]:
    """The log entries of a test."""
    with structlog.testing.capture_logs() as lines:
        yield lines


@pytest.fixture
def access() -> Access:
    return Access(ADMIN, [ip_network("127.0.0.0/8"), ip_network("10.1.0.0/16"), ip_network("::1/128")])


def refusal(access: Access, request: RequestHead, wanted: Any = "decide") -> ProblemError:
    with pytest.raises(ProblemError) as raised:
        access.require(request, wanted)
    return raised.value


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "10.1.2.3", "::1", "::ffff:10.1.2.3"])
def test_open_networks_may_decide(access: Access, address: str):
    assert access.caller(head(address)) == OPEN
    assert OPEN.scopes == {"decide"}


@pytest.mark.parametrize("address", ["10.2.0.1", "::2", "::ffff:10.2.0.1", "", "/run/quotagate.sock", None])
def test_callers_outside_open_networks_have_no_scopes(access: Access, address: str | None):
    assert access.caller(head(address)) == NOBODY
    assert refusal(access, head(address)).status == 401


def test_no_header_changes_the_address(access: Access):
    forwarded = head(
        "10.2.0.1", x_forwarded_for="127.0.0.1", forwarded="for=127.0.0.1", x_real_ip="127.0.0.1"
    )
    assert access.caller(forwarded) == NOBODY


def test_no_network_is_open_when_none_is_named():
    assert Access(ADMIN, []).caller(head("127.0.0.1")) == NOBODY


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer  "])
@pytest.mark.parametrize("address", ["127.0.0.1", "10.2.0.1", None])
def test_the_admin_key_grants_everything_anywhere(access: Access, scheme: str, address: str | None):
    assert access.caller(head(address, f"{scheme} {ADMIN}")).scopes == EVERYTHING


@pytest.mark.parametrize(
    "sent",
    ["", "Bearer", "Bearer ", f"Bearer {ADMIN}x", f"Basic {ADMIN}", ADMIN, f"Bearer{ADMIN}", "Bearer \xff"],
)
def test_anything_but_a_valid_key_is_refused(access: Access, sent: str):
    problem = refusal(access, head("127.0.0.1", sent))
    assert problem.status == 401
    assert problem.headers["WWW-Authenticate"] == 'Bearer realm="quotagate", error="invalid_token"'


def test_two_keys_in_one_request_are_invalid(access: Access):
    assert refusal(access, head("127.0.0.1", KEY, KEY)).status == 401


def test_empty_key_never_matches_an_empty_admin_key():
    assert refusal(Access("", []), head("127.0.0.1", "Bearer ")).status == 401


def test_missing_key_is_401_and_missing_scope_is_403(access: Access):
    for wanted in ("account", "read", "write", "admin"):
        assert refusal(access, head(), wanted).status == 401
    problem = refusal(access, head("127.0.0.1", KEY), "console")
    assert problem.status == 403
    assert 'error="insufficient_scope", scope="console"' in problem.headers["WWW-Authenticate"]


def test_sender_has_a_name_for_the_history(access: Access):
    assert access.who(head("127.0.0.1", KEY)) == "admin"
    for nobody in (head(), head("127.0.0.1", "Bearer x")):
        with pytest.raises(ProblemError) as raised:
            access.who(nobody)
        assert raised.value.status == 401


# Keys other than the admin key


def a_key(
    name: str, *scopes: Permission, key: str = "", bound_to: str = "", until_ms: int | None = None
) -> Any:
    bounds = tuple(Binding.parse(text) for text in bound_to.split())
    return sha256((key or name).encode()).digest(), Grant(name, frozenset(scopes), bounds, until_ms)


RING = dict(
    [
        a_key("gateway", "decide"),
        a_key("reader", "read"),
        a_key("brief", "decide", until_ms=1_000),
        a_key("acme", "decide", "account", bound_to="user=acme user=a-*,client-id=x ip=10.0.*"),
    ]
)


@dataclass
class Judge:
    """Access control with the keys above, at a fixed time, and the reasons of its refusals so far."""

    now_ms: int = 0
    reasons: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.access = Access(ADMIN, (), lambda: RING, failed=self.reasons.append, now_ms=lambda: self.now_ms)

    def refused(self, key: str, wanted: Permission = "decide") -> ProblemError:
        return refusal(self.access, head("127.0.0.1", f"Bearer {key}"), wanted)

    def caller(self, key: str) -> Grant:
        return self.access.caller(head("127.0.0.1", f"Bearer {key}"))


def test_a_key_has_its_own_scopes_and_its_name_in_the_history():
    judge = Judge()
    assert judge.caller("gateway").scopes == {"decide"}
    assert judge.access.who(head("127.0.0.1", "Bearer reader")) == "reader"
    assert judge.refused("reader").status == 403
    assert judge.refused("gateway", "admin").status == 403
    assert judge.refused("nobodys").status == 401
    assert judge.reasons == ["scope", "scope", "unknown"]


def test_expired_key_gets_the_same_answer_as_an_unknown_one():
    judge = Judge(now_ms=999)
    assert judge.caller("brief").scopes == {"decide"}
    judge.now_ms = 1_000
    expired, unknown = judge.refused("brief"), judge.refused("nobodys")
    assert (expired.document(), expired.headers) == (unknown.document(), unknown.headers)
    assert judge.reasons == ["expired", "unknown"]


@pytest.mark.parametrize(
    ("ask", "allowed"),
    [
        (Ask(principal="acme"), True),
        (Ask(principal="acme", client_id="any", ip="192.0.2.1"), True),
        (Ask(principal="acme2"), False),
        (Ask(principal="Acme"), False),
        (Ask(principal="a-b", client_id="x"), True),
        (Ask(principal="a-", client_id="x"), True),
        (Ask(principal="a-b", client_id="y"), False),
        (Ask(principal="a-b"), False),
        (Ask(client_id="x"), False),
        (Ask(principal="other", ip="10.0.3.4"), True),
        (Ask(ip="10.1.0.1"), False),
        (Ask(), False),
    ],
)
def test_a_bound_caller_is_confined_to_any_of_its_entities(ask: Ask, allowed: bool):
    judge = Judge()
    caller = judge.caller("acme")
    assert caller.covers(ask) == allowed
    if allowed:
        judge.access.confine(caller, ask)
    else:
        with pytest.raises(ProblemError, match="403 The key is bound") as refused:
            judge.access.confine(caller, ask, "/asks/3")
        assert refused.value.errors[0].field == "/asks/3"
    assert judge.reasons == ([] if allowed else ["bound"])


@pytest.mark.parametrize(
    "text", ["user=a*b", "user=**", "user=", "acme", "ip=host", "user=a,ip=10.*", "user=%"]
)
def test_invalid_bindings_are_refused(text: str):
    with pytest.raises(EntityError):
        Binding.parse(text)


@pytest.mark.parametrize(
    "text", ["user=acme", "user=*", "user=%2A", "user=a%2A*,client-id=*", "broker=1*,listener=E*"]
)
def test_a_binding_reads_as_it_is_spelled(text: str):
    assert str(Binding.parse(text)) == text


def test_wrong_keys_are_delayed_but_valid_keys_of_the_address_are_not():
    judge = Judge()
    waits = [judge.refused(f"guess-{n}").wait_s for n in range(100)]
    assert waits[:20] == [0.0] * 20
    assert 0 < waits[25] < waits[-1] <= 1
    assert judge.caller("gateway").scopes == {"decide"}, "whose address it is does not matter"
    assert judge.refused("reader").wait_s == 0, "nor is a valid key slowed that lacks a scope"
    elsewhere = refusal(judge.access, head("127.0.0.2", "Bearer guess"))
    assert elsewhere.wait_s == 0


def test_a_gateway_with_one_wrong_caller_among_many_is_not_slowed():
    judge = Judge()
    for n in range(200):
        assert judge.refused(f"guess-{n}").wait_s == 0
        assert judge.caller("gateway").name == "gateway"


def test_slowdown_counts_ipv6_networks_and_forgets_the_oldest():
    slowdown = Slowdown()
    for n in range(40):
        slowdown.wait_s(f"2001:db8::{n:x}", 0.0)
    assert slowdown.wait_s("2001:db8::ffff", 0.0) > 0
    assert slowdown.wait_s("2001:db8:0:1::1", 0.0) == 0
    assert slowdown.wait_s("/run/socket", 0.0) == slowdown.wait_s("", 0.0) == 0
    for n in range(2 * REMEMBERED):
        slowdown.wait_s(str(ip_address(n)), 0.0)
    assert len(slowdown._left) == REMEMBERED


# The paths of a node

OPEN_PATHS = ["/", "/health/live", "/health/ready", "/openapi.json", "/docs", "/redoc", "/console"]


@pytest.mark.parametrize("path", OPEN_PATHS)
@pytest.mark.usefixtures("way")
async def test_open_paths_need_no_key_but_a_key_that_is_sent_must_be_valid(path: str):
    async with serving(open_to="") as node:
        assert (await node.http.get(path)).status_code == 200
        assert (await node.http.get(path, headers={"Authorization": KEY})).status_code == 200
        assert (await node.http.get(path, headers={"Authorization": "Bearer x"})).status_code == 401


@pytest.mark.usefixtures("way")
async def test_metrics_are_for_open_networks_and_keys():
    async with serving(open_to="") as closed:
        assert (await closed.http.get("/metrics")).status_code == 401
        shown = await closed.http.get("/metrics", headers={"Authorization": KEY})
        assert shown.status_code == 200
    async with serving() as node:
        shown = await node.http.get("/metrics")
        assert shown.headers["content-type"].startswith("text/plain; version=")
        assert "quotagate_decision_seconds_bucket" in shown.text


async def test_unknown_path_needs_a_key_before_it_is_404(node: Node):
    async def get(path: str, **headers: str) -> httpx.Response:
        return await node.http.get(path, headers=headers)

    for path in ("/v1/failing", "/v1/decisions/", "/nothing", "/health"):
        assert (await get(path)).status_code == 401, path
    missing = await get("/nothing", authorization=KEY)
    assert missing.status_code == 404
    assert missing.json()["detail"] == "There is nothing at this path."
    assert missing.headers["content-type"] == "application/problem+json"


async def test_fastapis_own_refusals_are_problems(node: Node, capsys: pytest.CaptureFixture[str]):
    node.http.headers["Authorization"] = KEY
    refused = await node.http.put("/v1/failing")
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET")
    assert refused.json()["title"] == "Method Not Allowed"
    wrong = await node.http.get("/v1/failing?count=x")
    assert wrong.status_code == 422
    assert wrong.json()["errors"][0]["field"] == "/count"
    failed = await node.http.get("/v1/failing")
    assert failed.status_code == 500
    assert failed.headers["content-type"] == "application/problem+json"
    assert "secret" not in failed.text
    assert "a request failed" in capsys.readouterr().out


async def test_health_reports_unreachable_dependencies(node: Node):
    node.readiness = Readiness(snapshot=True, store="timeout", catalog="away")
    expected = {"store": "timeout", "catalog": "away", "throttle_factor": 1.0, "settings": "ok"}
    ready = await node.http.get("/health/ready")
    assert (ready.status_code, ready.json()) == (200, {"status": "ready"} | expected)
    for state, status in (
        (Readiness(snapshot=False), "starting"),
        (Readiness(snapshot=True, stopping=True), "stopping"),
    ):
        node.readiness = state
        ready = await node.http.get("/health/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, status)
        live = await node.http.get("/health/live")
        assert (live.status_code, live.json()["status"]) == (200, "live")


async def test_names_of_unknown_variables_are_for_readers(node: Node):
    node.readiness = Readiness(snapshot=True, unknown_settings=["QUOTAGATE_PROT"])
    for path in ("/health/ready", "/health/live"):
        seen = await node.http.get(path)
        assert (seen.status_code, seen.json()["settings"]) == (200, "unknown")
        assert "PROT" not in seen.text
        seen = await node.http.get(path, headers={"Authorization": KEY})
        assert seen.json()["unknown_settings"] == ["QUOTAGATE_PROT"]
    seen = await node.http.get("/health/ready", headers={"Authorization": "Bearer wrong"})
    assert seen.status_code == 401
    node.readiness = Readiness(snapshot=True)
    assert "unknown" not in (await node.http.get("/health/ready", headers={"Authorization": KEY})).text


# Browsers of other sites

HERE = "localhost:8080"


def asked(judge: Judge, address: str = "127.0.0.1", **fields: str) -> int:
    """The status of a decision request with these header fields."""
    try:
        judge.access.asker(head(address, **fields))
    except ProblemError as problem:
        return problem.status
    return 200


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"host": HERE}, 200),
        ({"host": HERE, "origin": "http://localhost:8080"}, 200),
        ({"host": HERE, "origin": "http://LOCALHOST:8080", "sec_fetch_site": "same-origin"}, 200),
        ({"host": "localhost", "origin": "https://localhost"}, 200),
        ({"host": HERE, "origin": "null"}, 403),
        ({"host": HERE, "origin": "http://localhost:3000"}, 403),
        ({"host": HERE, "origin": "http://localhost"}, 403),
        ({"host": HERE, "origin": "http://evil.example"}, 403),
        ({"host": HERE, "origin": "http://localhost:8080.evil.example"}, 403),
        ({"host": HERE, "origin": "http://x@localhost:8080"}, 403),
        ({"host": HERE, "origin": ""}, 403),
        ({"origin": "http://localhost:8080"}, 403),
        ({"host": HERE, "sec_fetch_site": "cross-site"}, 403),
        ({"host": HERE, "sec_fetch_site": "none"}, 200),
    ],
)
def test_a_page_of_another_site_does_not_ask_without_a_key(fields: dict[str, str], status: int):
    judge = Judge()
    assert asked(judge, **fields) == status
    assert judge.reasons == ["origin"] * (status == 403)
    for key in ("gateway", ADMIN):
        judge.access.asker(head("127.0.0.1", f"Bearer {key}", **fields))


@pytest.mark.parametrize(
    ("address", "name", "status"),
    [
        ("127.0.0.1", "127.0.0.1:8080", 200),
        ("127.0.0.1", "127.9.9.9", 200),
        ("::1", "[::1]:8080", 200),
        ("127.0.0.1", "LocalHost.", 200),
        ("127.0.0.1", "quotagate.internal:8080", 200),
        ("127.0.0.1", "evil.example:8080", 403),
        ("127.0.0.1", "localhost.evil.example", 403),
        ("127.0.0.1", "", 403),
        ("::1", "evil.example", 403),
        ("::ffff:127.0.0.1", "evil.example", 403),
        ("10.1.2.3", "evil.example", 200),
    ],
)
def test_loopback_requests_without_a_key_need_an_allowed_host(address: str, name: str, status: int):
    judge = Judge()
    judge.access = Access(
        ADMIN,
        [ip_network("0.0.0.0/0"), ip_network("::/0")],
        lambda: RING,
        allowed_hosts=["localhost", "quotagate.internal"],
        failed=judge.reasons.append,
    )
    assert asked(judge, address, host=name) == status
    assert judge.reasons == ["host"] * (status == 403)
    assert judge.access.asker(head(address, "Bearer gateway", host=name)).grant.name == "gateway"


@pytest.mark.parametrize("path", ["/v1/decisions", "/v1/decisions:batch"])
@pytest.mark.parametrize("fields", [{"Origin": "null"}, {"Host": "evil.example"}])
@pytest.mark.usefixtures("way")
async def test_a_page_cannot_charge(path: str, fields: dict[str, str]):
    body = ASK if path.endswith("s") else {"asks": [ASK]}
    async with serving() as node:
        text_plain = {"Content-Type": "text/plain"}  # as a page may send without a preflight request
        answer = await node.http.post(path, content=json.dumps(body), headers={**fields, **text_plain})
        assert answer.status_code == 403
        assert node.admission.asked == []
        assert (await node.http.post(path, json=body)).status_code == 200
        passed_on = await node.http.get("/v1/check", headers=fields)
        assert passed_on.status_code == 200, "gateways pass on what they were sent"


# Refused keys in the log


def test_refused_keys_are_logged_by_name_or_fingerprint_and_never_themselves(
    log_lines: list[MutableMapping[str, Any]],
):
    judge = Judge(now_ms=1_000)
    secret = "qg_a-key-that-nobody-knows"
    judge.refused(secret)
    judge.refused("brief")
    judge.refused("reader")
    with pytest.raises(ProblemError):
        judge.access.confine(judge.caller("acme"), Ask(principal="other"))
    with pytest.raises(ProblemError):
        judge.access.caller(head("127.0.0.1", "Basic dXNlcjpwYXNzd29yZA=="))
    line = {"event": "a key was refused", "log_level": "warning", "address": "127.0.0.1"}
    assert log_lines == [
        {**line, "reason": "unknown", "fingerprint": sha256(secret.encode()).hexdigest()[:8]},
        {**line, "reason": "expired", "key": "brief"},
        {**line, "reason": "scope", "key": "reader"},
        {**line, "reason": "bound", "key": "acme"},
        {**line, "reason": "malformed"},
    ]
    for sent in (secret, "dXNlcj"):
        assert sent not in str(log_lines)


@pytest.mark.usefixtures("way")
async def test_a_refusal_by_the_body_is_logged_with_its_address(log_lines: list[MutableMapping[str, Any]]):
    async with serving() as node:
        node.access._ring = lambda: RING
        record = {**ASK, "mode": "record"}
        assert (await node.ask(record, Authorization="Bearer gateway")).status_code == 403
    assert [(line["reason"], line["key"], line["address"]) for line in log_lines if "reason" in line] == [
        ("scope", "gateway", "127.0.0.1")
    ]


def test_refused_keys_are_logged_at_a_bounded_rate_with_the_number_omitted(
    log_lines: list[MutableMapping[str, Any]],
):
    refusals = Refusals()
    for n in range(1_000):
        refusals.record("unknown", "127.0.0.1", 5.0 + n / 1_000_000)
    assert len(log_lines) == AT_ONCE
    refusals.record("unknown", "127.0.0.1", 7.0)
    assert log_lines[-1]["left_out_before"] == 990
    refusals.record("unknown", "127.0.0.1", 7.0)
    assert "left_out_before" not in log_lines[-1]
