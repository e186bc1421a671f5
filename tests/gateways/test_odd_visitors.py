"""A visitor who sends odd headers through a real Envoy is never admitted more often than a plain one."""

from __future__ import annotations

import random
import re
import socket
import ssl
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
import redis

from tests.envoy.calls import serving
from tests.envoy.raw import peer
from tests.envoy.test_service import a_minute
from tests.gateways.gateway import PASSWORDS
from tests.gateways.test_envoy_ratelimit import PATIENT, Site, behind_envoy
from tests.service import Service, eventually
from tests.unit.envoy.test_mapping import JOINED, RULES

ADMITTED: Final = 3
"""How many requests a plain visitor gets in, on every route."""
TIMES: Final = 5
QUOTAS: Final = ("user=*", "client-id=*", "user=*,client-id=*", "user=others", "ip=*")

Action = tuple[str, str] | tuple[str, str, bool]
"""An entry's key, the header with its value, and whether Envoy omits the entry without the header."""


@dataclass(frozen=True, slots=True)
class Route:
    """A route by its prefix, with the descriptors that Envoy makes there; ``x-user`` is authenticated."""

    prefix: str
    domain: str
    descriptors: Sequence[Sequence[Action]]

    def written(self) -> str:
        """The route as a line of the configuration."""
        limits = ",".join(f"{{actions: [{','.join(map(_action, each))}]}}" for each in self.descriptors)
        of_filter = (
            '"@type": type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimitPerRoute, '
            f"domain: {self.domain}, rate_limits: [{limits}]"
        )
        per_filter = f"{{envoy.filters.http.ratelimit: {{{of_filter}}}}}"
        match = f"{{prefix: {self.prefix}}}"
        return f"- {{match: {match}, route: {{cluster: site}}, typed_per_filter_config: {per_filter}}}"


def _action(action: Action) -> str:
    key, header, *optional = action
    if header == "address":
        return "{remote_address: {}}"
    if not header.startswith((":", "x-")):
        return f"{{generic_key: {{descriptor_key: {key}, descriptor_value: {header}}}}}"
    skip = ", skip_if_absent: true" if optional else ""
    return f'{{request_headers: {{header_name: "{header}", descriptor_key: {key}{skip}}}}}'


ALICE: Final = [("principal", "x-user")]
"""The descriptor that no header of a visitor may take away."""
ROUTES: Final = [
    Route(
        "/own", "none", [ALICE, [("principal", "x-odd")], [("client_id", "x-odd"), ("principal", "x-user")]]
    ),
    Route("/own-last", "none", [[("client_id", "x-odd")], [("principal", ":path")], ALICE]),
    Route("/own-address", "none", [[("remote_address", "x-odd")], [("remote_address", "address")], ALICE]),
    Route("/own-twice", "none", [[("principal", "x-user"), ("principal", "x-odd", True)]]),
    Route("/own-usage", "none", [[("usage", "x-odd"), ("principal", "x-odd")], ALICE]),
    Route("/own-broker", "none", [[("broker", "x-odd"), ("listener", "x-odd")], ALICE]),
    Route("/own-principal", "none", [[("principal", "x-odd")]]),
    Route("/own-client", "none", [[("client_id", "x-odd")]]),
    Route(
        "/joined", "shop", [ALICE, [("tenant", "x-odd"), ("path", ":path")], [("remote_address", "address")]]
    ),
    Route("/joined-tenant", "shop", [[("tenant", "x-odd")]]),
    Route("/joined-path", "shop", [[("path", "x-odd")]]),
    Route(
        "/joined-both", "shop", [[("tenant", "acme"), ("path", "x-odd"), ("remote_address", "x-odd")], ALICE]
    ),
    Route(
        "/joined-many", "shop", [[("path", "x-odd")] * 32, *([("path", "x-odd")] for _ in range(6)), ALICE]
    ),
    Route("/rules", "messaging", [[("path", "x-odd")]]),
    Route("/rules-number", "messaging", [[("type", "ad"), ("number", "x-odd")]]),
    Route("/rules-all", "messaging", [[("type", "x-odd"), ("number", "x-odd")], [("path", "x-odd")]]),
]
TRACED: Final = {
    "                use_remote_address: true\n": """                use_remote_address: true
                delayed_close_timeout: 0.05s
                tracing:
                  random_sampling: {value: 100}
                  provider:
                    name: envoy.tracers.opentelemetry
                    typed_config:
                      "@type": type.googleapis.com/envoy.config.trace.v3.OpenTelemetryConfig
                      grpc_service: {envoy_grpc: {cluster_name: site}}
"""
}
"""Tracing, by which Envoy sends the trace state of a visitor with its call.

A refused connection closes at once, not after a second.
"""
SIZES: Final = (1, 2, 30, 500, 511, 512, 513, 600, 3_000, 9_000, 20_000, 40_000, 58_000)
BYTES: Final = bytes(each for each in range(0x21, 0x100) if each != 0x7F)
NAMES: Final = (b"X-Odd", b"x-ODD", b"x_odd", b"X-User", b"x-user", b"X-Forwarded-For", b"traceparent")
FRAGMENTS: Final = (
    b"shop",
    b"%ff",
    b"%",
    b"*",
    b",",
    b"=",
    b"sha256:",
    b"\xff",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\xc2\x85",
    b" ",
    b"requests",
    b"10.0.0.7",
    b"fe80::1%eth0",
    "ä€😀".encode(),
)


def odd_value(chance: random.Random) -> bytes:
    """A value of a header that is not empty."""
    size = chance.choice(SIZES)
    match chance.randrange(4):
        case 0:
            value = bytes(chance.choices(BYTES, k=size))
        case 1:
            value = bytes((chance.choice(BYTES),)) * size
        case 2:
            value = b"".join(chance.choices(FRAGMENTS, k=1 + size // 8))
        case _:
            value = chance.choice(FRAGMENTS)
    return value.strip(b" \t") or b"x"


def odd_head(chance: random.Random) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """The end of a path, and headers, among them ``X-Odd``."""
    headers = [(b"X-Odd", odd_value(chance))] * chance.choice((1, 1, 1, 2, 70))
    if len(headers[0][1]) > 3_000:
        del headers[1:]
    for _ in range(chance.choice((0, 0, 1, 5, 20))):
        size = chance.choice((1, 5, 40, 300))
        name = chance.choice(NAMES) if chance.random() < 0.7 else bytes(chance.choices(BYTES, k=size))
        headers.append((name, chance.choice((b"", b"x", odd_value(chance)[:2_000]))))
    if chance.random() < 0.2:
        parent = b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"
        headers += [(b"traceparent", parent), (b"tracestate", b"a=" + b"x" * chance.choice(SIZES))]
    path = bytes(chance.choices(BYTES, k=chance.choice(SIZES[:8]))) if chance.random() < 0.3 else b""
    return path.replace(b"#", b"%"), headers


def admitted(port: int, path: bytes, headers: Sequence[tuple[bytes, bytes]], times: int = TIMES) -> int:
    """How many of equal requests of alice reach the site."""
    token = b64encode(f"alice:{PASSWORDS['alice']}".encode())
    lines = [b"GET %b HTTP/1.1" % path, b"Host: site", b"Authorization: Basic " + token]
    request = b"\r\n".join([*lines, *(name + b": " + value for name, value in headers), b"", b""])
    count = 0
    connection = None
    try:
        for _ in range(times):
            connection = connection or socket.create_connection(("127.0.0.1", port), 60)
            head, is_over = answer_to(connection, request)
            count += b"\r\nx-site: yes" in head
            if is_over:
                connection.close()
                connection = None
    finally:
        if connection is not None:
            connection.close()
    return count


def admitted_over_http2(port: int, path: bytes, headers: Sequence[tuple[bytes, bytes]]) -> int:
    """How many of equal requests of alice reach the site, each on a connection of HTTP/2."""
    token = b64encode(f"alice:{PASSWORDS['alice']}".encode())
    fixed = [(b":method", b"HEAD"), (b":scheme", b"http"), (b":path", path), (b":authority", b"site")]
    fields = [*fixed, (b"authorization", b"Basic " + token)]
    fields += [(name.lower(), value) for name, value in headers]
    count = 0
    for _ in range(TIMES):
        with peer(port) as found:
            found.compresses = False
            found.send(found.head(1, fields, "END_STREAM"))
            count += b"x-site" in found.fields(1)
    return count


Count = Callable[[int, bytes, Sequence[tuple[bytes, bytes]]], int]
"""Sends equal requests, and returns how many reach the site."""


def answer_to(connection: socket.socket, request: bytes) -> tuple[bytes, bool]:
    """The head of the answer to a request, and whether the connection has ended."""
    answer = b""
    try:
        connection.sendall(request)
        while True:
            head, found, body = answer.partition(b"\r\n\r\n")
            size = re.search(rb"\r\ncontent-length: ([0-9]+)", head)
            if found and len(body) >= (int(size[1]) if size else 0):
                return head, b"\r\nconnection: close" in head
            more = connection.recv(65_536)
            if not more:
                return head, True
            answer += more
    except (ConnectionError, ssl.SSLError):  # it refused the head before all of it had come
        return answer, True


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A node with the mappings, and an Envoy with the routes before it."""

    node: Service
    site: Site

    def admitted(
        self, path: bytes, headers: Sequence[tuple[bytes, bytes]], count: Count = admitted
    ) -> tuple[int, int]:
        """Count how many of equal requests reach the site, with empty buckets at first.

        Returns:
            the count, and the number of requests that a busy node shed; Envoy lets them in.
        """
        with redis.Redis.from_url(self.node.store_url) as store:
            store.flushall()
        before = self.outcomes().get("unavailable", 0)
        reached = count(self.site.port, path, headers)
        return reached, int(self.outcomes().get("unavailable", 0) - before)

    def outcomes(self) -> Mapping[str, float]:
        """The number of the node's answers, by outcome."""
        page = self.node.http.get("/metrics").text
        found = re.findall(
            r'^quotagate_envoy_requests_total\{outcome="(\w+)"\} ([0-9.]+)$', page, re.MULTILINE
        )
        return {outcome: float(count) for outcome, count in found}


@pytest.fixture(scope="module")
def arranged(site: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arrangement]:
    mapping: Path = tmp_path_factory.mktemp("mapping") / "mapping.yaml"
    mapping.write_text(JOINED + RULES.replace("\ndomains:\n", ""), encoding="utf-8")
    first = "                        - match: {prefix: /export}\n"
    # The longest prefix comes first: Envoy takes the first route that matches.
    longest = sorted(ROUTES, key=lambda route: -len(route.prefix))
    routes = {first: "".join(f"{' ' * 24}{route.written()}\n" for route in longest) + first}
    with serving(mapping) as (node, port), behind_envoy((port, port), site, PATIENT, TRACED, routes) as found:
        for entity in QUOTAS:
            node.put(entity, request_rate=a_minute(ADMITTED, on_store_failure="throttle"))
        eventually(lambda: admitted(found.port, b"/own", [(b"X-Odd", b"shop")], 1) == 1)
        yield Arrangement(node, found)


@pytest.mark.parametrize(
    "tries", [12, pytest.param(600, marks=[pytest.mark.prove, pytest.mark.timeout(3_600)], id="long")]
)
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.prefix[1:])
def test_an_odd_visitor_is_never_admitted_more_often_than_a_plain_one(
    arranged: Arrangement, route: Route, tries: int
):
    prefix = route.prefix.encode()
    for count in (admitted, admitted_over_http2):
        eventually(lambda: arranged.admitted(prefix, [(b"X-Odd", b"shop")], count) == (ADMITTED, 0))  # noqa: B023
    chance = random.Random(f"{route.prefix} {tries}")
    for _ in range(tries):
        path, headers = odd_head(chance)
        count = chance.choice((admitted, admitted, admitted_over_http2))
        reached, shed = arranged.admitted(prefix + path, headers, count)
        assert reached <= ADMITTED + shed, (path, headers)
    assert arranged.outcomes().keys() <= {"ok", "over_limit", "unavailable"}
