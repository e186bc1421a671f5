"""The check on a real server: any method, bodies that are not read, and connections that live on."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from ipaddress import ip_network
from typing import Any

import httpx
import pytest

from app.admission.plan import PlannedAsk
from app.domain.ask import Ask
from app.domain.decision import Decision, LimitedBy
from app.domain.quota import Quota
from app.http.check_question import Sources
from app.store.port import Answer, ChargeResult
from tests.http.conftest import ADMIN, Node, eventually, serving
from tests.unit.admission.fakes import charge_to

CHECK = "/v1/check"
KEY = f"Bearer {ADMIN}"
ALICE = {"X-Quotagate-Principal": "alice", "X-Quotagate-Client-Id": "etl", "X-Quotagate-IP": "10.0.0.7"}
ADMITTED = {
    "decision": "admit",
    "throttle_ms": 0,
    "charged": True,
    "applied": 0,
    "source": "store",
    "limited_by": None,
}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUERY", "PROPFIND", "PURGE")


@pytest.fixture
async def closed(way: str) -> AsyncIterator[Node]:
    async with serving(open_to="") as node:
        yield node


def not_understood(answer: httpx.Response) -> list[str]:
    """The fields that a 400 names."""
    assert answer.status_code == 400, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["x-throttle-ms"] == "0"
    assert not {"retry-after", "ratelimit", "ratelimit-policy"} & answer.headers.keys()
    return [error["field"] for error in answer.json()["errors"]]


# Asks


@pytest.mark.parametrize("method", METHODS)
async def test_any_method_asks_for_one_request_under_deny(node: Node, method: str):
    answer = await node.http.request(method, CHECK, headers=ALICE)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-throttle-ms"] == "0"
    assert answer.headers["cache-control"] == "no-store"
    assert int(answer.headers["content-length"]) == len(json.dumps(ADMITTED, separators=(",", ":")))
    assert method == "HEAD" or answer.json() == ADMITTED
    assert node.admission.asked == [
        Ask({"requests": 1}, principal="alice", client_id="etl", ip="10.0.0.7", deny=True)
    ]


async def test_the_query_says_the_rest(node: Node):
    asked = "?produce_bytes=1.5&connections=2&broker=1&listener=a+b&deny_status=403"
    assert (await node.http.get(CHECK + asked)).status_code == 200
    usage = {"connections": 2, "produce_bytes": 1.5}
    assert node.admission.asked == [Ask(usage, broker="1", listener="a b", deny=True)]


async def test_nobody_need_be_named(node: Node):
    assert (await node.http.get(f"{CHECK}?")).status_code == 200
    assert node.admission.asked == [Ask({"requests": 1}, deny=True)]


async def test_invalid_check_names_its_errors_and_decides_nothing(node: Node):
    headers = [
        (b"X-Quotagate-Principal", b"alice"),
        (b"X-Quotagate-Principal", b"bob"),
        (b"X-Quotagate-Client-Id", b"\xff"),
        (b"X-Quotagate-IP", b"10.0.0.7:80"),
    ]
    answer = await node.http.get(f"{CHECK}?requests=1.0&user=x&deny_status=500", headers=headers)
    assert not_understood(answer) == [
        "/requests",
        "/user",
        "/deny_status",
        "/X-Quotagate-Principal",
        "/X-Quotagate-Client-Id",
        "/X-Quotagate-IP",
    ]
    assert node.admission.calls == 0


async def test_no_more_than_a_hundred_faults_are_named(node: Node):
    query = "&".join(f"p{n}=1" for n in range(1_000))
    assert len(not_understood(await node.http.get(f"{CHECK}?{query}"))) == 100


async def test_head_refuses_without_a_body(node: Node):
    answer = await node.http.head(f"{CHECK}?x=1")
    assert (answer.status_code, answer.headers["x-throttle-ms"], answer.content) == (400, "0", b"")


async def test_only_the_exact_path_is_it(node: Node):
    for path in (f"{CHECK}/", f"{CHECK}/x", "/v1/checks"):
        assert (await node.http.get(path)).status_code == 401
        assert (await node.http.get(path, headers={"Authorization": KEY})).status_code == 404
    assert node.admission.calls == 0


@pytest.mark.usefixtures("way")
async def test_the_settings_name_the_headers_and_the_proxies():
    sources = Sources("X-User", "X-App", "X-Real-IP", (ip_network("10.0.0.0/8"),))
    async with serving(sources=sources) as node:
        headers = [
            ("X-User", "alice"),
            ("x-app", ""),
            ("X-Real-IP", "6.6.6.6"),
            ("X-Quotagate-Principal", "mallory"),
            ("X-Forwarded-For", "6.6.6.6, 203.0.113.9"),
            ("X-Forwarded-For", "10.0.0.1"),
        ]
        assert (await node.http.get(CHECK, headers=headers)).status_code == 200
        (ask,) = node.admission.asked
        assert (ask.principal, ask.client_id, ask.ip) == ("alice", "", "203.0.113.9")
        hidden = await node.http.get(CHECK, headers={"X-Forwarded-For": "203.0.113.9, unknown"})
        assert not_understood(hidden) == ["/X-Forwarded-For"]
        shown = (await node.http.get("/openapi.json")).json()["paths"][CHECK]["parameters"]
        named = [parameter["name"] for parameter in shown if parameter["in"] == "header"]
        assert named == ["X-User", "X-App", "X-Forwarded-For"]


# Access


async def test_outside_open_networks_a_key_is_needed_before_anything_is_read(closed: Node):
    for path in (CHECK, f"{CHECK}?x=1"):
        answer = await closed.http.get(path, headers={"X-Forwarded-For": "127.0.0.1"})
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Bearer")
    assert closed.admission.calls == 0
    assert (await closed.http.get(CHECK, headers={"Authorization": KEY})).status_code == 200
    not_understood(await closed.http.get(f"{CHECK}?x=1", headers={"Authorization": KEY}))


async def test_a_key_that_is_sent_must_be_valid_also_where_none_is_needed(node: Node):
    for sent in ("Bearer wrong", "Basic YWxpY2U6c2VjcmV0"):
        answer = await node.http.get(CHECK, headers={"Authorization": sent})
        assert (answer.status_code, answer.headers["content-type"]) == (401, "application/problem+json")
    assert node.admission.calls == 0


# Answers


def refused(outcome: Any, throttle_ms: int) -> PlannedAsk:
    by = LimitedBy("request_rate", "user=*", "user=alice")
    decision = Decision(outcome, throttle_ms, False, 1, "store", by)
    charge = charge_to("user=alice", Quota("request_rate", 5, "sampled_rate", "delay"))
    answer = Answer((ChargeResult(outcome, throttle_ms=throttle_ms, observed=5.0, remaining=0.4),))
    return PlannedAsk(Ask(), (charge,), None, decision=decision, answer=answer)


@pytest.mark.parametrize(
    ("query", "status"), [("", 429), ("?deny_status=429", 429), ("?deny_status=403", 403)]
)
async def test_throttled_check_has_retry_after(node: Node, query: str, status: int):
    node.admission.planned = refused("throttle", 5_300)
    answer = await node.http.get(CHECK + query)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-throttle-ms"] == "5300"
    assert answer.headers["retry-after"] == "6"
    assert answer.headers["ratelimit-policy"] == '"request_rate";q=50;w=10'
    assert answer.headers["ratelimit"] == '"request_rate";r=0;t=6'
    assert answer.json() == {
        "decision": "throttle",
        "throttle_ms": 5_300,
        "charged": False,
        "applied": 1,
        "source": "store",
        "limited_by": {"quota": "request_rate", "entity": "user=*", "bucket": "user=alice"},
    }


@pytest.mark.parametrize(("query", "status"), [("", 429), ("?deny_status=403", 403)])
async def test_rejected_check_has_no_retry_after(node: Node, query: str, status: int):
    node.admission.planned = refused("reject", 0)
    answer = await node.http.get(CHECK + query)
    assert answer.status_code == status
    assert answer.headers["x-throttle-ms"] == "0"
    assert "retry-after" not in answer.headers
    assert answer.headers["ratelimit"] == '"request_rate";r=0;t=10'
    assert answer.json()["decision"] == "reject"


async def test_internal_error_is_not_revealed(node: Node, capsys: pytest.CaptureFixture[str]):
    node.admission.broken = True
    answer = await node.http.get(CHECK)
    assert (answer.status_code, "secret" in answer.text) == (500, False)
    assert "a request failed" in capsys.readouterr().out


# The caller's clock


@pytest.mark.usefixtures("way")
async def test_without_at_ms_it_is_the_newest_time_seen():
    async with serving(clock="caller") as node:
        steps: list[tuple[str, Any, int]] = [
            (CHECK, None, 0),
            (f"{CHECK}?at_ms=5", None, 5),
            (CHECK, None, 5),
            ("/v1/decisions", {"usage": {"requests": 1}, "at_ms": 40}, 40),
            (CHECK, None, 40),
            (f"{CHECK}?at_ms=7", None, 7),
            (CHECK, None, 40),
            ("/v1/decisions", {"usage": {"requests": 1}, "at_ms": 99, "mode": "peek"}, 99),
            ("/v1/decisions", {"usage": {"requests": 1}, "at_ms": 20}, 20),
            (CHECK, None, 99),
        ]
        for path, body, at_ms in steps:
            answer = await node.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert node.admission.asked[-1].at_ms == at_ms
        batch = [{"usage": {"requests": 1}, "at_ms": at_ms} for at_ms in (300, 100)]
        assert (await node.ask({"asks": batch}, "/v1/decisions:batch")).status_code == 200
        batch[0]["usage"] = {}
        batch[1]["at_ms"] = 10**6
        assert (await node.ask({"asks": batch}, "/v1/decisions:batch")).status_code == 422
        assert not_understood(await node.http.get(f"{CHECK}?at_ms=500&x=1")) == ["/x"]
        await node.http.get(CHECK)
        assert node.admission.asked[-1].at_ms == 300


async def test_at_ms_is_unknown_under_the_stores_clock(node: Node):
    assert not_understood(await node.http.get(f"{CHECK}?at_ms=5")) == ["/at_ms"]
    await node.http.get(CHECK)
    assert node.admission.asked[0].at_ms is None


# Bodies, which are not read


@contextlib.asynccontextmanager
async def connected(node: Node) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


def head(method: str, principal: str, *headers: str) -> bytes:
    lines = [f"{method} {CHECK} HTTP/1.1", "Host: 127.0.0.1", f"X-Quotagate-Principal: {principal}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and headers of the next answer on a connection; its body is skipped."""
    found = (await reader.readuntil(b"\r\n\r\n")).lower()
    await reader.readexactly(int(found.split(b"content-length: ")[1].split(b"\r\n")[0]))
    return int(found.split(b" ")[1]), found


TOO_LONG = "x" * 513
GET_IN_A_BODY = head("GET", "smuggled")


@pytest.mark.parametrize("size", [1, 100_000, 8_000_000])
async def test_body_is_discarded_and_the_connection_stays_open(node: Node, size: int):
    """The body may look like another request, come late, and be larger than the node reads."""
    body = (GET_IN_A_BODY * (size // len(GET_IN_A_BODY) + 1))[:size]
    async with connected(node) as (reader, writer):
        for turn in range(3):
            writer.write(head("POST", f"turn {turn}", f"Content-Length: {size}"))
            assert (await read_answer(reader))[0] == 200
            writer.write(body)
        writer.write(head("GET", "last"))
        assert (await read_answer(reader))[0] == 200
    assert [ask.principal for ask in node.admission.asked] == ["turn 0", "turn 1", "turn 2", "last"]


async def test_body_that_arrives_during_the_decision_is_discarded(node: Node):
    node.admission.gate = asyncio.Event()
    async with connected(node) as (reader, writer):
        writer.write(head("POST", "early", f"Content-Length: {8_000_000}") + bytes(8_000_000))
        await eventually(lambda: node.admission.waiting)
        node.admission.gate.set()
        assert (await read_answer(reader))[0] == 200
        writer.write(head("GET", "last"))
        assert (await read_answer(reader))[0] == 200
    assert [ask.principal for ask in node.admission.asked] == ["early", "last"]


async def test_chunked_body_is_discarded(node: Node):
    chunk = b"%x\r\n%s\r\n" % (len(GET_IN_A_BODY), GET_IN_A_BODY)
    async with connected(node) as (reader, writer):
        writer.write(head("PUT", "chunked", "Transfer-Encoding: chunked") + chunk)
        assert (await read_answer(reader))[0] == 200
        writer.write(chunk * 1_000 + b"0\r\n\r\n" + head("GET", "last"))
        assert (await read_answer(reader))[0] == 200
    assert [ask.principal for ask in node.admission.asked] == ["chunked", "last"]


async def test_body_of_a_refused_check_is_discarded(node: Node):
    async with connected(node) as (reader, writer):
        writer.write(head("POST", TOO_LONG, f"Content-Length: {len(GET_IN_A_BODY)}"))
        assert (await read_answer(reader))[0] == 400
        writer.write(GET_IN_A_BODY + head("GET", "last"))
        assert (await read_answer(reader))[0] == 200
    assert [ask.principal for ask in node.admission.asked] == ["last"]


async def test_check_with_expect_continue_is_answered_at_once_and_closed(node: Node):
    """The body may still come or not, so no later bytes are taken for a request."""
    async with connected(node) as (reader, writer):
        writer.write(head("POST", "careful", f"Content-Length: {len(GET_IN_A_BODY)}", "Expect: 100-continue"))
        status, found = await read_answer(reader)
        assert (status, b"connection: close" in found) == (200, True)
        with contextlib.suppress(OSError):
            writer.write(GET_IN_A_BODY)
            await writer.drain()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    assert [ask.principal for ask in node.admission.asked] == ["careful"]


async def test_pipelined_checks_are_answered_in_order(node: Node):
    async with connected(node) as (reader, writer):
        writer.write(
            head("GET", "one") + head("POST", "two", "Content-Length: 2") + b"{}" + head("GET", TOO_LONG)
        )
        writer.write(head("GET", "three"))
        assert [(await read_answer(reader))[0] for _ in range(4)] == [200, 200, 400, 200]
    assert [ask.principal for ask in node.admission.asked] == ["one", "two", "three"]


async def test_an_upgrade_that_a_gateway_passes_on_is_not_taken(node: Node):
    async with connected(node) as (reader, writer):
        for turn in range(2):
            writer.write(head("GET", f"socket {turn}", "Connection: Upgrade", "Upgrade: websocket"))
            assert (await read_answer(reader))[0] == 200
    assert [ask.principal for ask in node.admission.asked] == ["socket 0", "socket 1"]
