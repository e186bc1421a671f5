"""Thousands of connections that ask nothing, or once: others get in, and are answered by the store."""

from __future__ import annotations

import resource
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Final

import httpx
import pytest
from hpack import Encoder
from hyperframe.frame import DataFrame, HeadersFrame

from app.envoy.http2 import PREFACE
from app.envoy.protos.health_pb2 import HealthCheckRequest
from app.envoy.protos.ratelimit_pb2 import RateLimitResponse
from app.envoy.server import HEALTH, METHOD
from app.http.server.connections import Port, usual_bounds
from app.node.open_files import RESERVE
from tests.addresses import in_own_64
from tests.authority import Authority
from tests.envoy import raw
from tests.envoy.calls import request
from tests.few_files import OPEN_FILES
from tests.load.attacked import ATTACKER, OTHERS, Account, Site, attacked
from tests.load.crowd import crowding
from tests.load.holding import counted
from tests.load.network import network
from tests.load.test_silent import MIB, resident
from tests.ports import free_port
from tests.report import say
from tests.service import Service, eventually

SECONDS: Final = 2.0
GROWTH: Final = 256 * MIB
OTHER_FILES: Final = 64
"""Connections of the test itself, and files that the node opens for a moment."""
CROWDS: Final = 5
ASKS: Final = 50
"""The number of asks of the caller whose waits are compared."""
STAYER: Final = "127.0.0.50"
NEWCOMERS: Final = [f"127.0.2.{n}" for n in range(1, 6)]
SPENT: Final = {"limit": 1e-9, "algorithm": "token_bucket", "burst": 1, "enforcement": "deny"}
LIMITED: Final = {"principal": "limited", "usage": {"mutations": 1}}
LIMITED_CALL: Final = request({"principal": "limited", "usage": "mutations"}).SerializeToString()

SOURCES: Final = {
    "one address": [ATTACKER],
    "five addresses": [f"127.0.0.{n}" for n in range(60, 65)],
    "one /64": [in_own_64(ATTACKER).replace("::1", f"::{n:x}") for n in range(1, 1_001)],
}
IN_IPV6: Final = [*SOURCES["one /64"], *map(in_own_64, (STAYER, *NEWCOMERS, *OTHERS))]

ASK: Final = b'{"principal": "crowd", "usage": {"requests": 1}}'
POST: Final = b"POST /v1/decisions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(ASK)
GREETING: Final = PREFACE + raw.SETTINGS


def whole_hello() -> bytes:
    """Return the first message of a TLS handshake."""
    came, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(came, sent, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()


def call(method: str, message: bytes) -> bytes:
    """Return all that a client sends for one call."""
    headers = [(name, method.encode() if name == b":path" else value) for name, value in raw.HEADERS]
    head = HeadersFrame(1, Encoder().encode(headers), flags=["END_HEADERS"]).serialize()
    return GREETING + head + raw.data(1, raw.framed(message), "END_STREAM")


SENDS: Final[Mapping[str, bytes]] = {
    "nothing": b"",
    "half a head": POST[:-10],
    "one request": POST + ASK,
    "half a hello": whole_hello()[:6],
    "a hello": whole_hello(),
    "half a preface": PREFACE[:12],
    "settings": GREETING,
    "one call": call(METHOD, request({"principal": "crowd"}).SerializeToString()),
    "a watch": call(f"/{HEALTH}/Watch", HealthCheckRequest().SerializeToString()),
}
ASKING: Final = frozenset({"one request", "one call", "a watch"})
"""These connections may stay; all others end in time."""


@dataclass(frozen=True)
class Crowd:
    """Connections of an attacker, and the limits of open files under which the node was started."""

    count: int
    port: Port
    sources: str
    sends: str
    files: str = "1024:524288"
    tls: bool = False

    def __str__(self) -> str:
        port = f"{self.port} with TLS" if self.tls else self.port
        return f"{self.count} to {port} from {self.sources} with {self.sends}, {self.files} files"


QUICK: Final = (
    Crowd(9_000, "http", "one address", "nothing"),
    Crowd(9_000, "http", "five addresses", "one request", "1024:4096"),
    Crowd(9_000, "http", "five addresses", "half a hello", tls=True),
    Crowd(9_000, "envoy", "five addresses", "one call", "1024:4096"),
    Crowd(9_000, "envoy", "one /64", "settings"),
)
IN_ALL_SIZES: Final[Sequence[tuple[Port, str, bool]]] = (
    ("http", "nothing", False),
    ("http", "one request", False),
    ("http", "nothing", True),
    ("envoy", "nothing", False),
    ("envoy", "one call", False),
    ("envoy", "nothing", True),
)
LARGEST: Final[Sequence[tuple[Port, str, bool]]] = (
    ("http", "half a head", False),
    ("http", "half a hello", True),
    ("http", "a hello", True),
    ("envoy", "half a hello", True),
    ("envoy", "half a preface", False),
    ("envoy", "settings", False),
    ("envoy", "a watch", False),
)
ALL: Final = [
    Crowd(connections, port, sources, sends, files, tls)
    for port, sends, tls in IN_ALL_SIZES
    for connections in (9_000, 18_000)
    for sources in SOURCES
    for files in ("1024:4096", "1024:524288")
] + [Crowd(18_000, port, sources, sends, tls=tls) for port, sends, tls in LARGEST for sources in SOURCES]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.mark.parametrize("crowd", QUICK, ids=str)
def test_crowd_takes_nothing_from_others(authority: Authority, crowd: Crowd):
    check(authority, crowd)


@pytest.mark.prove
@pytest.mark.parametrize("crowd", ALL, ids=str)
def test_every_crowd_takes_nothing_from_others(authority: Authority, crowd: Crowd):
    check(authority, crowd)


@pytest.mark.prove
def test_crowds_of_handshakes_one_after_the_other_take_no_more_memory_than_one(authority: Authority):
    crowd = Crowd(6_000, "http", "five addresses", "half a hello", tls=True)
    with site_of(authority, crowd) as (site, address):
        before, files = resident(site.node), descriptors(site.node)
        for _ in range(CROWDS):
            with crowding(address, crowd.count, SOURCES[crowd.sources], SENDS[crowd.sends]):
                grown = resident(site.node) - before
                say(f"{grown / MIB:.0f} MiB more")
                assert grown < GROWTH
            eventually(lambda: descriptors(site.node) - files <= OTHER_FILES)


def check(authority: Authority, crowd: Crowd) -> None:
    """Let a crowd in, and check everybody else."""
    with site_of(authority, crowd) as (site, address), limited(site, address, crowd.port) as is_admitted:
        node, sources = site.node, SOURCES[crowd.sources]
        before, files = resident(node), descriptors(node)
        bound = bound_of(node, crowd)
        calm_ms, attacked_ms, grown = wait_ms(is_admitted), 0.0, 0

        @contextmanager
        def during() -> Iterator[None]:
            nonlocal attacked_ms, grown
            with crowding(address, crowd.count, sources, SENDS[crowd.sends]):
                newcomers_get_in(site, address, crowd.port)
                eventually(lambda: descriptors(node) - files <= bound + OTHER_FILES)
                account = Account.of(node.pid)
                attacked_ms = wait_ms(is_admitted)
                assert attacked_ms <= calm_ms + Account.of(node.pid).slower_by_ms(account)
                grown = max(grown, resident(node) - before)
                yield
                assert not is_admitted()
                if crowd.sends not in ASKING:
                    eventually(lambda: timed_out(node, crowd.port) >= bound - OTHER_FILES)
                    eventually(lambda: descriptors(node) - files <= OTHER_FILES)

        site.check_others(str(crowd), SECONDS, during=during)
        grown = max(grown, resident(node) - before)
        _, hard = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
        say(
            f"a caller of this port {calm_ms:.1f} ms, then {attacked_ms:.1f} ms;"
            f" {grown / MIB:.0f} MiB more; the node may open {hard:,} files"
        )
        assert grown < GROWTH


@contextmanager
def site_of(authority: Authority, crowd: Crowd) -> Iterator[tuple[Site, tuple[str, int]]]:
    """Run a node with both ports; also return the address of the port that the crowd goes to."""
    host, envoy_port = "127.0.0.1", free_port()
    environment = {OPEN_FILES: crowd.files, "QUOTAGATE_OPEN_TO": "127.0.0.0/8,::1,fd00::/16"}
    with ExitStack() as stack:
        if crowd.sources == "one /64":
            host = "::1"
            stack.enter_context(network(IN_IPV6))
        environment |= {"QUOTAGATE_HOST": host, "QUOTAGATE_ENVOY_PORT": str(envoy_port)}
        if crowd.tls:
            server = authority.certify("server", san="IP:127.0.0.1,IP:::1")
            environment |= {"QUOTAGATE_TLS_CERT": str(server.cert), "QUOTAGATE_TLS_KEY": str(server.key)}
        ca = str(authority.ca) if crowd.tls else ""
        node = attacked(environment, ca, program="tests.few_files", address=(host, 0))
        site = stack.enter_context(node)
        yield site, site.node.address if crowd.port == "http" else (host, envoy_port)


def bound_of(node: Service, crowd: Crowd) -> int:
    """Return how many connections of a crowd a node holds, by its limit of open files."""
    most, of_an_address = usual_bounds(with_tls=crowd.tls)
    _, hard = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
    room = min(most, hard - RESERVE)
    of_an_address = of_an_address * room // most
    return min(room, of_an_address * (5 if crowd.sources == "five addresses" else 1))


# Callers at their limit: the store refuses, and a node without its store would admit

IsAdmitted = Callable[[], bool]
"""Asks once, over a connection that is kept."""


@contextmanager
def limited(site: Site, address: tuple[str, int], port: Port) -> Iterator[IsAdmitted]:
    """A caller that reaches its limit."""
    site.node.put("user=limited", controller_mutation_rate=SPENT)
    with CALLERS[port](site, address, STAYER) as is_admitted:
        assert is_admitted()
        yield is_admitted


def newcomers_get_in(site: Site, address: tuple[str, int], port: Port) -> None:
    """Ask over new connections from other addresses."""
    with ExitStack() as stack:
        for source in NEWCOMERS:
            is_admitted = stack.enter_context(CALLERS[port](site, address, source))
            assert not is_admitted()


def wait_ms(is_admitted: IsAdmitted) -> float:
    """Return the median wait of a caller that asks many times."""
    waits = []
    for _ in range(ASKS):
        began = time.perf_counter()
        assert not is_admitted()
        waits.append(1000 * (time.perf_counter() - began))
    return median(waits)


@contextmanager
def asking_http(site: Site, _address: tuple[str, int], source: str) -> Iterator[IsAdmitted]:
    """A caller of the HTTP port."""
    transport = httpx.HTTPTransport(local_address=site.source(source), verify=trust(site) or False)
    with httpx.Client(base_url=site.node.url, transport=transport, timeout=60) as http:

        def is_admitted() -> bool:
            answer = http.post("/v1/decisions", json=LIMITED).raise_for_status().json()
            assert answer["source"] == "store"
            return bool(answer["decision"] == "admit")

        yield is_admitted


@contextmanager
def asking_envoy(site: Site, address: tuple[str, int], source: str) -> Iterator[IsAdmitted]:
    """A caller of the port for Envoy."""
    with ExitStack() as stack:
        connection = socket.create_connection(address, 60, source_address=(site.source(source), 0))
        stack.enter_context(connection)
        if tls := trust(site):
            tls.set_alpn_protocols(["h2"])
            connection = stack.enter_context(tls.wrap_socket(connection, server_hostname=address[0]))
        peer, numbers = raw.Peer(connection), count(1, 2)
        peer.send(GREETING)

        def is_admitted() -> bool:
            number = next(numbers)
            peer.send(peer.request(number, LIMITED_CALL))
            message = peer.first(DataFrame, number).data[len(raw.framed(b"")) :]
            return RateLimitResponse.FromString(message).overall_code == RateLimitResponse.OK

        yield is_admitted


CALLERS: Final[Mapping[Port, Callable[[Site, tuple[str, int], str], AbstractContextManager[IsAdmitted]]]] = {
    "http": asking_http,
    "envoy": asking_envoy,
}


def trust(site: Site) -> ssl.SSLContext | None:
    return ssl.create_default_context(cafile=site.ca) if site.ca else None


def descriptors(node: Service) -> int:
    """The number of a node's open files."""
    return len(list(Path(f"/proc/{node.pid}/fd").iterdir()))


def timed_out(node: Service, port: Port) -> float:
    """How many connections were closed as they asked nothing in time."""
    return counted(node, "quotagate_connections_refused_total", port=port, reason="timeout")
