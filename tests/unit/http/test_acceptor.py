"""The acceptor when the kernel has no room, when a connection ends before its protocol, and at the end."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any, Final

import pytest

from app.http.server.acceptor import Acceptor
from app.http.server.connections import ClientConnection, Connections
from tests.waiting import until

CLIENTS: Final = 20
ITERATIONS: Final = 200


class Listener:
    """A real socket, whose ``accept`` fails while it has an error."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.error: int | None = None
        self.failed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.socket, name)

    def accept(self) -> tuple[socket.socket, Any]:
        if self.error is not None:
            self.failed += 1
            raise OSError(self.error, os.strerror(self.error))
        return self.socket.accept()


class Served(asyncio.Protocol):
    """The protocol of a connection; with `busy`, its request stays unanswered."""

    def __init__(self, connection: ClientConnection, *, busy: bool) -> None:
        self.connection = connection
        self._busy = busy

    def data_received(self, data: bytes) -> None:
        self.connection.request_received()
        if self._busy:
            self.connection.idle_since = math.inf

    def connection_lost(self, _exc: Exception | None) -> None:
        self.connection.closed()


class Port:
    """A port with clients."""

    def __init__(self, stack: ExitStack, *, busy: bool) -> None:
        self.listener = Listener()
        self.connections = Connections()
        self.short: list[OSError] = []
        self._stack = stack
        self.acceptor = Acceptor(
            self.listener,  # type: ignore[arg-type]
            "http",
            self.connections,
            lambda connection: Served(connection, busy=busy),
            short=self.short.append,
        )
        self.acceptor.start()

    def connect(self, sends: bytes = b"x") -> socket.socket:
        client = self._stack.enter_context(socket.create_connection(self.listener.getsockname()))
        client.sendall(sends)
        return client


@asynccontextmanager
async def port(*, busy: bool = False, clients: int = 0) -> AsyncIterator[Port]:
    with ExitStack() as stack:
        made = Port(stack, busy=busy)
        for _ in range(clients):
            made.connect()
        await until(lambda: made.connections.open == clients and not made.connections.awaiting_request)
        try:
            yield made
        finally:
            await made.acceptor.close()


async def iterate(holds: Callable[[], object] = lambda: False) -> None:
    for _ in range(ITERATIONS):
        if holds():
            return
        await asyncio.sleep(0)


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EPERM])
async def test_shortage_that_lasts_closes_at_most_one_idle_connection_at_a_time(error: int):
    async with port(clients=CLIENTS) as open_port:
        open_port.listener.error = error
        open_port.connect()
        await until(lambda: open_port.short)
        await iterate()
        assert open_port.connections.open >= CLIENTS - 1
        assert open_port.listener.failed <= 2, "it pauses"
        open_port.listener.error = None
        await until(lambda: open_port.connections.open in {CLIENTS, CLIENTS + 1}, within_s=60)


async def test_shortage_closes_no_busy_connection():
    async with port(busy=True, clients=CLIENTS) as open_port:
        open_port.listener.error = errno.EMFILE
        open_port.connect()
        await until(lambda: open_port.short)
        await iterate()
        assert open_port.connections.open == CLIENTS
        open_port.listener.error = None
        await until(lambda: open_port.connections.open == CLIENTS + 1)


async def test_connection_that_ends_before_its_protocol_is_made_is_not_counted():
    async with port() as open_port:
        client = open_port.connect(b"")
        await until(lambda: open_port.connections.open == 1)
        (connection,) = open_port.connections.awaiting_request
        client.sendall(b"x")
        await until(lambda: open_port.acceptor._starting or open_port.acceptor._unstarted, every_s=0)
        connection.abort()
        await iterate()
        assert open_port.connections.open == 0
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""


async def test_end_closes_silent_connections_and_no_others():
    async with port() as open_port:
        silent = [open_port.connect(b"") for _ in range(CLIENTS)]
        speaking = open_port.connect()
        await until(
            lambda: (
                open_port.connections.open == CLIENTS + 1
                and len(open_port.connections.awaiting_request) == CLIENTS
            )
        )
        await open_port.acceptor.close()
        assert open_port.connections.open == 1
        assert [each.recv(1) for each in silent] == [b""] * CLIENTS
        speaking.setblocking(False)
        with pytest.raises(BlockingIOError):
            speaking.recv(1)
