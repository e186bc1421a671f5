"""Large bodies on many connections: they are read and explained in fair turns, and others do not notice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from tests.load.attacked import ATTACKER, NOBODY, Attack, Site, attacked
from tests.load.crowd import crowding
from tests.load.heavy_bodies import ANYWHERE, BATCHES, MIB
from tests.load.test_silent import resident
from tests.report import say

SECONDS: Final = 2.0
GROWTH: Final = 256 * MIB
ACCOUNT: Final = "account"
"""The name of a key that may take leases."""
WRONG: Final = "a key that nobody has"
CROWD: Final = 9_000
SOURCES: Final = [f"127.0.0.{n}" for n in range(60, 65)]
NESTED: Final = ANYWHERE["nested numbers in an unknown field"]
LONG: Final = b'{"usage":{"requests":1},"principal":"%b"}' % (b"a" * (MIB - 100))
SMALL: Final = b'{"usage":{"requests":1},"principal":"%b"}' % (b"a" * 16_384)
BODIES: Final = {
    "nested numbers": Attack(path="/v1/decisions", body=NESTED.decode(), refused="422"),
    "a long name": Attack(path="/v1/decisions", body=LONG.decode(), refused="422"),
    "chunks of one byte": Attack(path="/v1/decisions", body=SMALL.decode(), chunk=1, refused="422"),
    "a batch of nested numbers": Attack(path="/v1/decisions:batch", body=NESTED.decode(), refused="422"),
    "a batch of ids": Attack(
        path="/v1/decisions:batch", body=BATCHES["ten asks with a thousand ids each"](0).decode()
    ),
    "leases of nested numbers": Attack(path="/v1/leases", body=NESTED.decode(), refused="422"),
    "administration without its scope": Attack(path="/v1/quotas:alter", body=NESTED.decode(), refused="403"),
}
QUICK: Final = [*((name, 32) for name in BODIES), ("nested numbers", 2)]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with attacked() as site:
        answer = site.node.http.post("/v1/keys", json={"name": ACCOUNT, "scopes": ["account"]})
        site.keys[ACCOUNT] = answer.raise_for_status().json()["key"]
        yield site


@pytest.mark.parametrize(("name", "connections"), QUICK)
def test_large_bodies_do_not_slow_other_callers(site: Site, name: str, connections: int):
    check(site, name, connections)


@pytest.mark.prove
@pytest.mark.parametrize("connections", [64, 256])
@pytest.mark.parametrize("name", BODIES)
def test_more_large_bodies_do_not_slow_other_callers(site: Site, name: str, connections: int):
    check(site, name, connections)


def check(site: Site, name: str, connections: int) -> None:
    """Let an attacker send bodies, and check everybody else and the memory of the node."""
    attack = BODIES[name]
    key = {"/v1/leases": ACCOUNT, "/v1/quotas:alter": ATTACKER}.get(attack.path, NOBODY)
    load = site.attack(attack, SECONDS, key)
    load.connections = connections
    before = resident(site.node)
    site.check_others(f"{name}, {connections} connections", SECONDS, load)
    grown = resident(site.node) - before
    say(f"{name}, {connections} connections: {grown / MIB:.0f} MiB more")
    assert grown < GROWTH


WITHHELD: Final = {
    "decisions": ("/v1/decisions", NOBODY),
    "leases": ("/v1/leases", ACCOUNT),
    "a wrong key": ("/v1/decisions", WRONG),
}
"""Routes, and keys by name."""


@pytest.mark.parametrize("name", WITHHELD)
def test_bodies_without_their_last_byte_take_little_memory(site: Site, name: str):
    check_withheld(site, name, MIB // 8)


@pytest.mark.prove
@pytest.mark.parametrize("name", WITHHELD)
def test_larger_bodies_without_their_last_byte_take_little_memory(site: Site, name: str):
    check_withheld(site, name, MIB)


def check_withheld(site: Site, name: str, size: int) -> None:
    """Open nine thousand connections from five addresses; each sends a body without its last byte.

    Args:
        size: of a body, in bytes; all bodies are much more than the memory that they may take.
    """
    path, key = WITHHELD[name]
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {size}\r\n"
    if key:
        head += f"Authorization: Bearer {site.keys.get(key, key)}\r\n"
    before, most = resident(site.node), 0
    assert CROWD * size > 4 * GROWTH

    @contextmanager
    def withholding() -> Iterator[None]:
        nonlocal most
        with crowding(site.node.address, CROWD, SOURCES, head.encode() + b"\r\n" + b" " * (size - 1)):
            most = max(most, resident(site.node))
            yield
            most = max(most, resident(site.node))

    site.check_others(f"withheld: {name}", SECONDS, during=withholding)
    say(f"withheld: {name}: {(most - before) / MIB:.0f} MiB more")
    assert most - before < GROWTH
