"""Puts TLS in front of a PostgreSQL whose wheel lacks it: first the handshake, then a relay."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import ssl
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.ready import ready
from tests.threaded import threaded

SSL_REQUEST: Final = struct.pack("!ii", 8, 80877103)
"""A PostgreSQL client's request for TLS; the answer ``S`` accepts it."""


@contextlib.contextmanager
def before(database: Path, context: ssl.SSLContext) -> Iterator[int]:
    """Relay a loopback port, which is returned, to a database's socket; cut off clients without TLS."""

    class Front(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            if self.request.recv(8) == SSL_REQUEST:
                with contextlib.suppress(OSError):
                    self.request.sendall(b"S")
                    with context.wrap_socket(self.request, server_side=True) as client:
                        _relay(client, database)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with threaded(Server(("127.0.0.1", 0), Front)) as server:
        yield server.server_address[1]


def _relay(client: ssl.SSLSocket, database: Path) -> None:
    with socket.socket(socket.AF_UNIX) as behind:
        behind.connect(str(database))
        ends: dict[socket.socket, socket.socket] = {client: behind, behind: client}
        while True:
            for end in [client] if client.pending() else ready([*ends])[0]:
                said = end.recv(65_536)
                if not said:
                    return
                ends[end].sendall(said)
