"""Free ports on loopback, for servers that must find them free again after they were killed."""

from __future__ import annotations

import random
import socket

HOST = "127.0.0.1"


def free_ports(count: int, above: int = 0) -> list[int]:
    """Ports that a server finds free again after it was killed: below those that outgoing connections get.

    Args:
        above: the ports that lie this much above them are free too.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20_000, 32_000 - above)
        if port not in found and all(map(_is_free, {port, port + above})):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((HOST, port))
        except OSError:
            return False
    return True
