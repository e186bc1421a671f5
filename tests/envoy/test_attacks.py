"""Attacks on the port for Envoy over sockets: each ends at a bound, and other callers do not notice."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from h2.errors import ErrorCodes
from hpack import Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from app.envoy.call import MAX_BODY, StatusCode
from app.envoy.http2 import FRAMES, MAX_FRAME, MAX_HEADER_LIST, MAX_STREAMS, PREFACE
from app.envoy.protos.ratelimit_pb2 import RateLimitResponse
from app.envoy.server import HEALTH
from tests.envoy.calls import Client, connected, request, serving
from tests.envoy.raw import HEADERS, SETTINGS, Peer, data, framed, peer, settings, undefined_settings
from tests.service import Service, eventually

CALM = ErrorCodes.ENHANCE_YOUR_CALM
MESSAGE = request({"principal": "attacker"}).SerializeToString()
MEBIBYTE = 2**20


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[Service, int]]:
    with serving(environment={"QUOTAGATE_OPEN_TO": "127.0.0.0/8"}) as (node, port):
        node.put("user=other", request_rate={"limit": 0.001, "samples": 11, "sample_ms": 6_000})
        yield node, port


@pytest.fixture
def port(started: tuple[Service, int]) -> Iterator[int]:
    """The port of a node that answers others after the attack, and logs no error of its own."""
    node, number = started
    yield number
    with connected(number) as client:
        assert answered_by_the_store(client)
    assert "Traceback" not in node.logged()
    assert "exception" not in node.logged()


def answered_by_the_store(client: Client) -> bool:
    """Whether the limit of another caller holds: an answer by policy would admit."""
    client.code({"principal": "other"})
    return client.code({"principal": "other"}) == "OVER_LIMIT"


def rapid_resets(found: Peer) -> Iterator[bytes]:
    for number in range(1, 4 * FRAMES, 2):
        yield found.request(number, MESSAGE) + RstStreamFrame(number).serialize()


def empty_data(found: Peer) -> Iterator[bytes]:
    yield found.head(1)
    yield data(1, b"") * 4 * FRAMES


def tiny_data(found: Peer) -> Iterator[bytes]:
    yield found.head(1) + data(1, b"\0\0\1\0\0")
    yield data(1, b"a") * 4 * FRAMES


def heads_without_end(found: Peer) -> Iterator[bytes]:
    for number in range(1, 8 * FRAMES, 2):
        yield found.head(number)


def windows_of_one_byte(found: Peer) -> Iterator[bytes]:
    yield SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 0}).serialize()
    yield found.request(1, MESSAGE)
    yield WindowUpdateFrame(0, window_increment=1).serialize() * 4 * FRAMES


def repeated(frame: Frame) -> Callable[[Peer], Iterator[bytes]]:
    return lambda _found: iter([frame.serialize() * 4 * FRAMES])


FLOODS: dict[str, Callable[[Peer], Iterator[bytes]]] = {
    "rapid resets": rapid_resets,
    "pings": repeated(PingFrame(0, b"12345678")),
    "settings": repeated(SettingsFrame(0, settings={SettingsFrame.HEADER_TABLE_SIZE: 2**31 - 1})),
    "window updates": windows_of_one_byte,
    "priorities": repeated(PriorityFrame(1, depends_on=3)),
    "unknown frames": lambda _found: iter([b"\0\0\0\x99\0\0\0\0\0" * 4 * FRAMES]),
    "empty data": empty_data,
    "tiny data": tiny_data,
    "heads without end": heads_without_end,
}


@pytest.mark.parametrize("name", FLOODS)
def test_flood_of_frames_without_requests_is_closed(port: int, name: str):
    with peer(port) as found:
        found.send(*FLOODS[name](found))
        assert found.end() == CALM


def continuations(size: int) -> bytes:
    head = HeadersFrame(1, b"").serialize()
    return head + ContinuationFrame(1, b"\x20" * size).serialize() * (2 * MAX_HEADER_LIST // max(size, 8))


@pytest.mark.parametrize("size", [0, 1, 1_000])
def test_flood_of_continuations_is_closed(port: int, size: int):
    with peer(port) as found:
        found.send(continuations(size))
        assert found.end() in (CALM, ErrorCodes.PROTOCOL_ERROR)  # h2 counts them, too


def test_header_bomb_is_closed(port: int):
    encoder = Encoder()
    opening = encoder.encode([*HEADERS, (b"bomb", b"x" * 3_000)])
    block = encoder.encode([*HEADERS, *[(b"bomb", b"x" * 3_000)] * 4_000])
    assert len(block) < MAX_HEADER_LIST
    with peer(port) as found:
        found.send(HeadersFrame(1, opening, flags=["END_HEADERS"]).serialize())
        found.send(HeadersFrame(3, block, flags=["END_HEADERS"]).serialize())
        assert found.end() == CALM


def test_block_of_table_size_updates_is_closed(port: int):
    with peer(port) as found:
        found.send(HeadersFrame(1, b"\x20" * MAX_FRAME, flags=["END_HEADERS"]).serialize())
        assert found.end() == ErrorCodes.PROTOCOL_ERROR


def test_settings_that_are_not_defined_are_forgotten(started: tuple[Service, int], port: int):
    node, _ = started
    before = memory(node)
    with ExitStack() as stack:
        for _ in range(5):
            found = stack.enter_context(peer(port))
            found.send(*undefined_settings(), found.request(1, MESSAGE))
            assert found.status(1) == StatusCode.OK
        assert memory(node) - before < 50 * MEBIBYTE


def test_settings_that_are_cut_short_are_closed(port: int):
    with peer(port) as found:
        found.send(settings(b"\x09\x09\0\0\0\1\0"))
        assert found.end() == ErrorCodes.FRAME_SIZE_ERROR


def test_what_is_not_http2_is_closed(port: int):
    for sent in (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n", b"\x16\3\1\0\0"):
        with peer(port, greets=False) as found:
            found.send(sent)
            assert found.end() == ErrorCodes.PROTOCOL_ERROR


def test_frame_above_the_bound_is_closed(port: int):
    with peer(port) as found:
        found.send(found.head(1), b"\xff\xff\xff\0\0\0\0\0\1")
        assert found.end() == ErrorCodes.FRAME_SIZE_ERROR


BAD_MESSAGES = {
    "several": (framed(MESSAGE) * 2, StatusCode.INVALID_ARGUMENT),
    "half": (framed(MESSAGE)[:-1], StatusCode.INVALID_ARGUMENT),
    "none": (b"", StatusCode.INVALID_ARGUMENT),
    "compressed": (b"\1" + framed(MESSAGE)[1:], StatusCode.UNIMPLEMENTED),
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_bad_message_has_a_status_and_the_connection_goes_on(port: int, name: str):
    sent, code = BAD_MESSAGES[name]
    with peer(port) as found:
        found.send(found.head(1), data(1, sent, "END_STREAM"))
        assert found.status(1) == code
        found.send(found.request(3, MESSAGE))
        assert found.status(3) == StatusCode.OK


def test_largest_message_is_read_and_a_larger_one_is_over_the_limit(port: int):
    unknown = b"\x7a\xf0\xff\x1f"  # a field with 524,272 bytes
    body = request({"principal": "a"}, domain="").SerializeToString()
    padded = unknown + b"\0" * (MAX_BODY - 16) + body
    with connected(port) as client:
        with pytest.raises(grpc.RpcError) as caught:
            client.send_bytes(padded[:MAX_BODY])
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        for larger in (padded + b"\0" * 16, padded * 8):
            answer = RateLimitResponse.FromString(client.send_bytes(larger))
            assert answer.overall_code == RateLimitResponse.OVER_LIMIT
        with pytest.raises(grpc.RpcError) as caught:
            client.channel.unary_unary(f"/{HEALTH}/Check")(padded * 2)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_message_that_is_too_large_is_answered_before_it_has_come(port: int):
    with peer(port) as found:
        found.send(found.head(1), data(1, b"\0\xff\xff\xff\xff"))
        assert found.status(1) == StatusCode.OK
        found.send(found.request(3, MESSAGE))
        assert found.status(3) == StatusCode.OK


def test_streams_above_the_bound_are_refused_alone(port: int):
    with peer(port) as found:
        found.send(*(found.head(number) for number in range(1, 2 * MAX_STREAMS + 2, 2)))
        refused = found.first(RstStreamFrame)
        assert (refused.stream_id, refused.error_code) == (2 * MAX_STREAMS + 1, ErrorCodes.REFUSED_STREAM)
        found.send(data(1, framed(MESSAGE), "END_STREAM"))
        assert found.first(DataFrame).stream_id == 1


def test_answer_waits_for_its_window(port: int):
    with peer(port) as found:
        found.send(SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 0}).serialize())
        found.send(found.request(1, MESSAGE), PingFrame(0, b"12345678").serialize())
        while not isinstance(frame := found.first(Frame), PingFrame):
            assert not isinstance(frame, DataFrame)
        found.send(WindowUpdateFrame(1, window_increment=3).serialize())
        assert len(found.first(DataFrame).data) == 3
        found.send(WindowUpdateFrame(1, window_increment=1_000).serialize())
        assert "END_STREAM" in found.first(HeadersFrame).flags


def test_half_closed_peer_gets_its_answer(port: int):
    with peer(port) as found:
        found.send(found.request(1, MESSAGE))
        found.socket.shutdown(1)
        assert found.status(1) == StatusCode.OK
        found.end()


def test_peer_that_says_goaway_gets_its_answer(port: int):
    with peer(port) as found:
        found.send(found.request(1, MESSAGE), GoAwayFrame(0, last_stream_id=0).serialize())
        assert found.status(1) == StatusCode.OK
        found.end()


def memory(node: Service) -> int:
    """The memory of a node in bytes."""
    lines = Path(f"/proc/{node.pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def test_unfinished_requests_are_bounded_and_others_are_answered(started: tuple[Service, int], port: int):
    node, _ = started
    before = memory(node)
    with ExitStack() as stack, connected(port) as client:
        for number in range(480):
            found = stack.enter_context(peer(port, f"127.0.0.{number % 5 + 2}"))
            found.send(*(found.head(each) for each in range(1, 2 * MAX_STREAMS, 2)))
            if number % 48 == 0:
                assert answered_by_the_store(client)
        shed = 'quotagate_shed_total{cause="unfinished_requests"}'
        eventually(lambda: shed in node.http.get("/metrics").text)
        assert answered_by_the_store(client)
        assert memory(node) - before < 100 * MEBIBYTE


def test_random_frames_break_nothing(port: int):
    chance = random.Random(7)
    for _ in range(150):
        with peer(port) as found:
            frames = []
            for _ in range(chance.randrange(1, 40)):
                content = chance.randbytes(chance.choice((0, 1, 4, 5, 6, 8, 9, 30)))
                head = len(content).to_bytes(3, "big") + bytes((chance.randrange(11), chance.randrange(256)))
                frames.append(head + chance.choice((0, 1, 1, 3, 5, 2)).to_bytes(4, "big") + content)
                if chance.random() < 0.3:
                    frames.append(found.head(chance.randrange(1, 9, 2)))
            found.send(*frames)
            found.socket.shutdown(1)
            found.end()


def test_random_bytes_in_a_valid_stream_break_nothing(port: int):
    chance = random.Random(8)
    for _ in range(150):
        with peer(port, greets=False) as found:
            sent = bytearray(PREFACE + SETTINGS + b"".join(found.request(n, MESSAGE) for n in (1, 3, 5)))
            for _ in range(chance.randrange(1, 6)):
                sent[chance.randrange(len(PREFACE), len(sent))] = chance.randrange(256)
            found.send(bytes(sent))
            found.socket.shutdown(1)
            found.end()


def test_silent_connections_count_for_their_address_alone():
    settings = {"QUOTAGATE_OPEN_TO": "127.0.0.0/8", "QUOTAGATE_MAX_CONNECTIONS_PER_ADDRESS": "20"}
    with serving(environment=settings) as (node, port), ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(peer(port, "127.0.0.2", greets=False))
        refused = 'quotagate_connections_refused_total{port="envoy",reason="address"} 20.0'
        eventually(lambda: refused in node.http.get("/metrics").text)
        with connected(port) as client:
            assert client.code({"principal": "other"}) == "OK"
