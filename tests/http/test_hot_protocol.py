"""The hot protocol gives the same bytes as uvicorn's, behaves the same, and hands over the rest."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable
from hashlib import sha256
from random import Random
from typing import Final

import pytest

from app.admission.errors import OverloadedError
from app.domain.binding import Binding
from app.domain.grant import BINDABLE, Grant
from app.http.access.access import _ADDRESS
from app.http.server.deadlines import RequestDeadline, UnreadDeadline
from app.http.server.hot import UNCOUNTED, BodyRoute
from app.http.server.hot_protocol import MAX_HEAD, MAX_LINE, HotProtocol
from app.http.server.intake import MAX_OF_CALLER, Intake
from app.http.server.protocol import AT_ONCE, WAITING, Protocol
from app.http.wire import MAX_BODY
from tests.fuzz.cases import Request
from tests.fuzz.generate import case
from tests.fuzz.messages import BATCH, CHECK, ONE, in_pieces, message
from tests.http.conftest import ADMIN
from tests.http.ways import QUIET_ITERATIONS, Both, Connection, HeldStore, InMemory, real

ASK: Final = {"principal": "alice", "usage": {"requests": 1}}
BODY: Final = json.dumps(ASK).encode()
ONE_ASK: Final = message("POST", ONE, (), BODY)
TWO_ASKS: Final = message("POST", BATCH, (), json.dumps({"asks": [ASK, ASK]}).encode())
A_CHECK: Final = message("GET", f"{CHECK}?requests=2", ["X-Quotagate-Principal: alice"])
LIVE: Final = message("GET", "/health/live")
KEY: Final = f"Authorization: Bearer {ADMIN}"
RECORD: Final = json.dumps({**ASK, "mode": "record"}).encode()
WRONG: Final = "Authorization: Bearer wrong"
EXPECT: Final = "Expect: 100-continue"
CHUNKED: Final = "Transfer-Encoding: chunked"
CHUNKS: Final = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)

REQUESTS: Final = {
    "an ask": ONE_ASK,
    "a batch": TWO_ASKS,
    "a check": A_CHECK,
    "a check by POST": message("POST", CHECK, (), b""),
    "a check with a body": message("POST", CHECK, (), b"ignored"),
    "a check by HEAD": message("HEAD", CHECK),
    "with a key": message("POST", ONE, [KEY], RECORD),
    "without the key it needs": message("POST", ONE, (), RECORD),
    "with a wrong key": message("POST", ONE, [WRONG], BODY),
    "a check with a wrong key": message("GET", CHECK, [WRONG]),
    "from another site": message("POST", ONE, ["Origin: http://evil.example"], BODY),
    "no JSON": message("POST", ONE, (), b"{"),
    "an invalid ask": message("POST", ONE, (), b'{"usage": {}}'),
    "an invalid check": message("GET", f"{CHECK}?requests=x"),
    "no body": message("POST", ONE),
    "an empty body": message("POST", ONE, (), b""),
    "another method": message("GET", ONE),
    "a body after another method": message("PUT", ONE, (), BODY),
    "an escaped path": message("POST", "/v1/decision%73", (), BODY),
    "an absolute target": message("POST", f"http://127.0.0.1{ONE}", (), BODY),
    "a query": message("POST", f"{ONE}?a=b", (), BODY),
    "blanks before the version": b"GET /v1/check?listener=EXTERNAL   HTTP/1.1\r\nHost: a\r\n\r\n",
    "blanks after the method": b"GET   /v1/check?listener=EXTERNAL HTTP/1.1\r\nHost: a\r\n\r\n",
    "a length with a zero": message("POST", ONE, (), BODY, length=f"0{len(BODY)}"),
    "a check by PROPFIND": message("PROPFIND", CHECK, (), b""),
    "chunks": message("POST", ONE, [CHUNKED]) + CHUNKS,
    "Expect": message("POST", ONE, [EXPECT], BODY),
    "an upgrade": message("POST", ONE, ["Connection: Upgrade", "Upgrade: h2c"], BODY),
    "HTTP/1.0": message("POST", ONE, (), BODY, version="HTTP/1.0"),
    "the last one": message("POST", ONE, ["Connection: close"], BODY),
    "no host": message("POST", ONE, (), BODY, host=False),
    "a negative length": message("POST", ONE, length="-1"),
    "too large": message("POST", ONE, length=str(MAX_BODY + 1)),
    "another route": LIVE,
    "nothing there": message("GET", "/v1/nothing"),
    "no HTTP": b"\0\0",
}


def hot_of(connection: Connection) -> HotProtocol:
    """The connection's protocol, which is still the hot one."""
    assert isinstance(connection.protocol, HotProtocol)
    return connection.protocol


# The same bytes


@pytest.fixture(scope="module")
def nodes() -> Both:
    """Two nodes for tests that change nothing about them."""
    return Both()


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS.keys())
async def test_a_request_that_is_split_anywhere_is_answered_the_same(nodes: Both, request_: bytes):
    whole = await nodes.answer(request_)
    assert whole.startswith(b"HTTP/1.1 ")
    for at in range(1, len(request_)):
        await nodes.answer(ONE_ASK, ONE_ASK, request_[:at], request_[at:], ONE_ASK)


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS.keys())
async def test_a_request_that_is_repeated_is_answered_the_same(nodes: Both, request_: bytes):
    await nodes.answer(*[request_] * 4)
    await nodes.answer(request_ * 4)
    await nodes.answer(b"".join([request_, ONE_ASK, A_CHECK, LIVE, TWO_ASKS, request_]))
    for byte in (b"\r\n", b"P", b"\0"):
        await nodes.answer(request_, request_ + byte, request_)


@pytest.mark.parametrize("target", [ONE, f"{ONE}?a=b", CHECK, "/v1/nothing", "/v1/quotas"])
async def test_a_length_of_many_digits_is_answered_the_same(nodes: Both, target: str):
    """Python reads no number of more than 4,300 digits."""
    for digits in (10, 20, 21, 5_000):
        request_ = message("POST", target, (), BODY, length=str(len(BODY)).zfill(digits))
        assert (await nodes.answer(request_, ONE_ASK)).startswith(b"HTTP/1.1 ")


@pytest.mark.parametrize("seed", range(20))
async def test_mixed_requests_on_one_connection_are_answered_the_same(nodes: Both, seed: int):
    chance = Random(seed)
    lasting = [text for name, text in REQUESTS.items() if name not in {"no HTTP", "the last one", "HTTP/1.0"}]
    for _ in range(10):
        sent = b"".join(chance.choices([ONE_ASK, TWO_ASKS, A_CHECK, LIVE, chance.choice(lasting)], k=30))
        await nodes.answer(*in_pieces(chance, sent, 20))


@pytest.mark.parametrize("seed", range(10))
async def test_fuzzed_requests_are_answered_the_same(nodes: Both, seed: int):
    chance = Random(seed)
    for number in range(0, 1_000, 5):
        cases = [case(seed, number + n) for n in range(5)]
        pieces = [
            text for each in cases for text in ((each.text,) if isinstance(each, Request) else each.sends)
        ]
        texts = [text for text in pieces if len(text) < 2**16 and b"/metrics" not in text]
        if not texts:
            continue
        joined = b"".join(texts)
        for sent in (texts, [text for text in texts for _ in range(2)], in_pieces(chance, joined, 10)):
            await nodes.answer(*sent)


async def test_a_certificate_names_the_principal_by_either_protocol(nodes: Both):
    certificate = {"subject": ((("commonName", "bob"),),)}
    usage = message("POST", ONE, (), b'{"usage": {"requests": 1}}')
    answers = await nodes.answer(usage, usage, ONE_ASK, usage, usage + ONE_ASK, certificate=certificate)
    assert answers.count(b"HTTP/1.1 200") == 4
    assert answers.count(b"HTTP/1.1 403") == 2


async def test_the_callers_clock_is_the_same():
    timed = message("POST", ONE, (), json.dumps({**ASK, "at_ms": 5}).encode())
    at = message("GET", f"{CHECK}?at_ms=7")
    answers = await Both(clock="caller").answer(timed, timed, A_CHECK, at, A_CHECK, ONE_ASK, timed)
    assert answers.count(b"HTTP/1.1 200") == 6


@pytest.fixture(params=[True, False], ids=["hot", "uvicorn"])
async def connection(request: pytest.FixtureRequest) -> Connection:
    """A connection by either protocol."""
    return Connection(hot=request.param)


async def test_a_request_may_stand_in_a_body(nodes: Both):
    """Bytes count as a request only where one begins."""
    about = message("POST", ONE, (), ONE_ASK)
    answers = await nodes.answer(ONE_ASK, about[: -len(ONE_ASK)], ONE_ASK, about, ONE_ASK)
    assert answers.count(b"HTTP/1.1 200") == 2
    assert answers.count(b"HTTP/1.1 400") == 2


async def test_another_body_of_the_same_size_is_another_ask(connection: Connection):
    for name in ("alice", "clara", "diana"):
        await connection.send(message("POST", ONE, (), BODY.replace(b"alice", name.encode())))
    assert [ask.principal for ask in connection.admission.asked] == ["alice", "clara", "diana"]
    connection.end()


# Hand-over

STAYING: Final = {
    "an ask",
    "a batch",
    "a check",
    "a check by POST",
    "with a key",
    "without the key it needs",
    "with a wrong key",
    "a check with a wrong key",
    "from another site",
    "no JSON",
    "an invalid ask",
    "an invalid check",
    "no body",
    "an empty body",
    "a query",
    "a length with a zero",
    "the last one",
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_only_requests_that_are_not_ordinary_hand_their_connection_over(name: str):
    connection = Connection()
    await connection.send(ONE_ASK, REQUESTS[name])
    assert connection.was_handed_over() is (name not in STAYING)
    await connection.send(ONE_ASK, REQUESTS[name])
    assert connection.node.metrics._counts.connections_handed_over == (name not in STAYING)
    connection.end()


async def test_answers_keep_their_order_when_a_connection_is_handed_over():
    connection = Connection()
    connection.admission.gate = asyncio.Event()
    answers = await connection.send(ONE_ASK + A_CHECK + LIVE + ONE_ASK, ONE_ASK)
    assert answers == b""
    assert not connection.was_handed_over(), "what is in flight is answered first"
    connection.admission.gate.set()
    answers = await connection.settle()
    assert answers.count(b"HTTP/1.1 200") == 5
    assert answers.count(b'"decision"', 0, answers.index(b'"live"')) == 2
    assert connection.was_handed_over()
    connection.end()


async def test_answer_in_the_outbox_goes_before_those_of_the_other_protocol():
    """An ordinary request and another one, read in the same iteration of the loop."""
    connection = Connection()
    connection.protocol.data_received(ONE_ASK)
    connection.protocol.data_received(b"\0")
    answers = await connection.settle()
    assert answers.index(b"HTTP/1.1 200") < answers.index(b"HTTP/1.1 400")
    connection.end()


async def test_connection_is_handed_over_once_its_answers_are_read():
    connection = Connection()
    connection.line.unread = 2**20
    connection.protocol.pause_writing()
    assert await connection.deliver(LIVE) == b""
    assert not connection.was_handed_over()
    connection.line.unread = 0
    connection.protocol.resume_writing()
    assert (await connection.settle()).count(b"HTTP/1.1 200") == 1
    assert connection.was_handed_over()
    assert is_read(connection)
    connection.end()


async def test_other_protocol_waits_for_the_reader_of_earlier_answers():
    """The hand-over first sends the waiting answers. They fill the buffer, so reading waits for room."""
    connection = Connection()
    connection.protocol.data_received(ONE_ASK)
    connection.line.fills_up = True
    connection.protocol.data_received(LIVE)
    assert (await connection.settle()).count(b"HTTP/1.1 200") == 1
    assert connection.was_handed_over()
    assert not is_read(connection)
    connection.line.fills_up = False
    connection.line.unread = 0
    connection.protocol.resume_writing()
    assert (await connection.settle()).count(b"HTTP/1.1 200") == 2
    assert is_read(connection)
    connection.end()


async def test_half_closed_caller_gets_its_answers_from_both_protocols():
    connection = Connection()
    connection.admission.gate = asyncio.Event()
    await connection.send(ONE_ASK + LIVE + ONE_ASK)
    assert connection.protocol.eof_received()
    connection.admission.gate.set()
    assert (await connection.settle()).count(b"HTTP/1.1 200") == 3
    assert connection.was_handed_over()
    assert connection.line.is_closing()


async def test_drain_ends_a_connection_that_is_handed_over():
    connection = Connection()
    await connection.send(ONE_ASK)
    connection.node.drain.has_begun = True
    connection.protocol.drain()
    answers = await connection.send(LIVE)
    assert connection.was_handed_over()
    assert answers.count(b"connection: close") == 1
    assert connection.line.is_closing()


async def test_endless_head_ends_although_its_connection_is_handed_over():
    connection = Connection()
    endless = message("POST", ONE, ["X: " + "a" * 2 * MAX_HEAD])
    await connection.send(ONE_ASK, *[endless[at : at + 1_024] for at in range(0, MAX_HEAD + 2_048, 1_024)])
    assert connection.was_handed_over()
    connection.loop.advance(RequestDeadline.HEAD_S * 1.1)
    assert (await connection.settle()).count(b"HTTP/1.1 408") == 1
    connection.loop.advance(Protocol.LINGER_S)
    assert connection.line.is_closing()


@pytest.mark.parametrize(("size", "is_handed_over"), [(MAX_HEAD - 1_024, False), (MAX_HEAD, True)])
async def test_large_heads_are_handed_over(size: int, *, is_handed_over: bool):
    connection = Connection()
    large = message("POST", ONE, ["X: " + "a" * size], BODY)
    assert (await connection.send(large, large)).count(b"HTTP/1.1 200") == 2
    assert connection.was_handed_over() is is_handed_over
    connection.end()


async def test_long_request_lines_are_handed_over():
    connection = Connection()
    long = "&".join(["a=b"] * (MAX_LINE // 4 - 12))
    assert (await connection.send(message("POST", f"{ONE}?{long}", (), BODY))).count(b"HTTP/1.1 200") == 1
    assert not connection.was_handed_over()
    longer = f"{long}&{'a' * 100}"
    assert (await connection.send(message("POST", f"{ONE}?{longer}", (), BODY))).count(b"HTTP/1.1 200") == 2
    assert connection.was_handed_over()
    connection.end()


def hot_protocols() -> int:
    """The number of hot protocols in memory."""
    return sum([isinstance(one, HotProtocol) for one in gc.get_objects()])


@pytest.mark.parametrize("last", [LIVE, ONE_ASK[:20], b""], ids=["handed over", "late", "lost"])
async def test_nothing_keeps_a_protocol_that_is_done(last: bytes):
    """A cycle would keep it, and the bytes that it has read, until the collector's next full run."""
    gc.collect()
    gc.disable()
    before = hot_protocols()
    try:
        connection = Connection()
        await connection.send(ONE_ASK, last)
        if last == ONE_ASK[:20]:
            connection.loop.advance(2 * RequestDeadline.HEAD_S)
        if last != LIVE:
            connection.end()
        await connection.settle()
        connection.admission.callers.clear()
        if last != LIVE:
            del connection.line.protocol  # as transports do at the end
        assert hot_protocols() == before
    finally:
        gc.enable()


# A body that comes later than its head

LARGE: Final = message("POST", ONE, [KEY], BODY.ljust(100_000))


def intake_of(connection: Connection) -> Intake:
    route = connection.node.routes[ONE]
    assert isinstance(route, BodyRoute)
    return route.intake


async def test_bytes_of_a_body_are_counted_as_they_come(connection: Connection):
    await connection.send(LARGE[:50_000])
    assert 49_000 < intake_of(connection).total < 50_000
    assert (await connection.send(LARGE[50_000:])).count(b"HTTP/1.1 200") == 1
    assert intake_of(connection).total == 0
    connection.end()


@pytest.mark.parametrize("how", ["lost", "late"])
async def test_bytes_of_a_body_that_does_not_end_are_given_back(connection: Connection, how: str):
    await connection.send(LARGE[:50_000])
    if how == "late":
        connection.loop.advance(RequestDeadline.BODY_S + 3)
        assert (await connection.settle()).count(b"HTTP/1.1 408") == 1
    connection.end()
    await connection.settle()
    assert intake_of(connection).total == 0


async def test_body_that_finds_no_room_is_refused_and_the_connection_stays(connection: Connection):
    """The received part is no longer counted, and the rest is discarded."""
    intake_of(connection).take("key admin", MAX_OF_CALLER - 60_000)
    assert await connection.send(LARGE[:50_000]) == b""
    answers = await connection.send(LARGE[50_000:70_000])
    assert answers.count(b"HTTP/1.1 503") == 1
    assert connection.node.metrics._counts.shed == {("caller_bytes",): 1}
    assert intake_of(connection).total == MAX_OF_CALLER - 60_000
    answers = await connection.send(LARGE[70_000:], ONE_ASK, LARGE[70_000:80_000])
    assert answers.count(b"HTTP/1.1 200") == 1
    connection.end()


@pytest.mark.parametrize("size", [len(BODY), MAX_BODY])
async def test_sender_is_refused_before_its_body_comes(connection: Connection, size: int):
    refused = await connection.send(message("POST", ONE, [WRONG], length=str(size)))
    assert refused.count(b"HTTP/1.1 401") == 1
    assert intake_of(connection).total == 0
    body = [b" " * 10_000] * (size // 10_000) + [b" " * (size % 10_000)]
    assert await connection.send(*body) == refused, "it is thrown away"
    assert (await connection.send(ONE_ASK)).count(b"HTTP/1.1 200") == 1
    connection.end()


@pytest.mark.parametrize("begin", [LARGE[:-100_000], LARGE[:30]], ids=["body", "head"])
async def test_bursts_get_no_more_time(connection: Connection, begin: bytes):
    """Each burst has to wait for its turn, so nothing is read for a moment."""
    await connection.send(ONE_ASK, begin)
    began = connection.loop.time()
    while not connection.line.is_closing() and b"HTTP/1.1 408" not in connection.line.sent:
        connection.loop.advance(RequestDeadline.HEAD_S * 0.8)
        assert connection.loop.time() - began < RequestDeadline.HEAD_S * 2
        await connection.send(b"a" * (AT_ONCE + 1))
    connection.end()


async def test_log_of_a_refusal_has_the_address_of_its_own_connection(connection: Connection):
    """The refused body ends after another request, in the same iteration of the event loop."""
    connection.node.ring = {sha256(b"gateway").digest(): Grant("gateway", frozenset({"decide"}))}
    seen: list[str] = []
    connection.node.access._refused = lambda *_, **__: seen.append(_ADDRESS.get())  # type: ignore[method-assign]
    refused = message("POST", ONE, ["Authorization: Bearer gateway"], RECORD)
    await connection.send(refused[:-1])
    _ADDRESS.set("10.0.0.1")
    connection.protocol.data_received(refused[-1:])
    assert (await connection.settle()).count(b"HTTP/1.1 403") == 1
    assert seen == ["127.0.0.1"]
    connection.end()


async def test_rest_of_a_refused_body_that_is_late_ends_the_connection(connection: Connection):
    refused = await connection.send(message("POST", ONE, [WRONG], length="100"), b" " * 50)
    connection.loop.advance(RequestDeadline.BODY_S * 0.9)
    assert not connection.line.is_closing()
    connection.loop.advance(RequestDeadline.BODY_S * 0.2)
    assert await connection.settle() == refused, "there is one answer"
    assert connection.line.is_closing()


# The trace

TRACE: Final = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("fields", "trace"),
    [
        ([f"traceparent: {TRACE}"], TRACE.encode()),
        ([f"TraceParent: {TRACE}", "tracestate: a=b"], TRACE.encode()),
        ([], None),
        ([f"traceparent: {TRACE}"] * 2, None),
    ],
)
@pytest.mark.parametrize("path", [ONE, BATCH, CHECK])
async def test_caller_has_the_trace_of_its_head(
    connection: Connection, path: str, fields: list[str], trace: bytes | None
):
    bodies = {ONE: BODY, BATCH: json.dumps({"asks": [ASK]}).encode()}
    method = "GET" if path == CHECK else "POST"
    await connection.send(message(method, path, fields, bodies.get(path)))
    assert [caller.traceparent for caller in connection.admission.callers] == [trace]
    connection.end()


# Keys


def ring_of(**grants: Grant) -> dict[bytes, Grant]:
    return {sha256(name.encode()).digest(): grant for name, grant in grants.items()}


@pytest.mark.parametrize("path", [ONE, CHECK])
async def test_a_key_that_ends_ends_on_open_connections(path: str):
    connection = Connection()
    node = connection.node
    node.ring = ring_of(gateway=Grant("gateway", BINDABLE, until_ms=1_000))
    method, body = ("POST", BODY) if path == ONE else ("GET", None)
    request_ = message(method, path, ["Authorization: Bearer gateway"], body)
    answers = await connection.send(request_, request_)
    assert answers.count(b"HTTP/1.1 200") == 2
    node.now_ms = 1_000
    answers = await connection.send(request_)
    assert answers.count(b"HTTP/1.1 401") == 1
    node.ring = ring_of(gateway=Grant("gateway", BINDABLE))
    answers = await connection.send(request_, request_)
    assert answers.count(b"HTTP/1.1 200") == 4
    node.ring = ring_of(gateway=Grant("gateway", frozenset({"read"})))
    answers = await connection.send(request_)
    assert answers.count(b"HTTP/1.1 403") == 1
    node.ring = {}
    answers = await connection.send(request_)
    assert answers.count(b"HTTP/1.1 401") == 2
    assert len(connection.admission.asked) == 4
    connection.end()


async def test_a_bound_key_is_confined_by_either_protocol():
    bound = Grant("gateway", BINDABLE, (Binding.parse("user=alice"),))
    alice = message("POST", ONE, ["Authorization: Bearer gateway"], BODY)
    other = message("POST", ONE, ["Authorization: Bearer gateway"], BODY.replace(b"alice", b"clara"))
    answers = await Both(ring_of(gateway=bound)).answer(alice, alice, other, other, alice + other)
    assert answers.count(b"HTTP/1.1 200") == 3
    assert answers.count(b"HTTP/1.1 403") == 3


async def test_valid_keys_make_up_for_wrong_ones_of_the_same_address():
    connection = Connection()
    good, bad = message("POST", ONE, [KEY], BODY), message("POST", ONE, [WRONG], BODY)
    await connection.send(good, good, bad)
    for _ in range(100):
        await connection.send(bad, good)
    assert connection.node.access._slowdown.wait_s("127.0.0.1", time.monotonic()) == 0.0
    connection.end()


# Order, ends and time


def is_read(connection: Connection) -> bool:
    """Whether the node reads what arrives."""
    return connection.line.reads


async def test_a_fast_answer_waits_for_a_slow_one_before_it(connection: Connection):
    await connection.send(ONE_ASK)
    connection.admission.gate = asyncio.Event()
    answers = await connection.send(ONE_ASK, LIVE, A_CHECK, ONE_ASK)
    assert answers.count(b"HTTP/1.1 200") == 1
    assert connection.admission.waiting == 1, "requests of one connection are decided one after the other"
    connection.admission.gate.set()
    answers = await connection.settle()
    assert answers.count(b"HTTP/1.1 200") == 5
    assert answers.index(b'"live"') > answers.index(b'"decision"')
    connection.end()


async def test_many_requests_at_once_take_turns_with_others(connection: Connection):
    """One request of a connection is answered in one iteration of the loop."""
    connection.protocol.data_received(ONE_ASK * 500)
    for turns in range(1, 20):
        await asyncio.sleep(0)
        assert connection.admission.calls <= turns + 1
    assert (await connection.settle()).count(b"HTTP/1.1 200") == 500
    connection.end()


@pytest.mark.parametrize("times", [1, 2])
async def test_a_caller_that_leaves_gets_no_answer(connection: Connection, times: int):
    await connection.send(ONE_ASK, ONE_ASK)
    before = bytes(connection.line.sent)
    connection.admission.gate = asyncio.Event()
    await connection.send(ONE_ASK * times)
    connection.end()
    await asyncio.sleep(0)
    assert connection.admission.callers[-1].is_gone()
    connection.admission.gate.set()
    assert await connection.settle() == before
    assert connection.admission.calls == 3, "what waited behind it is not asked"
    assert not connection.state.connections


@pytest.mark.parametrize("first", [True, False])
async def test_graceful_shutdown_answers_what_is_in_flight(connection: Connection, *, first: bool):
    await connection.send(*[ONE_ASK] * (not first))
    before = len(connection.line.sent)
    connection.admission.gate = asyncio.Event()
    await connection.send(ONE_ASK)
    connection.protocol.shutdown()
    assert not connection.line.is_closing()
    connection.admission.gate.set()
    answer = (await connection.settle())[before:]
    assert b"connection: close\r\n" in answer
    assert answer.count(b"HTTP/1.1 200") == 1
    assert connection.line.is_closing()
    assert not connection.state.connections


async def test_shutdown_waits_for_the_rest_of_a_body(connection: Connection):
    await connection.send(LARGE[:50_000])
    connection.node.drain.has_begun = True
    connection.protocol.drain()
    connection.protocol.shutdown()
    assert not connection.line.is_closing()
    answer = await connection.send(LARGE[50_000:])
    assert answer.count(b"HTTP/1.1 200") == answer.count(b"connection: close\r\n") == 1
    assert connection.line.is_closing()


async def test_shutdown_answers_a_request_that_waits_for_its_turn(connection: Connection):
    connection.protocol.data_received(message("POST", ONE, ["X-Filling: " + "a" * AT_ONCE], BODY))
    assert not is_read(connection)
    connection.node.drain.has_begun = True
    connection.protocol.drain()
    connection.protocol.shutdown()
    assert (await connection.settle()).count(b"HTTP/1.1 200") == 1
    assert connection.line.is_closing()


async def test_caller_that_leaves_while_its_request_waits_for_its_turn_is_not_answered(
    connection: Connection,
):
    connection.protocol.data_received(message("POST", ONE, ["X-Filling: " + "a" * AT_ONCE], BODY))
    connection.end()
    assert await connection.settle() == b""
    assert connection.admission.calls == 0


@pytest.mark.parametrize("before", [b"", ONE_ASK], ids=["alone", "behind another"])
async def test_body_that_nobody_takes_is_not_read(connection: Connection, before: bytes):
    """The body is behind a request that waits, or the answer to its own request is delayed."""
    connection.admission.gate = asyncio.Event()
    key = [f"Authorization: Bearer {'x' * 20}"] * (not before)
    connection.node.access._slowdown.wait_s = lambda *_: 60.0  # type: ignore[method-assign]
    connection.protocol.data_received(before + message("POST", ONE, key, length=str(10**9)))
    taken = 0
    while is_read(connection) and taken < MAX_BODY:
        connection.protocol.data_received(b" " * 65_536)
        taken += 65_536
        for _ in range(QUIET_ITERATIONS):
            await asyncio.sleep(0)
    assert taken <= 3 * 65_536
    connection.end()


async def test_request_that_waits_for_its_turn_is_not_late(connection: Connection):
    connection.protocol.data_received(message("POST", ONE, ["X-Filling: " + "a" * AT_ONCE], BODY))
    connection.protocol._time_out()
    connection.loop.advance(KEEP_ALIVE_S)
    assert not connection.line.is_closing()
    assert (await connection.settle()).count(b"HTTP/1.1 200") == 1
    connection.end()


async def test_first_request_that_is_late_after_its_refusal_ends_the_connection(connection: Connection):
    assert b"HTTP/1.1 400" in await connection.send(b"nonsense\r\n\r\n")
    assert connection.line.has_ended
    connection.protocol._time_out()
    assert connection.line.is_closing()


async def test_shutdown_closes_a_connection_between_requests(connection: Connection):
    await connection.send(ONE_ASK, ONE_ASK)
    connection.protocol.shutdown()
    assert connection.line.is_closing()


async def test_answers_wait_for_a_caller_that_does_not_read(connection: Connection):
    await connection.send(ONE_ASK)
    connection.admission.gate = asyncio.Event()
    before = await connection.send(ONE_ASK)
    connection.line.unread = 2**20
    connection.protocol.pause_writing()
    connection.admission.gate.set()
    assert await connection.settle() == before
    assert not is_read(connection)
    connection.line.unread = 0
    connection.protocol.resume_writing()
    assert (await connection.settle()).count(b"HTTP/1.1 200") == 2
    assert is_read(connection)
    assert (await connection.send(ONE_ASK)).count(b"HTTP/1.1 200") == 3
    connection.end()


async def test_a_slow_reader_is_read_no_further(connection: Connection):
    await connection.send(ONE_ASK)
    connection.admission.gate = asyncio.Event()
    connection.protocol.data_received(ONE_ASK)
    connection.protocol.data_received(ONE_ASK * 100)
    await connection.settle()
    assert not is_read(connection)
    protocol = connection.protocol
    if isinstance(protocol, Protocol):
        assert WAITING <= len(protocol.pipeline) < 2 * WAITING
    else:
        assert len(protocol._data) == len(ONE_ASK) * 100
    connection.admission.gate.set()
    assert (await connection.settle()).count(b"HTTP/1.1 200") == 102
    connection.end()


async def test_a_connection_has_one_timer_however_many_requests_come(connection: Connection):
    for request_ in (ONE_ASK, A_CHECK, TWO_ASKS) * 50:
        await connection.send(request_)
    assert connection.loop.made <= 2, "one for the connection, and one that was due earlier"
    connection.end()


KEEP_ALIVE_S: Final = 5.0
"""Uvicorn's default."""


async def test_idle_connection_is_closed_some_time_after_its_last_answer(connection: Connection):
    for request_ in (ONE_ASK, ONE_ASK, A_CHECK, A_CHECK, LIVE, ONE_ASK):
        await connection.send(request_)
        connection.loop.advance(KEEP_ALIVE_S * 0.9)
        assert not connection.line.is_closing()
    connection.loop.advance(KEEP_ALIVE_S * 0.2)
    assert connection.line.is_closing()


@pytest.mark.parametrize("first", [True, False])
async def test_a_request_in_flight_is_not_idle(connection: Connection, *, first: bool):
    await connection.send(*[ONE_ASK] * (not first))
    connection.admission.gate = asyncio.Event()
    connection.protocol.data_received(ONE_ASK)
    connection.loop.advance(100 * KEEP_ALIVE_S)
    assert not connection.line.is_closing()
    connection.admission.gate.set()
    assert (await connection.settle()).count(b"HTTP/1.1 200") == 2 - first
    connection.loop.advance(KEEP_ALIVE_S * 0.9)
    assert not connection.line.is_closing()
    connection.loop.advance(KEEP_ALIVE_S * 0.2)
    assert connection.line.is_closing()


@pytest.mark.parametrize("sent", [ONE_ASK[:20], ONE_ASK[:-1]])
async def test_a_request_that_does_not_end_is_late_whatever_came_before(connection: Connection, sent: bytes):
    await connection.send(ONE_ASK, ONE_ASK, sent)
    connection.loop.advance(RequestDeadline.HEAD_S * 0.9)
    assert (await connection.settle()).count(b"HTTP/1.1 408") == 0
    connection.loop.advance(RequestDeadline.HEAD_S * 0.2)
    assert (await connection.settle()).count(b"HTTP/1.1 408") == 1
    connection.loop.advance(Protocol.LINGER_S)
    assert connection.line.is_closing()


async def test_a_caller_that_does_not_read_is_let_go(connection: Connection):
    await connection.send(ONE_ASK, ONE_ASK)
    connection.line.unread = 2**20
    connection.protocol.pause_writing()
    connection.loop.advance(UnreadDeadline.UNREAD_S * 1.1)
    assert connection.line.is_closing()


async def test_what_fails_is_logged_and_answered(connection: Connection):
    await connection.send(ONE_ASK, A_CHECK)
    connection.admission.broken = True
    answers = await connection.send(ONE_ASK, A_CHECK, ONE_ASK + A_CHECK)
    assert answers.count(b"HTTP/1.1 500") == 4
    connection.admission.broken = False
    assert (await connection.send(ONE_ASK)).count(b"HTTP/1.1 200") == 3
    connection.end()


@pytest.mark.parametrize("request_", [ONE_ASK, TWO_ASKS, A_CHECK])
async def test_answer_that_cannot_be_made_is_a_500(
    connection: Connection, request_: bytes, monkeypatch: pytest.MonkeyPatch
):
    connection.admission.gate = asyncio.Event()
    await connection.send(request_)
    for name in ("decisions.encode_decision", "decisions.encode_decisions", "check.answer_to"):
        monkeypatch.setattr(f"app.http.routes.{name}", lambda *_: 1 / 0)
    connection.admission.gate.set()
    assert (await connection.settle()).count(b"HTTP/1.1 500") == 1
    monkeypatch.undo()
    assert (await connection.send(request_)).count(b"HTTP/1.1 200") == 1
    connection.end()


async def test_head_is_forgotten_once_its_request_is_answered():
    connection = Connection(hot=True)
    await connection.send(ONE_ASK)
    assert isinstance(connection.protocol, HotProtocol)
    assert not connection.protocol._head.fields
    connection.end()


async def test_what_is_shed_is_answered_and_counted(connection: Connection):
    await connection.send(ONE_ASK)
    connection.admission.overloaded = "age"
    answers = await connection.send(ONE_ASK, ONE_ASK + ONE_ASK)
    assert answers.count(b"HTTP/1.1 503") == 3
    assert connection.node.metrics._counts.shed == {("age",): 3}
    connection.end()


# The route calls back, without a coroutine


class Real:
    """A connection by the hot protocol to a node with the real admission."""

    def __init__(self) -> None:
        self.store = HeldStore()
        self.admission = real(self.store)
        self.node = InMemory(hot=True, decider=self.admission)
        self.connection = Connection(self.node)


@pytest.fixture
async def one() -> Real:
    return Real()


async def test_asks_and_checks_are_answered_the_same():
    answers = []
    for hot in (True, False):
        store = HeldStore()
        connection = Connection(InMemory(hot=hot, decider=real(store)))
        nobodys = message("POST", ONE, (), b'{"ip": "10.0.0.7", "usage": {"mutations": 1}}')
        recorded = message("POST", ONE, [KEY], RECORD)
        nobody = message("GET", CHECK, ["X-Quotagate-IP: 10.0.0.7"])
        invalid = message("GET", f"{CHECK}?requests=x")
        mixed = ONE_ASK + nobodys + ONE_ASK + A_CHECK + nobody
        for request_ in (ONE_ASK, nobodys, TWO_ASKS, A_CHECK, nobody, invalid, recorded, mixed):
            await connection.send(*[request_] * 3)
        answers.append(bytes(connection.line.sent))
        assert store.asked == 3 * (1 + 2 + 1 + 1 + 3)
        connection.end()
    assert answers[0] == answers[1]
    assert answers[0].count(b"HTTP/1.1 200") == 33
    assert answers[0].count(b'ratelimit: "request_rate";r=99;t=10') == 6
    assert answers[0].count(b"HTTP/1.1 400") == 3


async def test_new_heads_and_bodies_are_answered_the_same():
    answers = []
    for hot in (True, False):
        store = HeldStore()
        connection = Connection(InMemory(hot=hot, decider=real(store)))
        for n in range(8):
            asked = json.dumps({**ASK, "client_id": f"{n // 2}"}).encode()
            retried = json.dumps({**ASK, "id": f"{n // 2}"}).encode()
            field = f"X-Number: {n}"
            one = message("POST", ONE, [field], asked)
            check = message("GET", CHECK, [field, f"X-Quotagate-Principal: {n // 2}"])
            other = message("POST", ONE, [field], retried)
            recorded = message("POST", ONE, [field, KEY], RECORD)
            invalid = message("POST", ONE, [field], b'{"usage": {}}')
            large = message("POST", ONE, [field], asked + b" " * 100_000)
            refused = message("POST", ONE, [field, WRONG], asked)
            for request_ in (one, check, other, recorded, invalid, large, one + check + other, refused):
                await connection.send(request_)
        answers.append(bytes(connection.line.sent))
        connection.end()
    assert answers[0] == answers[1]
    assert answers[0].count(b"HTTP/1.1 200") == 8 * 8
    assert answers[0].count(b"HTTP/1.1 401") == answers[0].count(b"HTTP/1.1 422") == 8


async def test_a_check_that_is_the_last_one_says_so(one: Real):
    await one.connection.send(A_CHECK)
    one.store.unanswered = []
    before = len(await one.connection.send(A_CHECK))
    one.connection.protocol.shutdown()
    one.store.unanswered.pop()()
    answer = (await one.connection.settle())[before:]
    assert answer.count(b"HTTP/1.1 200") == answer.count(b"connection: close\r\n") == 1
    assert one.connection.line.is_closing()


@pytest.mark.parametrize("size", [len(BODY), UNCOUNTED + 1])
async def test_an_ask_in_flight_is_answered_in_order_and_its_bytes_are_counted_if_many(one: Real, size: int):
    ask = message("POST", ONE, (), BODY.ljust(size))
    await one.connection.send(ask, ask)
    one.store.unanswered = []
    answers = await one.connection.send(ask, LIVE, ask)
    assert answers.count(b"HTTP/1.1 200") == 2
    route = one.node.routes[ONE]
    assert isinstance(route, BodyRoute)
    assert route.intake.total == (size if size > UNCOUNTED else 0)
    one.store.unanswered.pop()()
    await one.connection.settle()
    one.store.unanswered.pop()()
    answers = await one.connection.settle()
    assert answers.count(b"HTTP/1.1 200") == 5
    assert route.intake.total == 0
    one.connection.end()


async def test_an_ask_whose_caller_left_or_does_not_read(one: Real):
    await one.connection.send(ONE_ASK, ONE_ASK)
    one.store.unanswered = []
    before = await one.connection.send(ONE_ASK)
    one.connection.line.unread = 2**20
    one.connection.protocol.pause_writing()
    one.store.unanswered.pop()()
    assert await one.connection.settle() == before
    one.connection.line.unread = 0
    one.connection.protocol.resume_writing()
    before = await one.connection.settle()
    assert before.count(b"HTTP/1.1 200") == 3
    await one.connection.send(ONE_ASK)
    one.connection.end()
    await asyncio.sleep(0)
    one.store.unanswered.pop()()
    assert await one.connection.settle() == before


async def test_an_ask_is_shed_before_and_after_it_fails(one: Real, monkeypatch: pytest.MonkeyPatch):
    await one.connection.send(ONE_ASK, ONE_ASK)

    def overloaded(*_: object) -> None:
        raise OverloadedError("age")

    monkeypatch.setattr(one.admission, "begin", overloaded)
    answers = await one.connection.send(ONE_ASK)
    assert answers.count(b"HTTP/1.1 503") == 1
    assert one.node.metrics._counts.shed == {("age",): 1}
    monkeypatch.setattr(one.admission, "begin", lambda _ask, _caller, then: then(RuntimeError("broken")))
    assert (await one.connection.send(ONE_ASK)).count(b"HTTP/1.1 500") == 1
    monkeypatch.undo()
    assert (await one.connection.send(ONE_ASK)).count(b"HTTP/1.1 200") == 3
    one.connection.end()


async def test_a_check_that_fails_is_answered(one: Real, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    await one.connection.send(A_CHECK)
    monkeypatch.setattr(one.admission, "begin", broken)
    assert (await one.connection.send(A_CHECK)).count(b"HTTP/1.1 500") == 1
    monkeypatch.undo()
    assert (await one.connection.send(A_CHECK)).count(b"HTTP/1.1 200") == 2
    one.connection.end()


async def test_a_body_needs_the_scope_although_another_caller_sent_it_before(one: Real):
    one.node.ring = ring_of(account=Grant("account", frozenset({"account"})))
    await one.connection.send(ONE_ASK)
    request_ = message("POST", ONE, ["Authorization: Bearer account"], BODY)
    assert (await one.connection.send(request_, request_)).count(b"HTTP/1.1 403") == 2
    assert one.store.asked == 1
    one.connection.end()


# Answers leave together

UNLIMITED: Final = message("POST", ONE, (), b'{"usage": {"connections": 1}}')
"""An ask to which no quota applies; its answer comes at once."""

NEXT: Final[dict[str, Callable[[HotProtocol], object]]] = {
    "a request that is handed over": lambda protocol: protocol.data_received(LIVE),
    "another ordinary one": lambda protocol: protocol.data_received(UNLIMITED),
    "no HTTP": lambda protocol: protocol.data_received(b"\0\0"),
    "the end of requests": lambda protocol: protocol.eof_received(),
    "the end of the node": lambda protocol: protocol.shutdown(),
    "a timeout": lambda protocol: protocol._on_deadline(),
    "a caller that does not read": lambda protocol: protocol.pause_writing(),
}
"""Events on a connection in the iteration of the loop in which an answer was made."""


@pytest.mark.parametrize("next_", NEXT.values(), ids=NEXT.keys())
async def test_answer_that_waits_for_the_end_of_the_turn_goes_before_all_that_follows(
    one: Real, next_: Callable[[HotProtocol], object]
):
    connection = one.connection
    before = len(await connection.send(UNLIMITED, UNLIMITED))
    answer = bytes(connection.line.sent)[-before // 2 :]
    hot = hot_of(connection)
    hot.data_received(UNLIMITED)
    assert len(connection.line.sent) == before
    next_(hot)
    assert (await connection.settle())[before:].startswith(answer)
    connection.end()


async def test_answer_is_lost_with_its_connection(one: Real):
    connection = one.connection
    before = await connection.send(UNLIMITED, UNLIMITED)
    hot_of(connection).data_received(UNLIMITED)
    connection.end()
    assert await connection.settle() == before


async def test_request_is_answered_once_even_if_its_route_calls_back_twice(one: Real):
    connection = one.connection
    before = await connection.send(UNLIMITED, UNLIMITED, UNLIMITED)
    hot_of(connection)._finish(RuntimeError("again"))
    assert await connection.settle() == before
    connection.end()


async def test_small_body_needs_room_although_it_is_not_counted(one: Real):
    connection = one.connection
    before = len(await connection.send(UNLIMITED, UNLIMITED))
    route, turn = one.node.routes[ONE], "127.0.0.1"
    assert isinstance(route, BodyRoute)
    route.intake.take(turn, MAX_OF_CALLER)
    assert (await connection.send(UNLIMITED))[before:].startswith(b"HTTP/1.1 503")
    route.intake.give_back(turn, MAX_OF_CALLER)
    connection.end()
