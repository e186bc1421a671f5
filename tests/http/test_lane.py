"""The express lane gives the same bytes as the long way through ASGI, and behaves the same."""

from __future__ import annotations

import asyncio
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
from app.http import lane
from app.http.hot import UNCOUNTED, HotRoute
from app.http.intake import MAX_OF_CALLER
from app.http.lane import MAX_HEAD, MAX_REMEMBERED, LaneProtocol
from app.http.protocol import AT_ONCE, WAITING
from app.http.wire import MAX_BODY
from tests.fuzz.cases import Request
from tests.fuzz.generate import case
from tests.fuzz.messages import BATCH, CHECK, ONE, in_pieces, message
from tests.http.conftest import ADMIN, Node
from tests.http.ways import QUIET_TURNS, Both, Connection, HeldStore, InMemory, real

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


def lane_of(connection: Connection) -> LaneProtocol:
    """The connection's protocol, which has the lane."""
    assert isinstance(connection.protocol, LaneProtocol)
    return connection.protocol


class Parsed:
    """How often a connection's parser is used."""

    def __init__(self, connection: Connection) -> None:
        self.times = 0
        self._parser = connection.protocol.parser
        connection.protocol.parser = self  # type: ignore[assignment]

    def feed_data(self, data: bytes) -> None:
        self.times += 1
        self._parser.feed_data(data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._parser, name)


# The same bytes


@pytest.fixture(scope="module")
def nodes() -> Both:
    """Two nodes for tests that change nothing about them."""
    return Both()


async def test_the_lane_is_used(nodes: Both, node: Node, way: str):
    """Pytest gives handlers to loggers that have none, after these nodes were made."""
    parsed = Parsed(connection := Connection(nodes.with_lane))
    await connection.send(ONE_ASK, ONE_ASK)
    assert parsed.times == 1
    connection.end()
    await node.ask(BODY)
    (served,) = node.server.server_state.connections
    assert bool(getattr(served, "_heads", None)) == (way == "lane")


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


async def test_a_certificate_names_the_principal_by_either_way(nodes: Both):
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


# Known heads


async def test_a_head_is_parsed_once():
    connection = Connection()
    parsed = Parsed(connection)
    for request_ in (ONE_ASK, TWO_ASKS, A_CHECK):
        before = parsed.times
        for _ in range(10):
            await connection.send(request_)
        assert parsed.times == before + 1
    assert len(connection.admission.asked) == 40
    connection.end()


async def test_another_body_of_the_same_size_is_another_ask():
    connection = Connection()
    parsed = Parsed(connection)
    for name in ("alice", "clara", "diana"):
        await connection.send(message("POST", ONE, (), BODY.replace(b"alice", name.encode())))
    assert parsed.times == 1
    assert [ask.principal for ask in connection.admission.asked] == ["alice", "clara", "diana"]
    connection.end()


async def test_a_head_of_an_earlier_request_may_stand_in_a_body(nodes: Both):
    """A segment counts as a request only where one begins."""
    about = message("POST", ONE, (), ONE_ASK)
    answers = await nodes.answer(ONE_ASK, about[: -len(ONE_ASK)], ONE_ASK, about, ONE_ASK)
    assert answers.count(b"HTTP/1.1 200") == 2
    assert answers.count(b"HTTP/1.1 400") == 2


async def test_heads_that_vary_are_remembered_within_bounds():
    connection = Connection()
    for n in range(200):
        await connection.send(message("POST", ONE, [f"X-Number: {n}"], BODY))
        assert lane_of(connection)._cost <= MAX_REMEMBERED
        assert len(lane_of(connection)._heads) <= MAX_REMEMBERED // lane.MIN_COST
    large = message("POST", ONE, ["X-Large: " + "x" * MAX_HEAD], BODY)
    many = message("POST", ONE, [f"a{n}: b" for n in range(200)], BODY)
    lane_of(connection)._forget()
    for head in (large, many) * 2:
        await connection.send(head)
    assert lane_of(connection)._heads == {}
    assert len(connection.admission.asked) == 204
    connection.end()


def ring_of(**grants: Grant) -> dict[bytes, Grant]:
    return {sha256(name.encode()).digest(): grant for name, grant in grants.items()}


@pytest.mark.parametrize("path", [ONE, CHECK])
async def test_a_known_head_ends_with_its_key(path: str):
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


async def test_a_bound_key_is_confined_by_either_way():
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


@pytest.fixture(params=[True, False], ids=["lane", "long way"])
async def connection(request: pytest.FixtureRequest) -> Connection:
    """A connection by either way."""
    connection = Connection(lane=request.param)
    assert not request.param or lane_of(connection)._routes, "or no test here would use the lane"
    return connection


def is_read(connection: Connection) -> bool:
    """Whether the node reads what arrives."""
    return connection.line.reads


async def test_a_fast_answer_waits_for_a_slow_one_before_it(connection: Connection):
    await connection.send(ONE_ASK)
    connection.admission.held = asyncio.Event()
    answers = await connection.send(ONE_ASK, LIVE, A_CHECK, ONE_ASK)
    assert answers.count(b"HTTP/1.1 200") == 1
    assert connection.admission.waiting == 1, "requests of one connection are decided one after the other"
    connection.admission.held.set()
    answers = await connection.settle()
    assert answers.count(b"HTTP/1.1 200") == 5
    assert answers.index(b'"live"') > answers.index(b'"decision"')
    connection.end()


async def test_many_requests_at_once_take_turns_with_others(connection: Connection):
    """One request of a connection is answered in one turn of the loop."""
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
    connection.admission.held = asyncio.Event()
    await connection.send(ONE_ASK * times)
    connection.end()
    await asyncio.sleep(0)
    assert connection.admission.callers[-1].is_gone()
    connection.admission.held.set()
    assert await connection.settle() == before
    assert connection.admission.calls == 3, "what waited behind it is not asked"
    assert not connection.state.connections


@pytest.mark.parametrize("known", [True, False])
async def test_graceful_shutdown_answers_what_is_in_flight(connection: Connection, *, known: bool):
    await connection.send(*[ONE_ASK] * known)
    before = len(connection.line.sent)
    connection.admission.held = asyncio.Event()
    await connection.send(ONE_ASK)
    connection.protocol.shutdown()
    assert not connection.line.is_closing()
    connection.admission.held.set()
    answer = (await connection.settle())[before:]
    assert b"connection: close\r\n" in answer
    assert answer.count(b"HTTP/1.1 200") == 1
    assert connection.line.is_closing()
    assert not connection.state.connections


async def test_shutdown_answers_a_request_that_waits_for_its_turn(connection: Connection):
    connection.protocol.data_received(message("POST", ONE, ["X-Filling: " + "a" * AT_ONCE], BODY))
    assert not is_read(connection)
    connection.protocol._drain.has_begun = True
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
    """It is behind a request that waits, or its own answer is delayed."""
    connection.admission.held = asyncio.Event()
    key = [f"Authorization: Bearer {'x' * 20}"] * (not before)
    connection.node.access._slowdown.wait_s = lambda *_: 60.0  # type: ignore[method-assign]
    connection.protocol.data_received(before + message("POST", ONE, key, length=str(10**9)))
    taken = 0
    while is_read(connection) and taken < MAX_BODY:
        connection.protocol.data_received(b" " * 65_536)
        taken += 65_536
        for _ in range(QUIET_TURNS):
            await asyncio.sleep(0)
    assert taken <= 3 * 65_536
    connection.end()


async def test_request_that_waits_for_its_turn_is_not_late(connection: Connection):
    connection.protocol.data_received(message("POST", ONE, ["X-Filling: " + "a" * AT_ONCE], BODY))
    connection.protocol._time_out()
    connection.loop.turn(connection.protocol.timeout_keep_alive)
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
    connection.admission.held = asyncio.Event()
    before = await connection.send(ONE_ASK)
    connection.line.unread = 2**20
    connection.protocol.pause_writing()
    connection.admission.held.set()
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
    connection.admission.held = asyncio.Event()
    connection.protocol.data_received(ONE_ASK)
    connection.protocol.data_received(ONE_ASK * 100)
    await connection.settle()
    assert not is_read(connection)
    assert WAITING <= len(connection.protocol.pipeline) < 2 * WAITING
    connection.admission.held.set()
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
        connection.loop.turn(KEEP_ALIVE_S * 0.9)
        assert not connection.line.is_closing()
    connection.loop.turn(KEEP_ALIVE_S * 0.2)
    assert connection.line.is_closing()


@pytest.mark.parametrize("known", [True, False])
async def test_a_request_in_flight_is_not_idle(connection: Connection, *, known: bool):
    await connection.send(*[ONE_ASK] * known)
    connection.admission.held = asyncio.Event()
    connection.protocol.data_received(ONE_ASK)
    connection.loop.turn(100 * KEEP_ALIVE_S)
    assert not connection.line.is_closing()
    connection.admission.held.set()
    assert (await connection.settle()).count(b"HTTP/1.1 200") == 1 + known
    connection.loop.turn(KEEP_ALIVE_S * 0.9)
    assert not connection.line.is_closing()
    connection.loop.turn(KEEP_ALIVE_S * 0.2)
    assert connection.line.is_closing()


@pytest.mark.parametrize("sent", [ONE_ASK[:20], ONE_ASK[:-1]])
async def test_a_request_that_does_not_end_is_late_whatever_came_before(connection: Connection, sent: bytes):
    await connection.send(ONE_ASK, ONE_ASK, sent)
    connection.loop.turn(connection.protocol.HEAD_S * 0.9)
    assert (await connection.settle()).count(b"HTTP/1.1 408") == 0
    connection.loop.turn(connection.protocol.HEAD_S * 0.2)
    assert (await connection.settle()).count(b"HTTP/1.1 408") == 1
    connection.loop.turn(connection.protocol.LINGER_S)
    assert connection.line.is_closing()


async def test_a_caller_that_does_not_read_is_let_go(connection: Connection):
    await connection.send(ONE_ASK, ONE_ASK)
    connection.line.unread = 2**20
    connection.protocol.pause_writing()
    connection.loop.turn(connection.protocol.UNREAD_S * 1.1)
    assert connection.line.is_closing()


async def test_what_fails_is_logged_and_answered(connection: Connection):
    await connection.send(ONE_ASK, A_CHECK)
    connection.admission.broken = True
    answers = await connection.send(ONE_ASK, A_CHECK, ONE_ASK + A_CHECK)
    assert answers.count(b"HTTP/1.1 500") == 4
    connection.admission.broken = False
    assert (await connection.send(ONE_ASK)).count(b"HTTP/1.1 200") == 3
    connection.end()


async def test_what_is_shed_is_answered_and_counted(connection: Connection):
    await connection.send(ONE_ASK)
    connection.admission.overloaded = "age"
    answers = await connection.send(ONE_ASK, ONE_ASK + ONE_ASK)
    assert answers.count(b"HTTP/1.1 503") == 3
    assert connection.node.metrics._counts.shed == {("age",): 3}
    connection.end()


# Known bodies: the route calls back, without a coroutine


class Real:
    """A connection by the lane to a node with the real admission."""

    def __init__(self) -> None:
        self.store = HeldStore()
        self.admission = real(self.store)
        self.node = InMemory(lane=True, decider=self.admission)
        self.connection = Connection(self.node)


@pytest.fixture
async def one() -> Real:
    return Real()


async def test_known_bodies_are_answered_the_same():
    answers = []
    for lane_ in (True, False):
        store = HeldStore()
        connection = Connection(InMemory(lane=lane_, decider=real(store)))
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
    for lane_ in (True, False):
        store = HeldStore()
        connection = Connection(InMemory(lane=lane_, decider=real(store)))
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


async def test_a_known_check_that_is_the_last_one_says_so(one: Real):
    await one.connection.send(A_CHECK)
    one.store.held = []
    before = len(await one.connection.send(A_CHECK))
    one.connection.protocol.shutdown()
    one.store.held.pop()()
    answer = (await one.connection.settle())[before:]
    assert answer.count(b"HTTP/1.1 200") == answer.count(b"connection: close\r\n") == 1
    assert one.connection.line.is_closing()


@pytest.mark.parametrize("size", [len(BODY), UNCOUNTED + 1])
async def test_a_known_ask_in_flight_is_answered_in_order_and_its_bytes_are_counted_if_many(
    one: Real, size: int
):
    ask = message("POST", ONE, (), BODY.ljust(size))
    await one.connection.send(ask, ask)
    one.store.held = []
    answers = await one.connection.send(ask, LIVE, ask)
    assert answers.count(b"HTTP/1.1 200") == 2
    hot = one.node.protocol(one.connection.state, one.connection.loop)
    assert isinstance(hot, LaneProtocol)
    route = hot._routes[ONE]
    assert isinstance(route, HotRoute)
    assert route.intake.total == (size if size > UNCOUNTED else 0)
    one.store.held.pop()()
    await one.connection.settle()
    one.store.held.pop()()
    answers = await one.connection.settle()
    assert answers.count(b"HTTP/1.1 200") == 5
    assert route.intake.total == 0
    one.connection.end()


async def test_a_known_ask_whose_caller_left_or_does_not_read(one: Real):
    await one.connection.send(ONE_ASK, ONE_ASK)
    one.store.held = []
    before = await one.connection.send(ONE_ASK)
    one.connection.line.unread = 2**20
    one.connection.protocol.pause_writing()
    one.store.held.pop()()
    assert await one.connection.settle() == before
    one.connection.line.unread = 0
    one.connection.protocol.resume_writing()
    before = await one.connection.settle()
    assert before.count(b"HTTP/1.1 200") == 3
    await one.connection.send(ONE_ASK)
    one.connection.end()
    await asyncio.sleep(0)
    one.store.held.pop()()
    assert await one.connection.settle() == before


async def test_a_known_ask_is_shed_as_any_other(one: Real, monkeypatch: pytest.MonkeyPatch):
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


async def test_a_known_check_that_fails_is_answered(one: Real, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    await one.connection.send(A_CHECK)
    monkeypatch.setattr(one.admission, "begin_in_full", broken)
    assert (await one.connection.send(A_CHECK)).count(b"HTTP/1.1 500") == 1
    monkeypatch.undo()
    assert (await one.connection.send(A_CHECK)).count(b"HTTP/1.1 200") == 2
    one.connection.end()


async def test_a_known_body_needs_the_scope_all_the_same(one: Real):
    one.node.ring = ring_of(account=Grant("account", frozenset({"account"})))
    await one.connection.send(ONE_ASK)
    request_ = message("POST", ONE, ["Authorization: Bearer account"], BODY)
    assert (await one.connection.send(request_, request_)).count(b"HTTP/1.1 403") == 2
    assert one.store.asked == 1
    one.connection.end()


# Answers leave together

UNLIMITED: Final = message("POST", ONE, (), b'{"usage": {"connections": 1}}')
"""An ask to which no quota applies, so that it is answered at once."""

NEXT: Final[dict[str, Callable[[LaneProtocol], object]]] = {
    "a request that must be parsed": lambda protocol: protocol.data_received(LIVE),
    "another known one": lambda protocol: protocol.data_received(UNLIMITED),
    "no HTTP": lambda protocol: protocol.data_received(b"\0\0"),
    "the end of requests": lambda protocol: protocol.eof_received(),
    "the end of the node": lambda protocol: protocol.shutdown(),
    "a timeout": lambda protocol: protocol.timeout_keep_alive_handler(),
    "a caller that does not read": lambda protocol: protocol.pause_writing(),
}
"""What can happen on a connection in the turn of the loop in which an answer was made."""


@pytest.mark.parametrize("next_", NEXT.values(), ids=NEXT.keys())
async def test_answer_that_waits_for_the_end_of_the_turn_goes_before_all_that_follows(
    one: Real, next_: Callable[[LaneProtocol], object]
):
    connection = one.connection
    before = len(await connection.send(UNLIMITED, UNLIMITED))
    answer = bytes(connection.line.sent)[-before // 2 :]
    lane = lane_of(connection)
    lane.data_received(UNLIMITED)
    assert len(connection.line.sent) == before
    next_(lane)
    assert (await connection.settle())[before:].startswith(answer)
    connection.end()


async def test_answer_is_lost_with_its_connection(one: Real):
    connection = one.connection
    before = await connection.send(UNLIMITED, UNLIMITED)
    lane_of(connection).data_received(UNLIMITED)
    connection.end()
    assert await connection.settle() == before


async def test_request_is_answered_once_even_if_its_route_calls_back_twice(one: Real):
    connection = one.connection
    before = await connection.send(UNLIMITED, UNLIMITED, UNLIMITED)
    lane_of(connection)._finish_known(RuntimeError("again"))
    assert await connection.settle() == before
    connection.end()


async def test_small_body_needs_room_although_it_is_not_counted(one: Real):
    connection = one.connection
    before = len(await connection.send(UNLIMITED, UNLIMITED))
    route = lane_of(connection)._routes[ONE]
    assert isinstance(route, HotRoute)
    (turn,) = {known.sender.turn for known in lane_of(connection)._heads.values()}
    route.intake.take(turn, MAX_OF_CALLER)
    assert (await connection.send(UNLIMITED))[before:].startswith(b"HTTP/1.1 503")
    route.intake.give_back(turn, MAX_OF_CALLER)
    connection.end()
