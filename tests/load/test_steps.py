"""No body on any route, and no frame, takes the loop for more than 10 ms of processor time in one step."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from hyperframe.frame import PingFrame, RstStreamFrame

from app.envoy.call import MAX_BODY
from app.envoy.http2 import MAX_FRAME, MAX_HEADER_LIST
from app.http.openapi.check import METHODS
from tests.envoy.calls import serving
from tests.envoy.raw import HEADERS, Peer, data, peer, undefined_settings
from tests.load.heavy_bodies import ANYWHERE, OF_PATHS, Make, of_example
from tests.report import say
from tests.service import Service
from tests.slowness import slowness

STEP_MS: Final = 10.0
"""On a processor whose ``slowness`` is 1; a slower or shared processor may take longer."""
TRIES: Final = 20
"""A shared processor takes up to three times as long at times: the bound must hold in one of these tries."""
DOCUMENT: Final = json.loads((Path(__file__).parents[2] / "openapi" / "openapi.json").read_text("utf-8"))
OPERATIONS: Final = [
    (method, path) for path, item in DOCUMENT["paths"].items() for method in item.keys() & METHODS
]
WITHOUT_BODY: Final = ("nested numbers in an unknown field", "integers")
"""The bodies for an operation that takes none."""


class TimedNode:
    """A node that writes down its long steps.

    Attributes:
        port: its port for Envoy.
    """

    def __init__(self, node: Service, port: int, steps: Path) -> None:
        self.node = node
        self.port = port
        self._steps = steps

    def longest(self, send: Callable[[], str]) -> tuple[float, str]:
        """Send something; return the time in ms of the longest step meanwhile, and the answer.

        The time is scaled to the processor that ``STEP_MS`` is for.
        """
        before = self._steps.stat().st_size
        answer = send()
        self.node.http.get("/health/live")  # so that the steps of the answer have ended
        with self._steps.open(encoding="utf-8") as written:
            written.seek(before)
            steps = sorted((float(line.partition(" ")[0]), line.strip()) for line in written)
        took_ms, step = steps[-1] if steps else (0.0, "")
        return took_ms / slowness(), f"{took_ms:.1f} ms {answer} {step}"

    def request(self, method: str, path: str, body: bytes) -> str:
        """Send a body; return the answer."""
        headers = {"Content-Type": "application/json"}
        answer = self.node.http.request(method, path, content=body, headers=headers)
        return f"{method} {path} {answer.status_code} {answer.text[:100]}"


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TimedNode]:
    steps = tmp_path_factory.mktemp("steps") / "steps"
    steps.touch()
    environment = {
        "QG_STEPS": str(steps),
        "QUOTAGATE_VOLUME_SOURCE": "push",
        "QUOTAGATE_VOLUME_MIN_AVAILABLE_BYTES": "10",
        "QUOTAGATE_LOG": "all",
        "QUOTAGATE_TRUSTED_PROXIES": "10.0.0.0/8",
    }
    with serving(program="tests.load.timed_steps", environment=environment) as (node, port):
        node.put("user=*", request_rate=1e9, producer_ids_rate=100_000)
        node.put("user=*,client-id=*", producer_byte_rate=1e9, consumer_byte_rate=1e9)
        yield TimedNode(node, port, steps)


def shortest(send: Callable[[int], str], timed: TimedNode) -> tuple[float, str]:
    """The longest step of the best try, and the answer; ``send`` gets the number of the try."""
    took = [timed.longest(lambda: send(0))]
    while took[-1][0] > STEP_MS and len(took) < TRIES:
        took.append(timed.longest(partial(send, len(took))))
    return min(took)


def same(body: bytes, _: int) -> bytes:
    return body


def bodies(method: str, path: str) -> dict[str, Make]:
    """The bodies to send to an operation."""
    anywhere: dict[str, Make] = {name: partial(same, body) for name, body in ANYWHERE.items()}
    content: dict[str, Any] = DOCUMENT["paths"][path][method].get("requestBody", {}).get("content", {})
    if not content:
        return {name: anywhere[name] for name in WITHOUT_BODY}
    shown = next(iter(content.values()))
    first = shown["example"] if "example" in shown else next(iter(shown["examples"].values()))["value"]
    return {**anywhere, **OF_PATHS.get(path, {}), **dict(of_example(first))}


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_body_takes_the_loop_for_long(timed: TimedNode, method: str, path: str):
    slow = []
    url = path.format(entity="user=a", name="a", lease="a")
    most_ms = 0.0
    for name, make in bodies(method, path).items():
        took_ms, what = shortest(lambda number: timed.request(method.upper(), url, make(number)), timed)  # noqa: B023
        most_ms = max(most_ms, took_ms)
        if took_ms > STEP_MS:
            slow.append(f"{name}: {what}")
    say(f"{method} {path}: at most {most_ms:.1f} ms")
    assert slow == []


def references(found: Peer) -> Iterator[bytes]:
    """Header blocks of references to small entries of the compression table, and their streams reset."""
    small = [(b"a%d" % number, b"") for number in range(90)]
    yield found.head(1, [*HEADERS, *small])
    for number in range(3, 601, 2):
        yield found.head(number, [*HEADERS, *small * 4]) + RstStreamFrame(number).serialize()


def long_values(found: Peer) -> Iterator[bytes]:
    """Header blocks of one value, in the longest codes."""
    for number in range(1, 41, 2):
        yield found.head(number, [*HEADERS, (b"a", b"\xff" * (MAX_HEADER_LIST // 5))])


def small_requests(found: Peer) -> Iterator[bytes]:
    """Frames of empty requests."""
    for number in range(1, 301, 2):
        yield found.head(number, HEADERS, "END_STREAM")


def padded_data(found: Peer) -> Iterator[bytes]:
    """Large frames of a message that is too large."""
    yield found.head(1) + data(1, b"\0" + MAX_BODY.to_bytes(4, "big"))
    yield data(1, b"\0" * MAX_FRAME) * (MAX_BODY // MAX_FRAME - 1)


HOST: Final = b"Host: 127.0.0.1\r\n"
PIECES: Final[dict[str, bytes]] = {
    "chunks of one byte": b"POST /v1/decisions HTTP/1.1\r\n%bTransfer-Encoding: chunked\r\n\r\n%b0\r\n\r\n"
    % (HOST, b"1\r\n \r\n" * 100_000),
    "fields of four bytes": b"GET /health/live HTTP/1.1\r\n%b%b\r\n" % (HOST, b"a:\r\n" * 15_000),
    "small requests": (b"GET /health/live HTTP/1.1\r\n%b\r\n" % HOST) * 2_000,
    "trailers": b"POST /v1/decisions HTTP/1.1\r\n%bTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n%b\r\n"
    % (HOST, b"a:\r\n" * 15_000),
    "a query of many parameters": b"GET /v1/check?%b HTTP/1.1\r\n%b\r\n" % (b"a&" * 1_000, HOST),
    "a query of equal parameters": b"GET /v1/check?%b HTTP/1.1\r\n%b\r\n" % (b"requests=1&" * 700, HOST),
    "a query of a route of administration": b"GET /health/live?%b HTTP/1.1\r\n%b\r\n"
    % (b"a=&" * 1_000, HOST),
    "proxies": b"GET /v1/check HTTP/1.1\r\n%bX-Forwarded-For: %b10.0.0.1\r\n\r\n"
    % (HOST, b"10.0.0.1," * 7_000),
    "a long target": b"GET /%b HTTP/1.1\r\n%b\r\n" % (b"%41" * 20_000, HOST),
}
"""Other data that a connection may send, besides large bodies."""


@pytest.mark.parametrize("name", PIECES)
def test_nothing_that_is_sent_in_one_piece_takes_the_loop_for_long(timed: TimedNode, name: str):
    def send(_: int) -> str:
        with socket.create_connection(timed.node.address, 60) as connection:
            connection.sendall(PIECES[name])
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(partial(connection.recv, 65_536), b""))[:40].decode()

    took_ms, what = shortest(send, timed)
    say(f"{name}: at most {took_ms:.1f} ms")
    assert took_ms <= STEP_MS, what


FRAMES: Final[dict[str, Callable[[Peer], Iterator[bytes]]]] = {
    "references": references,
    "long values": long_values,
    "small requests": small_requests,
    "data": padded_data,
    "undefined settings": lambda _found: undefined_settings(),
}


@pytest.mark.parametrize("name", FRAMES)
def test_no_frame_takes_the_loop_for_long(timed: TimedNode, name: str):
    def send(_: int) -> str:
        with peer(timed.port) as found:
            found.send(*FRAMES[name](found), PingFrame(0, b"12345678").serialize())
            return str(found.first(PingFrame))

    took_ms, what = shortest(send, timed)
    say(f"{name}: at most {took_ms:.1f} ms")
    assert took_ms <= STEP_MS, what
