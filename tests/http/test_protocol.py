"""One connection, raw: upgrades, trailers, what is no HTTP, heads without bounds, and callers that leave."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import pytest

from app.http.protocol import MAX_HEAD
from tests.fuzz.answers import Answer, Line
from tests.fuzz.messages import BATCH, CHECK, ONE, message
from tests.http.conftest import ADMIN, Node, eventually

BODY: Final = json.dumps({"principal": "alice", "usage": {"requests": 1}}).encode()
ASK: Final = message("POST", ONE, (), BODY)
LIVE: Final = message("GET", "/health/live")
H2C: Final = (
    "Connection: Upgrade, HTTP2-Settings",
    "Upgrade: h2c",
    "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
)


class Caller:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._line = Line(reader)

    def send(self, *texts: bytes) -> None:
        self.writer.write(b"".join(texts))

    async def hears(self, *statuses: int) -> list[Answer]:
        """The next answers, which have these statuses."""
        answers = []
        for status in statuses:
            answer = await self._line.next("GET")
            assert answer is not None, "the connection was closed instead"
            assert answer.status == status, answer
            answer.check("GET")
            answers.append(answer)
        return answers

    async def hears_no_more(self) -> None:
        assert await self._line.next("GET") is None


@asynccontextmanager
async def calling(node: Node) -> AsyncIterator[Caller]:
    reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
    try:
        async with asyncio.timeout(30):
            yield Caller(reader, writer)
    finally:
        writer.close()


@pytest.fixture
async def caller(node: Node) -> AsyncIterator[Caller]:
    async with calling(node) as caller:
        yield caller


# Upgrades


async def test_who_offers_http_2_is_answered_in_http_1(node: Node, caller: Caller):
    """As Java's client does with the first request of each connection."""
    caller.send(message("POST", ONE, H2C, BODY), ASK)
    await caller.hears(200, 200)
    assert [ask.principal for ask in node.admission.asked] == ["alice", "alice"]
    caller.send(message("POST", ONE, H2C, BODY))
    await caller.hears(200)


@pytest.mark.parametrize("chunked", [True, False])
async def test_the_body_after_an_upgrade_may_come_later(caller: Caller, *, chunked: bool):
    head, body = message("POST", ONE, H2C, length=f"{len(BODY)}"), BODY
    if chunked:
        head = message("POST", ONE, [*H2C, "Transfer-Encoding: chunked"])
        body = b"%x\r\n%b\r\n0\r\nX-Trailer: 1\r\n\r\n" % (len(BODY), BODY)
    caller.send(head, body[:10])
    await caller.writer.drain()
    await asyncio.sleep(0)
    caller.send(body[10:], LIVE)
    await caller.hears(200, 200)


async def test_the_body_after_an_upgrade_is_no_request(node: Node, caller: Caller):
    caller.send(message("POST", ONE, H2C, ASK), LIVE)
    refused, live = await caller.hears(400, 200)
    assert "not JSON" in refused.json()["detail"]
    assert live.json()["status"] == "live"
    assert node.admission.asked == []


async def test_many_upgrades_at_once_are_all_declined(caller: Caller):
    caller.send(message("POST", ONE, H2C, BODY) * 500)
    await caller.hears(*[200] * 500)


async def test_a_websocket_is_declined_and_the_connection_lives_on(caller: Caller):
    offer = (
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: AAAA",
    )
    caller.send(message("GET", "/health/live", offer))
    await caller.hears(200)
    caller.send(LIVE)
    await caller.hears(200)


@pytest.mark.parametrize("target", ["example.com:443", ONE, "/"])
async def test_a_tunnel_is_refused(node: Node, caller: Caller, target: str):
    caller.send(message("CONNECT", target))
    answer = (await caller.hears({ONE: 405, "/": 401}.get(target, 400)))[0]
    assert answer.headers[b"content-type"] == b"application/problem+json"
    assert node.admission.asked == []


# Trailers


async def test_trailers_are_no_headers(node: Node, caller: Caller):
    record = json.dumps({"usage": {"requests": 1}, "mode": "record"}).encode()
    chunks = b"%x\r\n%b\r\n0\r\n" % (len(record), record)
    trailers = f"Authorization: Bearer {ADMIN}\r\n\r\n".encode()
    caller.send(message("POST", ONE, ["Transfer-Encoding: chunked"]), chunks, trailers)
    await caller.hears(401)
    trailers = b"X-Quotagate-Principal: mallory\r\n\r\n"
    caller.send(message("POST", CHECK, ["Transfer-Encoding: chunked"]), b"1\r\nx\r\n0\r\n", trailers)
    await caller.hears(200)
    assert [ask.principal for ask in node.admission.asked] == [None]


# What is no HTTP


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        message("GET", "/\xff"),
        message("GET", "/health/live", ["No colon"]),
        message("POST", ONE, ["Transfer-Encoding: chunked"], BODY),
        message("POST", ONE, ["Transfer-Encoding: chunked"]) + b"x\r\n",
    ],
)
async def test_what_is_no_http_is_told_so_in_a_problem(node: Node, caller: Caller, sent: bytes):
    caller.send(sent)
    (answer,) = await caller.hears(400)
    assert answer.json()["detail"] == "This is no request of HTTP/1.1."
    assert answer.headers[b"connection"] == b"close"
    await caller.hears_no_more()
    assert node.admission.asked == []


async def test_what_was_asked_before_it_is_answered_before_it(node: Node, caller: Caller):
    node.admission.held = asyncio.Event()
    caller.send(ASK, LIVE, message("POST", BATCH, ["Transfer-Encoding: chunked"]), b"x\r\n", LIVE)
    await eventually(lambda: node.server.server_state.tasks)
    node.admission.held.set()
    await caller.hears(200, 200, 400)
    await caller.hears_no_more()


# Heads without bounds


@pytest.mark.parametrize(
    ("target", "field", "status"),
    [
        ("/health/live", "X: " + "a" * (MAX_HEAD - 100), 200),
        ("/health/live", "X: " + "a" * MAX_HEAD, 431),
        ("/health/live?" + "a" * MAX_HEAD, "X: 1", 431),
        ("/health/live", "\r\n".join(f"X-{n}: 1" for n in range(10_000)), 431),
    ],
)
async def test_a_head_has_its_bounds(caller: Caller, target: str, field: str, status: int):
    caller.send(message("GET", target, [field]))
    await caller.hears(status)


async def test_a_head_without_an_end_is_not_kept(caller: Caller):
    async def go_on() -> None:
        for _ in range(1_000):
            caller.send(b"a" * 2**20)
            await caller.writer.drain()

    caller.send(b"GET / HTTP/1.1\r\nX: ")
    with pytest.raises(ConnectionError):
        await go_on()


async def test_many_small_heads_together_are_not_a_large_one(caller: Caller):
    head = message("GET", "/health/live", ["X: " + "a" * 1_000])
    caller.send(head * 500)
    await caller.hears(*[200] * 500)


# Callers that take their time


@pytest.fixture
def hasty(node: Node) -> Node:
    """A node that does not wait long."""
    node.server.config.timeout_keep_alive = 0.2  # type: ignore[assignment]
    return node


async def test_who_says_nothing_is_let_go(hasty: Node):
    async with calling(hasty) as caller:
        await caller.hears_no_more()


@pytest.mark.parametrize(
    "sent", [b"P", ASK[:30], ASK[:-1], message("POST", ONE, ["Expect: 100-continue"], length="9")]
)
async def test_who_does_not_end_his_question_is_told_so(hasty: Node, sent: bytes):
    async with calling(hasty) as caller:
        caller.send(ASK, sent)
        await caller.hears(200, 408)
        await caller.hears_no_more()
    assert len(hasty.admission.asked) == 1


async def test_who_goes_on_with_a_body_that_was_refused_is_told_nothing_more(hasty: Node):
    async with calling(hasty) as caller:
        caller.send(message("POST", ONE, length=f"{2**21}"))
        await caller.hears(413)
        caller.send(b" " * 2**20)
        await caller.hears_no_more()
    async with calling(hasty) as caller:
        caller.send(message("POST", ONE, length=f"{2**21}"))
        await caller.hears(413)
        caller.send(b" " * 2**21, ASK)
        await caller.hears(200)
        await caller.hears_no_more()


async def test_the_answer_may_take_longer_than_the_question(hasty: Node):
    hasty.admission.held = asyncio.Event()
    async with calling(hasty) as caller, calling(hasty) as other:
        caller.send(ASK)
        await eventually(lambda: hasty.server.server_state.tasks)
        await other.hears_no_more()  # it was connected later, and has been let go by now
        hasty.admission.held.set()
        await caller.hears(200)


# Callers that leave


@pytest.mark.parametrize("asks", [1, 3])
async def test_who_ends_his_side_still_gets_his_answers(node: Node, caller: Caller, asks: int):
    node.admission.held = asyncio.Event()
    caller.send(ASK * asks)
    caller.writer.write_eof()
    await eventually(lambda: node.server.server_state.tasks)
    node.admission.held.set()
    await caller.hears(*[200] * asks)
    await caller.hears_no_more()


async def test_who_ends_his_side_amid_a_question_gets_the_answers_to_the_others(node: Node, caller: Caller):
    node.admission.held = asyncio.Event()
    caller.send(ASK, ASK, ASK[:-5])
    caller.writer.write_eof()
    await eventually(lambda: node.server.server_state.tasks)
    node.admission.held.set()
    await caller.hears(200, 200)
    await caller.hears_no_more()
    assert len(node.admission.asked) == 2


@pytest.mark.parametrize("sent", [b"", ASK[:20], ASK[:-5]])
async def test_who_ends_his_side_without_a_whole_question_is_let_go(node: Node, caller: Caller, sent: bytes):
    caller.send(sent)
    caller.writer.write_eof()
    await caller.hears_no_more()
    assert node.admission.asked == []


@pytest.mark.parametrize("how", ["reset", "end"])
@pytest.mark.parametrize("asks", [1, 2, 3])
async def test_who_leaves_is_written_to_no_more(
    node: Node, caplog: pytest.LogCaptureFixture, asks: int, how: str
):
    node.admission.held = asyncio.Event()
    async with calling(node) as caller:
        caller.send(ASK * asks)
        await eventually(lambda: node.server.server_state.tasks)
        if how == "reset":
            at_once = struct.pack("ii", 1, 0)
            caller.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
    if how == "reset":
        await eventually(lambda: not node.server.server_state.connections)
    node.admission.held.set()
    await eventually(lambda: not node.server.server_state.connections)
    await eventually(lambda: not node.server.server_state.tasks)
    assert how == "end" or node.admission.calls == 1, "what waited behind it was not asked any more"
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []
