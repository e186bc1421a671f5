"""A site and a visitor that speak WebSocket, and a relay that keeps the heads of gateways' checks."""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import struct
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha1
from typing import Any, Final, Protocol, Self

from tests.ready import ready
from tests.threaded import threaded

MAGIC: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""Joined to the key of a handshake (RFC 6455)."""
TEXT: Final = 1
BINARY: Final = 2
CLOSE: Final = 8
KEY: Final = b64encode(bytes(range(16))).decode()


class Reader(Protocol):
    """The part of a binary stream that frames are read by."""

    def read(self, size: int, /) -> bytes: ...


class Noting(socketserver.ThreadingTCPServer):
    """A server on a free port of loopback that keeps the heads of all requests, newest last."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, answers: type[socketserver.BaseRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), answers)
        self.heads: list[str] = []
        self.node = 0

    @property
    def port(self) -> int:
        port: int = self.server_address[1]
        return port


class _Site(socketserver.StreamRequestHandler):
    """A site that echoes after a WebSocket upgrade, and answers every other request with 200."""

    server: Noting

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while fields := self._head():
                if fields.get("upgrade", "").lower() == "websocket":
                    self._echo(fields["sec-websocket-key"])
                    return
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Site: yes\r\nContent-Length: 2\r\n\r\nok")

    def _head(self) -> dict[str, str]:
        lines = []
        while (line := self.rfile.readline().decode("latin-1").rstrip("\r\n")) != "":
            lines.append(line)
        if lines:
            self.server.heads.append("\n".join(lines))
        return dict(_field(line) for line in lines[1:])

    def _echo(self, key: str) -> None:
        accept = b64encode(sha1(key.encode() + MAGIC).digest())
        self.wfile.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"X-Site: yes\r\nSec-WebSocket-Accept: " + accept + b"\r\n\r\n"
        )
        kind = 0
        while kind != CLOSE:
            kind, payload = read_frame(self.rfile)
            self.wfile.write(frame(kind, payload, mask=b""))


class _Relay(socketserver.BaseRequestHandler):
    """Passes everything on to a node."""

    server: Noting

    def handle(self) -> None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.server.node)) as node:
            ends: dict[socket.socket, socket.socket] = {self.request: node, node: self.request}
            while True:
                for end in ready([*ends])[0]:
                    if not (said := end.recv(65_536)):
                        return
                    if end is self.request:
                        self.server.heads.append(said.decode("latin-1"))
                    ends[end].sendall(said)


@contextlib.contextmanager
def listening(answers: type[socketserver.BaseRequestHandler]) -> Iterator[Noting]:
    with threaded(Noting(answers)) as server:
        yield server


def site() -> contextlib.AbstractContextManager[Noting]:
    """A site that echoes the frames of WebSockets."""
    return listening(_Site)


@contextlib.contextmanager
def relay(node: int) -> Iterator[Noting]:
    """A relay before a node (its port)."""
    with listening(_Relay) as server:
        server.node = node
        yield server


class WebSocket:
    """A visitor's connection after the request for an upgrade.

    Attributes:
        status: of the answer; 101 is an open WebSocket.
        fields: of the answer, by lower-case name.
    """

    def __init__(
        self,
        connection: socket.socket,
        headers: Sequence[tuple[str, str]],
        upgrade: Mapping[str, str] | None = None,
    ) -> None:
        wanted = upgrade or {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Key": KEY,
            "Sec-WebSocket-Version": "13",
        }
        lines = ["GET /chat HTTP/1.1", "Host: site.example"]
        lines += [f"{name}: {value}" for name, value in (*wanted.items(), *headers)]
        self._connection = connection
        self._read: Any = connection.makefile("rb")
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        self.status = int(self._line().split()[1])
        self.fields: dict[str, str] = {}
        while line := self._line():
            name, value = _field(line)
            self.fields[name] = value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._read.close()
        self._connection.close()

    def echoed(self, payload: bytes, kind: int = TEXT) -> bytes:
        """Send a frame, and return the payload of the frame that comes back."""
        self._connection.sendall(frame(kind, payload, mask=os.urandom(4)))
        found, answer = read_frame(self._read)
        assert found == kind
        return answer

    def _line(self) -> str:
        line: bytes = self._read.readline()
        return line.decode("latin-1").rstrip("\r\n")


def frame(kind: int, payload: bytes, mask: bytes) -> bytes:
    """A whole frame; a visitor's has a mask of four bytes, a site's none."""
    masked = 128 if mask else 0
    if len(payload) < 126:
        length = bytes([masked | len(payload)])
    elif len(payload) < 65_536:
        length = struct.pack("!BH", masked | 126, len(payload))
    else:
        length = struct.pack("!BQ", masked | 127, len(payload))
    return bytes([128 | kind]) + length + mask + _unmasked(payload, mask)


def read_frame(stream: Reader) -> tuple[int, bytes]:
    """The kind and the payload of the next frame."""
    kind, length = _exactly(stream, 2)
    size = length & 127
    if size == 126:
        (size,) = struct.unpack("!H", _exactly(stream, 2))
    elif size == 127:
        (size,) = struct.unpack("!Q", _exactly(stream, 8))
    mask = _exactly(stream, 4) if length & 128 else b""
    return kind & 15, _unmasked(_exactly(stream, size), mask)


def _exactly(stream: Reader, size: int) -> bytes:
    found = stream.read(size)
    if len(found) < size:
        raise ConnectionError("the connection ended within a frame")
    return found


def _unmasked(payload: bytes, mask: bytes) -> bytes:
    return bytes(byte ^ mask[place % 4] for place, byte in enumerate(payload)) if mask else payload


def _field(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip().lower(), value.strip()


def dial(port: int) -> socket.socket:
    """A connection to a port of loopback."""
    return socket.create_connection(("127.0.0.1", port), timeout=60)
