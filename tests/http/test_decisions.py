"""The hot routes on a real server: order of refusals, bounds, and connections that stay good."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from app.http.wire import MAX_BODY
from tests.http.conftest import ADMIN, Node, eventually, serving

ONE = "/v1/decisions"
BATCH = "/v1/decisions:batch"
ASK = {"usage": {"requests": 1}, "principal": "alice"}
KEY = f"Bearer {ADMIN}"


@pytest.fixture
async def closed(way: str) -> AsyncIterator[Node]:
    async with serving(open_to="") as node:
        yield node


def refused(answer: httpx.Response, status: int) -> str:
    """The detail of a problem, which has this status."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == status
    detail: str = answer.json()["detail"]
    return detail


async def test_one_ask_is_decided(node: Node):
    answer = await node.ask(ASK)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {
        "decision": "admit",
        "throttle_ms": 0,
        "charged": True,
        "applied": 0,
        "source": "store",
        "limited_by": None,
    }
    assert [ask.principal for ask in node.admission.asked] == ["alice"]


async def test_a_batch_is_decided_in_order_in_one_call(node: Node):
    answer = await node.ask({"asks": [ASK | {"principal": str(n)} for n in range(1000)]}, BATCH)
    assert [decision["applied"] for decision in answer.json()["decisions"]] == list(range(1000))
    assert [ask.principal for ask in node.admission.asked] == [str(n) for n in range(1000)]
    assert node.admission.calls == 1


async def test_content_type_is_not_asked_for(node: Node):
    answer = await node.ask(json.dumps(ASK).encode(), content_type="text/plain")
    assert answer.status_code == 200


async def test_one_bad_ask_fails_its_batch_before_anything_is_decided(node: Node):
    answer = await node.ask({"asks": [ASK] * 999 + [{"usage": {"requests": -1}}]}, BATCH)
    refused(answer, 422)
    assert answer.json()["errors"] == [{"field": "/asks/999/usage/requests", "message": "must be at least 0"}]
    assert node.admission.calls == 0


@pytest.mark.parametrize("asks", [0, 1001])
async def test_a_batch_has_its_bounds(node: Node, asks: int):
    answer = await node.ask({"asks": [ASK] * asks}, BATCH)
    refused(answer, 422)
    assert answer.json()["errors"][0]["field"] == "/asks"


@pytest.mark.parametrize("body", [b"", b"{", b'{"usage": {"requests": NaN}}', b"\xff"])
@pytest.mark.parametrize("path", [ONE, BATCH])
async def test_invalid_json_is_400(node: Node, path: str, body: bytes):
    refused(await node.ask(body, path), 400)


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"])
@pytest.mark.parametrize("path", [ONE, BATCH])
async def test_other_methods_are_405(node: Node, path: str, method: str):
    answer = await node.http.request(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"


# In which order refusals come


async def test_access_comes_first(closed: Node):
    refused(await closed.http.get(ONE), 401)
    refused(await closed.ask(b"x" * (MAX_BODY + 1)), 401)
    refused(await closed.ask(b"{"), 401)


async def test_then_the_method_then_the_size_then_json_then_the_content(node: Node):
    refused(await node.http.put(ONE, content=b"x" * (MAX_BODY + 1)), 405)
    refused(await node.ask(b"x" * (MAX_BODY + 1)), 413)
    refused(await node.ask(b'{"usage": {"requests": true}, "mode": "record"} x'), 400)
    refused(await node.ask({"usage": {"requests": True}, "mode": "record"}), 422)


@pytest.mark.parametrize("more", [{"mode": "record"}, {"mode": "refund"}, {"cluster_action": True}])
async def test_accounting_needs_a_key(node: Node, more: dict[str, object]):
    answer = await node.ask(ASK | more)
    assert "account" in refused(answer, 401)
    assert answer.headers["www-authenticate"].startswith("Bearer")
    refused(await node.ask({"asks": [ASK, ASK | more]}, BATCH), 401)
    assert node.admission.calls == 0
    assert (await node.ask(ASK | more, authorization=KEY)).status_code == 200


async def test_a_key_that_is_sent_must_be_valid_also_where_none_is_needed(node: Node):
    refused(await node.ask(ASK, authorization="Bearer wrong"), 401)
    assert node.admission.calls == 0


# Bodies


async def test_a_body_may_have_one_mebibyte(node: Node):
    body = json.dumps(ASK).encode()
    assert (await node.ask(body + b" " * (MAX_BODY - len(body)))).status_code == 200
    refused(await node.ask(body + b" " * (MAX_BODY - len(body) + 1)), 413)


async def test_two_megabytes_in_chunks_are_413(node: Node):
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(32):
            yield b" " * 65_536

    refused(await node.http.post(ONE, content=chunks()), 413)
    assert node.admission.calls == 0


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bytes]:
    """Status, headers and body of the next answer on a connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return int(head.split(b" ")[1]), head.lower(), await reader.readexactly(length)


def post(body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = [
        f"POST {ONE} HTTP/1.1",
        "Host: 127.0.0.1",
        *headers,
        f"Content-Length: {len(body) if length is None else length}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def test_a_large_body_is_refused_by_its_head_and_the_connection_lives_on(node: Node):
    reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
    body = b" " * (2 * MAX_BODY)
    writer.write(post(b"", length=len(body)))
    status, _, _ = await read_answer(reader)
    assert status == 413
    writer.write(body)
    writer.write(post(json.dumps(ASK).encode()))
    status, _, answer = await read_answer(reader)
    assert status == 200
    assert json.loads(answer)["decision"] == "admit"
    writer.close()


async def test_large_body_with_expect_continue_is_refused_and_closed(node: Node):
    reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
    writer.write(post(b"", "Expect: 100-continue", length=2 * MAX_BODY))
    status, head, _ = await read_answer(reader)
    assert status == 413
    assert b"connection: close" in head
    assert await reader.read() == b""
    writer.close()


async def test_ask_with_expect_continue_gets_100(node: Node):
    reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
    body = json.dumps(ASK).encode()
    writer.write(post(b"", "Expect: 100-continue", length=len(body)))
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
    writer.write(body)
    assert (await read_answer(reader))[0] == 200
    writer.close()


async def test_caller_that_disconnects_during_its_body_leaves_nothing_behind(
    node: Node, caplog: pytest.LogCaptureFixture
):
    _, writer = await asyncio.open_connection("127.0.0.1", node.port)
    writer.write(post(b'{"usage"', length=1000))
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await node.ask(ASK)).status_code == 200
    assert node.admission.calls == 1
    assert not caplog.records


async def test_pipelined_asks_are_answered_in_order(node: Node):
    reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
    bodies = [json.dumps(ASK).encode(), b"{", json.dumps(ASK).encode()]
    writer.write(b"".join(post(body) for body in bodies))
    assert [(await read_answer(reader))[0] for _ in bodies] == [200, 400, 200]
    writer.close()


# Faults on our side


async def test_internal_error_is_500_and_not_revealed(node: Node, capsys: pytest.CaptureFixture[str]):
    node.admission.broken = True
    assert "log" in refused(await node.ask(ASK), 500)
    answer = await node.ask({"asks": [ASK]}, BATCH)
    refused(answer, 500)
    assert "secret" not in answer.text
    assert "a request failed" in capsys.readouterr().out
    node.admission.broken = False
    assert (await node.ask(ASK)).status_code == 200


async def test_ask_in_flight_is_answered_when_the_server_stops(node: Node):
    node.admission.gate = asyncio.Event()
    answer = asyncio.create_task(node.ask(ASK))
    await eventually(lambda: node.admission.waiting)
    node.server.should_exit = True
    await eventually(lambda: node.drain.has_begun)
    node.admission.gate.set()
    assert (await answer).json()["decision"] == "admit"


@pytest.mark.usefixtures("way")
async def test_at_ms_is_required_under_the_callers_clock():
    async with serving(clock="caller") as node:
        assert (await node.ask(ASK)).json()["errors"][0]["field"] == "/at_ms"
        assert (await node.ask(ASK | {"at_ms": 7})).status_code == 200
        assert node.admission.asked[0].at_ms == 7
