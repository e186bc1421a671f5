"""One raw connection: upgrades, trailers, invalid HTTP, endless heads, and callers that disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import pytest

from app.http.server import acceptor, connections
from app.http.server.connections import Connections
from app.http.server.deadlines import RequestDeadline, UnreadDeadline
from app.http.server.hot_protocol import HotProtocol
from app.http.server.protocol import A_LITTLE, MAX_HEAD, MAX_PARAMETERS, MAX_TARGET, PIECE, WAITING, Protocol
from tests.fuzz.answers import Answer, Line
from tests.fuzz.messages import BATCH, CHECK, ONE, message
from tests.http.conftest import ADMIN, Node, eventually, serving

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

    def reads(self, *, on: bool) -> None:
        """Whether anything is read from the connection."""
        transport = self.writer.transport
        assert isinstance(transport, asyncio.Transport)
        if on:
            transport.resume_reading()
        else:
            transport.pause_reading()

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

    async def ends(self) -> None:
        """Wait until the connection is closed, whatever is received before."""
        with contextlib.suppress(ConnectionError):
            while await self._line.next("GET") is not None:
                pass


@asynccontextmanager
async def calling(node: Node) -> AsyncIterator[Caller]:
    reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
    try:
        async with asyncio.timeout(60):
            yield Caller(reader, writer)
    finally:
        writer.close()


@pytest.fixture
async def caller(node: Node) -> AsyncIterator[Caller]:
    async with calling(node) as caller:
        yield caller


# Upgrades


async def test_offer_of_http_2_is_answered_in_http_1(node: Node, caller: Caller):
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


async def test_body_after_an_upgrade_is_not_parsed_as_a_request(node: Node, caller: Caller):
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
    answer = (await caller.hears({ONE: 405, "/": 405}.get(target, 400)))[0]
    assert answer.headers[b"content-type"] == b"application/problem+json"
    assert node.admission.asked == []


# Trailers


async def test_trailers_are_not_treated_as_headers(node: Node, caller: Caller):
    record = json.dumps({"usage": {"requests": 1}, "mode": "record"}).encode()
    chunks = b"%x\r\n%b\r\n0\r\n" % (len(record), record)
    trailers = f"Authorization: Bearer {ADMIN}\r\n\r\n".encode()
    caller.send(message("POST", ONE, ["Transfer-Encoding: chunked"]), chunks, trailers)
    await caller.hears(401)
    trailers = b"X-Quotagate-Principal: mallory\r\n\r\n"
    caller.send(message("POST", CHECK, ["Transfer-Encoding: chunked"]), b"1\r\nx\r\n0\r\n", trailers)
    await caller.hears(200)
    assert [ask.principal for ask in node.admission.asked] == [None]


# Invalid HTTP


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
async def test_invalid_http_is_answered_with_a_problem(node: Node, caller: Caller, sent: bytes):
    caller.send(sent)
    (answer,) = await caller.hears(400)
    assert answer.json()["detail"] == "This is not an HTTP/1.1 request."
    assert answer.headers[b"connection"] == b"close"
    await caller.hears_no_more()
    assert node.admission.asked == []


async def test_requests_before_invalid_http_are_answered_first(node: Node, caller: Caller):
    node.admission.gate = asyncio.Event()
    caller.send(ASK, LIVE, message("POST", BATCH, ["Transfer-Encoding: chunked"]), b"x\r\n", LIVE)
    await eventually(lambda: node.admission.waiting)
    node.admission.gate.set()
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
        (CHECK, "X: " + "a" * (MAX_HEAD - 100), 200),
        (CHECK, "X: " + "a" * MAX_HEAD, 431),
        (f"{CHECK}?" + "a" * MAX_HEAD, "X: 1", 431),
        (f"{CHECK}?" + "a" * MAX_TARGET, "X: 1", 414),
        (f"{CHECK}?" + "a&" * MAX_PARAMETERS, "X: 1", 414),
        (CHECK, "\r\n".join(f"X-{n}: 1" for n in range(10_000)), 431),
    ],
)
async def test_large_head_is_refused(caller: Caller, target: str, field: str, status: int):
    caller.send(message("GET", target, [field]))
    await caller.hears(status)


async def test_endless_head_is_not_kept(caller: Caller):
    async def go_on() -> None:
        for _ in range(1_000):
            caller.send(b"a" * 2**20)
            await caller.writer.drain()

    caller.send(b"GET / HTTP/1.1\r\nX: ")
    with pytest.raises(ConnectionError):
        await go_on()


@pytest.mark.parametrize("target", ["/health/live", CHECK])
async def test_many_small_heads_together_are_not_a_large_one(caller: Caller, target: str):
    head = message("GET", target, ["X: " + "a" * 1_000])
    caller.send(head * 500)
    await caller.hears(*[200] * 500)


# Callers that take their time


@pytest.fixture
def hasty(node: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    """A node with short timeouts."""
    node.server.config.timeout_keep_alive = 0.2  # type: ignore[assignment]
    for name in ("HEAD_S", "BODY_S"):
        monkeypatch.setattr(RequestDeadline, name, 0.2)
    monkeypatch.setattr(RequestDeadline, "BODY_RATE", 2**26)
    monkeypatch.setattr(UnreadDeadline, "UNREAD_S", 0.2)
    return node


@pytest.fixture
def brief(hasty: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    """A node that also waits a short time for the first request of a connection."""
    for module in (connections, acceptor):
        monkeypatch.setattr(module, "FIRST_REQUEST_S", 1.0)
    return hasty


async def test_silent_connection_is_closed(brief: Node):
    async with calling(brief) as caller:
        await caller.hears_no_more()


@pytest.mark.parametrize(
    "sent", [b"P", ASK[:30], ASK[:-1], message("POST", ONE, ["Expect: 100-continue"], length="9")]
)
async def test_incomplete_request_times_out_with_408(hasty: Node, sent: bytes):
    async with calling(hasty) as caller:
        caller.send(ASK, sent)
        await caller.hears(200, 408)
        await caller.hears_no_more()
    assert len(hasty.admission.asked) == 1


async def test_refused_body_that_continues_gets_no_second_response(hasty: Node):
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


async def test_response_may_take_longer_than_the_request_timeout(brief: Node):
    brief.admission.gate = asyncio.Event()
    async with calling(brief) as caller:
        caller.send(ASK)
        await eventually(lambda: brief.admission.waiting)
        async with calling(brief) as other:
            await other.hears_no_more()  # it was connected later, and has been let go by now
        brief.admission.gate.set()
        await caller.hears(200)


@pytest.mark.parametrize("begin", [b"", ASK], ids=["at first", "after an answer"])
async def test_blank_lines_do_not_keep_a_connection(
    node: Node, monkeypatch: pytest.MonkeyPatch, begin: bytes
):
    monkeypatch.setattr(RequestDeadline, "HEAD_S", 0.2)
    async with calling(node) as caller:
        caller.send(begin)
        await caller.hears(*[200] * bool(begin))
        await drips(caller, b"\r\n")


@pytest.mark.parametrize(
    "drop", [b"1\r\nx\r\n", b"1;y=z\r\nx\r\n", b"0\r\nX: "], ids=["body", "extension", "trailer"]
)
async def test_slow_body_is_waited_for_by_its_size(hasty: Node, drop: bytes):
    async with calling(hasty) as caller:
        caller.send(message("POST", ONE, ["Transfer-Encoding: chunked"]), drop)
        await drips(caller, b"a" if b"X" in drop else drop)
    assert hasty.admission.asked == []


@pytest.mark.parametrize(
    "begin",
    [b"POST /v1/decisions HTTP/1.1\r\nX: ", message("POST", ONE, length="100000")],
    ids=["head", "body"],
)
async def test_request_that_drips_is_late(hasty: Node, begin: bytes):
    async with calling(hasty) as caller:
        caller.send(ASK, begin)
        await caller.hears(200)
        dripping = asyncio.create_task(drip_on(caller))
        await caller.hears(408)
        dripping.cancel()
        await caller.ends()
    assert len(hasty.admission.asked) == 1


async def drip_on(caller: Caller) -> None:
    while True:
        caller.send(b"a")
        await asyncio.sleep(0.01)


async def drips(caller: Caller, drop: bytes) -> None:
    """Send one small piece after the other until the connection is closed."""
    closed = asyncio.create_task(caller.ends())
    while not closed.done():
        caller.send(drop)
        await asyncio.wait([closed], timeout=0.01)


async def test_a_large_body_is_given_more_time(node: Node, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(RequestDeadline, "BODY_S", 0.1)
    monkeypatch.setattr(RequestDeadline, "BODY_RATE", len(BODY) / 20)  # twenty seconds for it
    async with calling(node) as caller, calling(node) as other:
        caller.send(ASK[:-5])
        other.send(message("POST", ONE, length="1"))
        await other.hears(408)
        caller.send(ASK[-5:])
        await caller.hears(200)


# Callers that do not read

OPENAPI: Final = message("GET", "/openapi.json")
MANY: Final = message("POST", BATCH, (), b'{"asks":[' + b",".join([BODY] * 1_000) + b"]}")
"""A batch whose answer is as large as its request."""


def only(node: Node) -> HotProtocol | Protocol | None:
    """The only open connection of the node; None before it has a protocol."""
    for found in node.server.server_state.connections:
        assert isinstance(found, HotProtocol | Protocol)
        return found
    return None


def is_unread(node: Node) -> bool:
    """Whether the only connection waits until its caller reads answers."""
    found = only(node)
    return (
        found._is_write_paused if isinstance(found, HotProtocol) else bool(found and found.flow.write_paused)
    )


def is_read_paused(node: Node) -> bool:
    """Whether nothing is read from the only connection."""
    found = only(node)
    return found._is_read_paused if isinstance(found, HotProtocol) else bool(found and found.flow.is_blocked)


@pytest.mark.parametrize("sent", [OPENAPI * 10_000, MANY * 200], ids=["document", "batches"])
async def test_pipelining_caller_that_reads_nothing_is_closed_and_holds_little(
    node: Node, monkeypatch: pytest.MonkeyPatch, sent: bytes
):
    monkeypatch.setattr(UnreadDeadline, "UNREAD_S", 0.5)
    async with calling(node) as caller:
        caller.reads(on=False)
        caller.send(sent)
        await eventually(lambda: is_unread(node))
        connection = only(node)
        if isinstance(connection, Protocol):
            assert len(connection.pipeline) < WAITING + PIECE / 20
        assert is_read_paused(node)
        await node.ask(BODY)  # others are answered
        await eventually(lambda: connection not in node.server.server_state.connections)
    await eventually(lambda: not node.server.server_state.tasks)


@pytest.mark.parametrize(
    ("sent", "answers"),
    [
        ([OPENAPI] * 40 + [LIVE] * 1_000 + [ASK], 1_041),
        ([MANY] * 40 + [ASK] * 1_000, 1_040),
        ([MANY] * 40 + [LIVE], 41),
    ],
    ids=["documents", "batches", "handed over"],
)
async def test_late_reader_gets_all_responses(node: Node, caller: Caller, sent: list[bytes], answers: int):
    caller.reads(on=False)
    caller.send(*sent)
    await eventually(lambda: is_unread(node))
    caller.reads(on=True)
    await caller.hears(*[200] * answers)
    assert len(node.admission.asked) == sent.count(ASK) + 1_000 * sent.count(MANY)


@pytest.mark.parametrize("next_", [LIVE, ASK], ids=["other", "hot"])
async def test_queued_requests_are_bounded(node: Node, caller: Caller, next_: bytes):
    node.admission.gate = asyncio.Event()
    caller.send(ASK, next_ * 2_000)
    await eventually(lambda: is_read_paused(node))
    found = only(node)
    if isinstance(found, Protocol):
        assert WAITING <= len(found.pipeline) < WAITING + PIECE / len(LIVE)
    else:
        assert found is not None
        assert len(found._data) < 2 * ONE_READ
    node.admission.gate.set()
    await caller.hears(*[200] * 2_001)


# Callers that send unwanted bytes


class Read:
    """Counts the bytes that a node reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size = 0
        for kind in (HotProtocol, Protocol):
            monkeypatch.setattr(kind, "data_received", self._counted(kind.data_received))
        monkeypatch.setattr(Protocol, "take_over", self._counted_once(Protocol.take_over))

    def _counted(self, read: Callable[..., None]) -> Callable[..., None]:
        def counted(connection: object, data: bytes) -> None:
            self.size += len(data)
            read(connection, data)

        return counted

    def _counted_once(self, take_over: Callable[..., None]) -> Callable[..., None]:
        def counted(connection: Protocol, transport: object, data: bytes, **more: object) -> None:
            self.size -= len(data)
            take_over(connection, transport, data, **more)

        return counted


ONE_READ: Final = 256 * 1_024


@pytest.mark.parametrize(
    ("head", "status", "most"),
    [
        (b"\0", 400, A_LITTLE),
        (message("POST", ONE, length=f"{2**40}"), 413, A_LITTLE),
        (message("POST", ONE, ["Authorization: Bearer x"], length=f"{2**40}"), 401, A_LITTLE),
        (message("POST", CHECK, length=f"{2**40}"), 200, A_LITTLE),
        (message("POST", ONE, ["Transfer-Encoding: chunked"]) + b"%x\r\n" % 2**40, 413, 17 * 2**20),
        (message("POST", ONE, ["Transfer-Encoding: chunked"]) + b"0\r\nX: ", 400, 2 * MAX_HEAD + A_LITTLE),
    ],
)
async def test_little_is_read_after_the_final_response(
    node: Node, monkeypatch: pytest.MonkeyPatch, head: bytes, status: int, most: int
):
    read = Read(monkeypatch)
    async with calling(node) as caller:

        async def go_on() -> None:
            while True:
                caller.send(b"a" * 2**16)
                await caller.writer.drain()

        caller.send(head)
        going_on = asyncio.create_task(go_on())
        await caller.hears(status)
        with pytest.raises(ConnectionError):
            await going_on
    assert read.size <= most + 2 * ONE_READ
    await eventually(lambda: not node.server.server_state.connections)


async def test_nothing_is_read_after_garbage_until_responses_are_sent(
    node: Node, monkeypatch: pytest.MonkeyPatch, caller: Caller
):
    read = Read(monkeypatch)
    node.admission.gate = asyncio.Event()
    caller.send(ASK, b"\0" * 2**24)
    await eventually(lambda: is_read_paused(node))
    size = read.size
    await node.http.get("/health/live")
    assert read.size <= size + ONE_READ  # including the bytes of the other connection
    node.admission.gate.set()
    await caller.hears(200, 400)


# The host


@pytest.mark.parametrize(
    "hosts",
    [
        [],
        ["Host: 127.0.0.1", "Host: 127.0.0.1"],
        ["Host: a b"],
        ["Host: a/b"],
        ["Host: [::1"],
        ["Host: [1:2]"],
        ["Host: a:b"],
        ["Host: a:70000"],
        ["Host: " + "a" * 300],
    ],
)
async def test_a_request_names_its_host_once(node: Node, caller: Caller, hosts: list[str]):
    caller.send(LIVE, message("GET", "/health/live", hosts, host=False), LIVE)
    _, refused = await caller.hears(200, 400)
    assert "names its host exactly once" in refused.json()["detail"]
    await caller.hears_no_more()


@pytest.mark.parametrize(
    "head",
    [
        message("GET", "/health/live", ["Host:"], host=False),
        message("GET", "/health/live", ["Host: [::1]:8080"], host=False),
        message("GET", "/health/live", ["Host: Quotagate.Example:80"], host=False),
        message("GET", "/health/live", host=False, version="HTTP/1.0"),
    ],
)
async def test_a_host_may_be_empty_and_in_http_1_0_it_may_be_missing(caller: Caller, head: bytes):
    caller.send(head)
    await caller.hears(200)


# Too many connections


@pytest.mark.usefixtures("way")
async def test_connection_above_the_limit_is_closed_without_a_response():
    refused: list[tuple[str, str]] = []
    connections = Connections(3, 2)
    connections.refused = lambda port, reason: refused.append((port, reason))
    async with serving(connections=connections) as node:
        async with calling(node) as one, calling(node) as two:
            for caller in (one, two):
                caller.send(LIVE)
                await caller.hears(200)
            async with calling(node) as three:
                await three.ends()
            assert refused == [("http", "address")]
            one.send(LIVE)
            await one.hears(200)
        await eventually(lambda: not node.server.server_state.connections)
        async with calling(node) as four:
            four.send(LIVE)
            await four.hears(200)


# Callers that leave


@pytest.mark.parametrize("asks", [1, 3])
async def test_half_closed_client_still_gets_its_responses(node: Node, caller: Caller, asks: int):
    node.admission.gate = asyncio.Event()
    caller.send(ASK * asks)
    caller.writer.write_eof()
    await eventually(lambda: node.admission.waiting)
    node.admission.gate.set()
    await caller.hears(*[200] * asks)
    await caller.hears_no_more()


async def test_half_close_during_a_request_keeps_the_responses_to_the_others(node: Node, caller: Caller):
    node.admission.gate = asyncio.Event()
    caller.send(ASK, ASK, ASK[:-5])
    caller.writer.write_eof()
    await eventually(lambda: node.admission.waiting)
    node.admission.gate.set()
    await caller.hears(200, 200)
    await caller.hears_no_more()
    assert len(node.admission.asked) == 2


@pytest.mark.parametrize("sent", [b"", ASK[:20], ASK[:-5]])
async def test_half_close_without_a_whole_request_closes_the_connection(
    node: Node, caller: Caller, sent: bytes
):
    caller.send(sent)
    caller.writer.write_eof()
    await caller.hears_no_more()
    assert node.admission.asked == []


@pytest.mark.parametrize("how", ["reset", "end"])
@pytest.mark.parametrize("asks", [1, 2, 3])
async def test_disconnected_client_gets_no_response(
    node: Node, caplog: pytest.LogCaptureFixture, asks: int, how: str
):
    node.admission.gate = asyncio.Event()
    async with calling(node) as caller:
        caller.send(ASK * asks)
        await eventually(lambda: node.admission.waiting)
        if how == "reset":
            at_once = struct.pack("ii", 1, 0)
            caller.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
    if how == "reset":
        await eventually(lambda: not node.server.server_state.connections)
    node.admission.gate.set()
    await eventually(lambda: not node.server.server_state.connections)
    await eventually(lambda: not node.admission.waiting)
    await eventually(lambda: not node.server.server_state.tasks)
    assert how == "end" or node.admission.calls == 1, "what waited behind it was not asked any more"
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []
