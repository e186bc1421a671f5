"""Ports on loopback that no other test takes, for servers that do not choose their own."""

from __future__ import annotations

import random
import socket
from collections import deque
from contextlib import ExitStack
from typing import Final

HOST = "127.0.0.1"

HELD: Final = 200
"""How many of the last takings are held: what a test took long ago, it uses or needs no more."""

_taken: Final[deque[ExitStack]] = deque()
"""Sockets that hold the ports."""


def free_port() -> int:
    """Take one port below the ephemeral range."""
    return free_ports(1)[0]


def free_ports(count: int, above: int = 0) -> list[int]:
    """Take ports below the ephemeral range, which outgoing connections use.

    Args:
        above: the ports this much above them are taken too.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20_000, 32_000 - above)
        if _take({port, port + above}):
            found.append(port)
    return found


def free_row_of_ports(count: int) -> int:
    """Take this many ports in a row, and return the first."""
    while True:
        first = random.randrange(20_000, 32_000)
        if _take(set(range(first, first + count))):
            return first


def _take(ports: set[int]) -> bool:
    """Take all of these ports, or none if one of them is in use.

    A bound socket that does not listen holds each port. Servers with SO_REUSEADDR can still listen there, but
    the next search finds the port taken. A broker listens only seconds later; others may search before.
    """
    with ExitStack() as stack:
        for port in ports:
            held = stack.enter_context(socket.socket())
            try:
                held.bind((HOST, port))
            except OSError:
                return False
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _taken.append(stack.pop_all())
    if len(_taken) > HELD:
        _taken.popleft().close()
    return True
