"""Clients that do not read, that stay idle, or that ask once: their cost to other callers, and in memory."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from app.http.server.acceptor import RECEIVE_BUFFER
from tests.few_files import OPEN_FILES
from tests.load.attacked import ATTACKER, attacked
from tests.report import say
from tests.service import Service, eventually, running

SECONDS: Final = 2.0
DEAF: Final = 100
DOCUMENTS: Final = b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 100
CLOSED_WITHIN_S: Final = 30.0
IDLE: Final = 400
NAMES: Final = 21_000
AT_ONCE: Final = 250
USAGE: Final = {"requests": 1, "request_time_ms": 1, "produce_bytes": 1, "mutations": 1, "connections": 1}
MIB: Final = 1024 * 1024
GROWTH: Final = 64 * MIB
MOST_UNREAD: Final = 2 * RECEIVE_BUFFER


def test_client_that_does_not_read_is_closed_and_slows_nobody():
    """A hundred connections ask for a hundred documents each; in the end the kernel has none of them left."""
    with attacked() as site, ExitStack() as stack:

        @contextmanager
        def deaf() -> Iterator[None]:
            for each in stack.enter_context(connected(site.node, DEAF)):
                each.sendall(DOCUMENTS)
            yield

        site.check_others("clients that do not read", SECONDS, during=deaf)
        assert attacker_queues(site.node)
        eventually(lambda: not attacker_queues(site.node), within_s=CLOSED_WITHIN_S)


def test_kernel_keeps_little_of_what_a_node_does_not_read():
    """The node is stopped, so that it reads nothing."""
    with running() as node, connected(node, 1) as (one,):
        os.kill(node.pid, signal.SIGSTOP)
        try:
            one.setblocking(False)
            with suppress(BlockingIOError):
                while one.send(bytes(MIB)):
                    pass
            queues = eventually(lambda: attacker_queues(node))
        finally:
            os.kill(node.pid, signal.SIGCONT)
    assert max(int(each.partition(":")[2], 16) for each in queues) <= MOST_UNREAD


def test_idle_connections_beyond_the_file_limit_lock_nobody_out():
    """The shell allows 256 files, the machine more."""
    with attacked({OPEN_FILES: "256:524288"}, program="tests.few_files") as site:
        site.check_others("idle clients", SECONDS, during=lambda: connected(site.node, IDLE))


def test_callers_with_long_names_leave_little_in_memory():
    """The memory kept for callers is bounded in bytes, not by their number."""
    with running() as node:
        rates = ("request_rate", "request_percentage", "producer_byte_rate", "controller_mutation_rate")
        node.put("user=*,client-id=*", **dict.fromkeys(rates, 2**30))
        node.put("listener=*", max_connection_creation_rate=2**30)
        ask_by_many(node, "warm", 1_000)
        before = resident(node)
        ask_by_many(node, "n" * 490, NAMES)
        grown = resident(node) - before
    say(f"{grown / MIB:.0f} MiB for {NAMES:,} callers")
    assert grown < GROWTH


def ask_by_many(node: Service, name: str, callers: int) -> None:
    """Let so many callers, whose names have a common prefix, ask once."""
    for first in range(0, callers, AT_ONCE):
        names = [f"{name}-{n}" for n in range(first, min(first + AT_ONCE, callers))]
        node.batch(
            [{"principal": each, "client_id": each, "listener": each, "usage": USAGE} for each in names]
        )


def resident(node: Service) -> int:
    """Return the resident memory of a node in bytes."""
    status = Path(f"/proc/{node.pid}/status").read_text(encoding="utf-8")
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


@contextmanager
def connected(node: Service, connections: int) -> Iterator[list[socket.socket]]:
    """Open connections to a node from the attacker's address."""
    source = (ATTACKER, 0)
    with ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(node.address, timeout=60, source_address=source))
            for _ in range(connections)
        ]


def attacker_queues(node: Service) -> list[str]:
    """Return the send and receive queue of each connection between a node and the attacker, by the kernel."""
    ours = kernel_spelling(*node.address)
    theirs = kernel_spelling(ATTACKER, 0).partition(":")[0]
    table = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    sockets = [line.split() for line in table]
    return [queues for _, own, other, _, queues, *_ in sockets if own == ours and other.startswith(theirs)]


def kernel_spelling(address: str, port: int) -> str:
    """Return an address as the kernel's table of connections spells it."""
    return f"{socket.inet_aton(address)[::-1].hex().upper()}:{port:04X}"
