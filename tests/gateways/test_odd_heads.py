"""No head of a visitor opens a gateway that asks over HTTP, neither for that visitor nor for the next."""

from __future__ import annotations

import random
import socket
import ssl
from base64 import b64encode
from collections.abc import Iterator, Sequence

import pytest

from tests.gateways import gateway as gateways
from tests.gateways.conftest import Limit, limiting
from tests.gateways.gateway import PASSWORDS, Gateway, Kind
from tests.gateways.test_balancer import BALANCER
from tests.gateways.test_odd_visitors import BYTES, FRAGMENTS, answer_to
from tests.service import Service, running

Fields = Sequence[tuple[bytes, bytes]]

HEADS: dict[str, tuple[bytes, Fields]] = {
    "long name": (b"/", [(b"X-Application", b"x" * 600)]),
    "very long name": (b"/", [(b"X-Application", b"x" * 60_000)]),
    "bytes": (b"/", [(b"X-Application", b"jos\xe9")]),
    "control characters": (b"/", [(b"X-Application", "\x85".encode())]),
    "tab": (b"/", [(b"X-Application", b"a\tb")]),
    "repeated": (b"/", [(b"X-Application", b"a"), (b"X-Application", b"b")]),
    "repeated credentials": (b"/", [(b"Authorization", b"Bearer x")]),
    "expectation": (b"/", [(b"Expect", b"more")]),
    "another protocol": (b"/", [(b"Connection", b"upgrade"), (b"Upgrade", b"websocket")]),
    "hops": (b"/", [(b"X-Forwarded-For", b"nowhere, \xff, " + b"10.0.0.7, " * 3_000)]),
    "trace": (b"/", [(b"tracestate", b"a=" + b"x" * 59_000)]),
    "connection": (b"/", [(b"Connection", b"close, X-Quotagate-Principal, X-Quotagate-IP")]),
    "many": (b"/", [(b"X-%d" % number, b"x") for number in range(2_000)]),
    "large cookie": (b"/", [(b"Cookie", b"x" * 1_040_000)]),
    "large header": (b"/", [(b"X-Other", b"x" * 1_040_000)]),
    "large name": (b"/", [(b"X-Application", b"x" * 1_040_000)]),
    "larger than any gateway takes": (b"/", [(b"X-Other", b"x" * 3_000_000)]),
    "long path": (b"/" + b"a" * 50_000, []),
    "bytes in the path": (b"/" + b"\xff" * 20_000, []),
    "large path": (b"/" + b"a" * 1_000_000, []),
    "many parameters": (b"/?" + b"requests=0&" * 2_000, []),
    "query of a check": (b"/?requests=0&deny_status=403&usage=x", []),
    "escapes": (b"/%ff%00%2e%2e//../x", []),
    "no path": (b"*", []),
}
"""Paths and headers."""


@pytest.fixture
def closed(gateway: Gateway, limit: Limit) -> Gateway:
    """A gateway that lets in neither alice nor bob."""
    for person in PASSWORDS:
        limit(gateway.kind.entity(person), 0)
    return gateway


def answer(gateway: Gateway, path: bytes, headers: Fields, source: str = "127.0.0.1") -> bytes:
    """The head of the answer that alice gets to one request."""
    token = b64encode(f"alice:{PASSWORDS['alice']}".encode())
    lines = [b"GET %b HTTP/1.1" % path, b"Host: site", b"Connection: close"]
    with socket.create_connection(("127.0.0.1", gateway.port), 60, source_address=(source, 0)) as plain:
        context = gateway.tls("alice")
        connection = plain
        if isinstance(context, ssl.SSLContext):
            connection = context.wrap_socket(plain, server_hostname="127.0.0.1")
        else:
            lines.append(b"Authorization: Basic " + token)
        with connection:
            fields = [name + b": " + value for name, value in headers]
            return answer_to(connection, b"\r\n".join([*lines, *fields, b"", b""]))[0]


def is_open(head: bytes) -> bool:
    return b"\r\nx-site:" in head.lower()


@pytest.mark.parametrize("name", HEADS)
def test_no_head_opens_a_gateway(closed: Gateway, name: str):
    got = answer(closed, *HEADS[name])
    assert not is_open(got)
    assert closed.ask("bob").status_code == 429, "it opened for the next visitor"


@pytest.mark.parametrize(
    "tries", [40, pytest.param(2_000, marks=[pytest.mark.prove, pytest.mark.timeout(3_600)], id="long")]
)
def test_no_random_head_opens_a_gateway(closed: Gateway, tries: int):
    chance = random.Random(f"{closed.kind.name} {tries}")
    for _ in range(tries):
        path, headers = odd_head(chance)
        assert not is_open(answer(closed, path, headers)), (path, headers)
    assert closed.ask("bob").status_code == 429


def odd_head(chance: random.Random) -> tuple[bytes, Fields]:
    """A path and headers."""
    names = (b"X-Application", b"X-Forwarded-For", b"X-Quotagate-IP", b"Connection", b"Cookie", b"X-Other")
    headers = []
    for _ in range(chance.choice((1, 1, 2, 10, 90, 400))):
        name = chance.choice(names) if chance.random() < 0.8 else bytes(chance.choices(BYTES, k=5))
        size = chance.choice((0, 1, 20, 300, 513, 2_000, 8_000))
        if chance.random() < 0.1:
            size = chance.choice((30_000, 59_000, 65_000, 130_000, 1_000_000))
        value = bytes(chance.choices(BYTES, k=size)) if chance.random() < 0.5 else b"x" * size
        headers.append((name, chance.choice((value, chance.choice(FRAGMENTS)))))
    path = bytes(chance.choices(BYTES, k=chance.choice((0, 0, 5, 600, 9_000))))
    return b"/" + path, headers


@pytest.fixture(scope="module")
def behind(kind: Kind, site: int) -> Iterator[tuple[Gateway, Service]]:
    """A gateway with the line for load balancers, and its node."""
    trusted = {"QUOTAGATE_TRUSTED_PROXIES": f"{BALANCER}/32"}
    with (
        running(environment=trusted) as node,
        gateways.running(kind, node.address[1], site, kind.patience, kind.balancer) as gateway,
    ):
        yield gateway, node


@pytest.mark.parametrize(
    "sent",
    [
        b"nowhere",
        b"\xff",
        b"",
        b"203.0.113.66",
        b"fe80::1%eth0",
        b"unknown, [::1",
        b"x" * 50_000,
        b"203.0.113.66, " * 4_000,
        b"127.0.0.2, " * 80,
        b"," * 7_000,
    ],
    ids=lambda sent: repr(sent[:20]),
)
def test_no_list_of_proxies_opens_a_gateway_behind_a_balancer(behind: tuple[Gateway, Service], sent: bytes):
    """The balancer adds the visitor's address to the header that the visitor sent."""
    gateway, node = behind
    with limiting(node) as limit:
        limit("ip=203.0.113.7", 0)
        got = answer(gateway, b"/", [(b"X-Forwarded-For", sent + b", 203.0.113.7")], BALANCER)
        assert not is_open(got)
