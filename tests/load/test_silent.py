"""Callers that do not read, say nothing, or ask once: what they cost others, and what they leave behind."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from tests.load.attacked import ATTACKER, attacked
from tests.said import say
from tests.service import Service, eventually, running

SECONDS: Final = 4.0
DEAF: Final = 100
DOCUMENTS: Final = b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 100
CLOSED_WITHIN_S: Final = 30.0
IDLE: Final = 400
NAMES: Final = 21_000
MIB: Final = 1024 * 1024
GROWTH: Final = 64 * MIB


def test_who_does_not_read_costs_others_nothing_and_is_closed():
    """A hundred connections ask for a hundred documents each; the kernel, too, keeps nothing of them."""
    with attacked() as site, connected(site.node, DEAF) as deaf:
        for each in deaf:
            each.sendall(DOCUMENTS)
        site.held("who does not read", SECONDS)
        eventually(lambda: not of_attacker(site.node), within_s=CLOSED_WITHIN_S)


def test_idle_connections_beyond_the_limit_of_files_lock_nobody_out():
    """The shell allows 256 files, and the machine more."""
    with attacked(program="tests.load.few_files") as site, connected(site.node, IDLE):
        site.held("who says nothing", SECONDS)


def test_callers_with_long_names_leave_little_in_memory():
    """Three times as many as once filled hundreds of megabytes."""
    with running() as node:
        node.put("user=*", request_rate=1e9)
        ask_by_many(node, "warm", 1_000)
        before = resident(node)
        ask_by_many(node, "n" * 490, 3 * NAMES)
        grown = resident(node) - before
    say(f"{grown / MIB:.0f} MiB for {3 * NAMES:,} callers")
    assert grown < GROWTH


def ask_by_many(node: Service, name: str, callers: int) -> None:
    """Let so many callers ask once, whose names begin alike."""
    for first in range(0, callers, 1_000):
        numbers = range(first, min(first + 1_000, callers))
        node.batch([{"principal": f"{name}-{n}", "usage": {"requests": 1}} for n in numbers])


def resident(node: Service) -> int:
    """The bytes of memory that a node has."""
    status = Path(f"/proc/{node.pid}/status").read_text(encoding="utf-8")
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


@contextmanager
def connected(node: Service, connections: int) -> Iterator[list[socket.socket]]:
    """The attacker's connections to a node, from an address of its own."""
    source = (ATTACKER, 0)
    with ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(node.address, timeout=60, source_address=source))
            for _ in range(connections)
        ]


def of_attacker(node: Service) -> list[str]:
    """The bytes to be sent and to be read on each connection that the kernel keeps for a node's attacker."""
    ours = as_kernel_has_it(*node.address)
    theirs = as_kernel_has_it(ATTACKER, 0).partition(":")[0]
    table = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    sockets = [line.split() for line in table]
    return [queues for _, own, other, _, queues, *_ in sockets if own == ours and other.startswith(theirs)]


def as_kernel_has_it(address: str, port: int) -> str:
    """An address as the kernel's table of connections spells it."""
    return f"{socket.inet_aton(address)[::-1].hex().upper()}:{port:04X}"
