"""The acceptor where the kernel has no room, where a connection ends before its protocol, and at the end."""

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

from app.http.acceptor import Acceptor
from app.http.connections import ClientConnection, Connections
from tests.waiting import until

CLIENTS: Final = 20
TURNS: Final = 200


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
    """A connection that has sent something; its request is being answered if it is busy."""

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


async def turns(holds: Callable[[], object] = lambda: False) -> None:
    for _ in range(TURNS):
        if holds():
            return
        await asyncio.sleep(0)


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EPERM])
async def test_shortage_that_lasts_closes_at_most_one_idle_connection_at_a_time(error: int):
    async with port(clients=CLIENTS) as its:
        its.listener.error = error
        its.connect()
        await until(lambda: its.short)
        await turns()
        assert its.connections.open >= CLIENTS - 1
        assert its.listener.failed <= 2, "it pauses"
        its.listener.error = None
        await until(lambda: its.connections.open in {CLIENTS, CLIENTS + 1}, within_s=60)


async def test_shortage_closes_no_busy_connection():
    async with port(busy=True, clients=CLIENTS) as its:
        its.listener.error = errno.EMFILE
        its.connect()
        await until(lambda: its.short)
        await turns()
        assert its.connections.open == CLIENTS
        its.listener.error = None
        await until(lambda: its.connections.open == CLIENTS + 1)


async def test_connection_that_ends_before_its_protocol_is_made_is_not_counted():
    async with port() as its:
        client = its.connect(b"")
        await until(lambda: its.connections.open == 1)
        (connection,) = its.connections.awaiting_request
        client.sendall(b"x")
        await until(lambda: its.acceptor._starting or its.acceptor._unstarted, every_s=0)
        connection.abort()
        await turns()
        assert its.connections.open == 0
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""


async def test_end_closes_silent_connections_and_no_others():
    async with port() as its:
        silent = [its.connect(b"") for _ in range(CLIENTS)]
        speaking = its.connect()
        await until(
            lambda: its.connections.open == CLIENTS + 1 and len(its.connections.awaiting_request) == CLIENTS
        )
        await its.acceptor.close()
        assert its.connections.open == 1
        assert [each.recv(1) for each in silent] == [b""] * CLIENTS
        speaking.setblocking(False)
        with pytest.raises(BlockingIOError):
            speaking.recv(1)
