"""Ports on loopback that no other test takes, for servers that are killed and started again there."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from typing import Final

HOST = "127.0.0.1"

_taken: Final[list[ExitStack]] = []
"""The sockets that keep others from the ports, until this program ends."""


def free_ports(count: int, above: int = 0) -> list[int]:
    """Take ports below those that outgoing connections get.

    Args:
        above: the ports that lie this much above them are taken too.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20_000, 32_000 - above)
        if _take({port, port + above}):
            found.append(port)
    return found


def free_row_of_ports(count: int) -> int:
    """Take so many ports in a row, and return the first."""
    while True:
        first = random.randrange(20_000, 32_000)
        if _take(set(range(first, first + count))):
            return first


def _take(ports: set[int]) -> bool:
    """Take all of these ports, or none if somebody has one of them.

    A socket that does not listen holds each of them. Servers that use addresses again can still listen there,
    but the next search finds the port taken. A broker listens only seconds later; others search by then.
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
    return True
