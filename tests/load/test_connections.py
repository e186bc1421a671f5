"""Thousands of connections that ask nothing, or once: others get in, and are answered by the store."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from app.http.connections import MOST, MOST_OF_AN_ADDRESS
from tests.authority import Authority
from tests.few_files import OPEN_FILES
from tests.load.attacked import ATTACKER, attacked
from tests.load.crowd import crowding
from tests.load.holding import fallbacks_of
from tests.load.test_silent import MIB, resident
from tests.report import say
from tests.service import Service, eventually, running

SECONDS: Final = 4.0
GROWTH: Final = 256 * MIB
OTHER_FILES: Final = 64
"""Connections of the test itself, and files that the node opens for a moment."""
NEWCOMER: Final = "127.0.0.50"
LIMITED: Final = {"principal": "limited", "usage": {"mutations": 1}}
SPENT: Final = {"limit": 1e-9, "algorithm": "token_bucket", "burst": 1, "enforcement": "deny"}
SOURCES: Final = {"one address": [ATTACKER], "five addresses": [f"127.0.0.{n}" for n in range(60, 65)]}
ASK: Final = b'{"principal": "crowd", "usage": {"requests": 1}}'
SENDS: Final = {
    "nothing": b"",
    "half a head": b"POST /v1/decisions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le",
    "one request": b"POST /v1/decisions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n%b"
    % (len(ASK), ASK),
}


@dataclass(frozen=True)
class Crowd:
    """Connections of an attacker, and the limits of open files under which the node was started."""

    count: int
    sources: str
    sends: str
    files: str = "1024:524288"


QUICK: Final = (
    Crowd(9_000, "one address", "nothing"),
    Crowd(9_000, "five addresses", "one request", "1024:4096"),
    Crowd(9_000, "five addresses", "half a head"),
)
ALL: Final = [
    Crowd(count, sources, sends, files)
    for count in (9_000, 18_000)
    for sources in SOURCES
    for sends in SENDS
    for files in ("1024:4096", "1024:524288")
]


@pytest.mark.parametrize("crowd", QUICK, ids=str)
def test_crowd_takes_nothing_from_others(crowd: Crowd):
    check(crowd)


@pytest.mark.prove
@pytest.mark.parametrize("crowd", ALL, ids=str)
def test_every_crowd_takes_nothing_from_others(crowd: Crowd):
    check(crowd)


def check(crowd: Crowd) -> None:
    """Let a crowd in, and check everybody else."""
    with (
        attacked(program="tests.few_files", environment={OPEN_FILES: crowd.files}) as site,
        limited(site.node) as stays,
    ):
        before, files = resident(site.node), descriptors(site.node)

        bound = min(MOST, MOST_OF_AN_ADDRESS * len(SOURCES[crowd.sources])) + OTHER_FILES

        @contextmanager
        def during() -> Iterator[None]:
            with crowding(site.node.address, crowd.count, SOURCES[crowd.sources], SENDS[crowd.sends]):
                newcomers_get_in(site.node)
                eventually(lambda: descriptors(site.node) - files <= bound)
                yield
                is_still_limited(stays)

        site.check_others(str(crowd), SECONDS, during=during)
        grown = resident(site.node) - before
        say(f"{crowd}: {grown / MIB:.0f} MiB more")
        assert grown < GROWTH


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.mark.parametrize("sends", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["nothing", "half a hello"])
def test_crowd_before_tls_takes_nothing_from_others(authority: Authority, sends: bytes):
    server = authority.certify("server", san="IP:127.0.0.1")
    tls = {"QUOTAGATE_TLS_CERT": str(server.cert), "QUOTAGATE_TLS_KEY": str(server.key)}
    trust = authority.trusted()
    with running(environment=tls, trust=trust) as node, limited(node, trust) as stays:
        before, files = resident(node), descriptors(node)
        with crowding(node.address, 9_000, [ATTACKER], sends):
            eventually(lambda: descriptors(node) - files <= MOST_OF_AN_ADDRESS + OTHER_FILES)
            newcomers_get_in(node, trust)
            for _ in range(50):
                is_still_limited(stays)
            assert fallbacks_of(node) == 0
            assert resident(node) - before < GROWTH
            eventually(lambda: timed_out(node) >= MOST_OF_AN_ADDRESS)
            eventually(lambda: descriptors(node) - files <= OTHER_FILES)


@contextmanager
def limited(node: Service, trust: ssl.SSLContext | None = None) -> Iterator[httpx.Client]:
    """An open connection of a caller who is at its limit."""
    node.put("user=limited", controller_mutation_rate=SPENT)
    with client(node, NEWCOMER, trust) as http:
        assert decided(http) == ("admit", "store")
        yield http


def is_still_limited(http: httpx.Client) -> None:
    assert decided(http) == ("throttle", "store")


def newcomers_get_in(node: Service, trust: ssl.SSLContext | None = None) -> None:
    """Ask over new connections from other addresses."""
    with ExitStack() as stack:
        for n in range(1, 6):
            assert decided(stack.enter_context(client(node, f"127.0.2.{n}", trust))) == ("throttle", "store")


def client(node: Service, source: str, trust: ssl.SSLContext | None) -> httpx.Client:
    """One connection from an address, kept as long as the client."""
    transport = httpx.HTTPTransport(local_address=source, verify=trust or False)
    return httpx.Client(base_url=node.url, transport=transport, timeout=60)


def decided(http: httpx.Client) -> tuple[str, str]:
    """Outcome and source of a decision on the caller at its limit."""
    answer: dict[str, Any] = http.post("/v1/decisions", json=LIMITED).raise_for_status().json()
    return answer["decision"], answer["source"]


def descriptors(node: Service) -> int:
    """The number of a node's open files."""
    return len(list(Path(f"/proc/{node.pid}/fd").iterdir()))


def timed_out(node: Service) -> float:
    """How many connections were closed as they asked nothing in time."""
    line = 'quotagate_connections_refused_total{port="http",reason="timeout"} '
    found = [text for text in node.http.get("/metrics").text.splitlines() if text.startswith(line)]
    return float(found[0].removeprefix(line)) if found else 0.0
