"""Accepts the connections of one port, and gives each a protocol once its first bytes have arrived."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from typing import Final

import structlog

from app.http.server.connections import FIRST_REQUEST_S, UNREAD_S, ClientConnection, Connections, Port

BACKLOG: Final = 2_048
"""Connections that the kernel keeps until they are accepted."""
SEND_BUFFER: Final = 65_536
"""Bytes of answers (the kernel doubles them) that the kernel keeps for a caller that does not read."""
RECEIVE_BUFFER: Final = 6_144
"""Bytes of requests (the kernel doubles them) that the kernel keeps. The event loop reads all of them at once
from each connection."""
KEEPALIVE_S: Final = 60
"""After this long without a byte the kernel probes whether the other end is still there."""
AT_ONCE: Final = 16
"""The most connections that one iteration of the event loop accepts, and begins to serve."""
HANDSHAKES_AT_ONCE: Final = 4
"""The most TLS handshakes that one iteration begins; each takes about a millisecond."""
LAST_S: Final = 0.1
"""How long the connections accepted last before the end of a drain have for their first bytes."""
ENDED_AT_ONCE: Final = 100
"""The most connections that one iteration ends because their first request is late."""
PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 5.0
"""The first and the longest pause in accepting after the kernel had no room for a connection."""

Factory = Callable[[ClientConnection], asyncio.Protocol | asyncio.BufferedProtocol]

_NOTHING_TO_ACCEPT: Final = frozenset({errno.ECONNABORTED, errno.EAGAIN, errno.EINTR, errno.EPROTO})
"""Errors that mean that there is no connection to accept, or that its caller has left."""

log = structlog.get_logger("quotagate.http")


class PortTakenError(OSError):
    """Another program listens on the port."""


class Acceptor:
    """Accepts connections on a listening socket.

    A connection is counted before anything is read from it, so before TLS and HTTP/2. As long as it sends
    nothing it costs a descriptor and no more.

    Args:
        listener: a bound socket; ``start`` makes it listen.
        port: the name of the port, for the metric.
        connections: the bounds, shared by all ports of the process.
        factory: makes the protocol of a connection. It must call ``closed`` when the connection is lost, and
            ``request_received`` when its first request has arrived.
        tls: for connections with TLS.
        short: called with the ``OSError`` when the kernel has no room for another connection.
    """

    def __init__(
        self,
        listener: socket.socket,
        port: Port,
        connections: Connections,
        factory: Factory,
        tls: ssl.SSLContext | None = None,
        short: Callable[[OSError], None] = lambda _error: None,
    ) -> None:
        self._listener = listener
        self._port = port
        self._connections = connections
        self._factory = factory
        self._tls = tls
        self._short = short
        self._at_once = AT_ONCE if tls is None else HANDSHAKES_AT_ONCE
        self._loop = asyncio.get_running_loop()
        self._is_open = False
        self._failures = 0
        """How often in a row the kernel had no room for a connection."""
        self._silent: dict[ClientConnection, socket.socket] = {}
        """Connections that have not sent anything yet."""
        self._unstarted: dict[ClientConnection, socket.socket] = {}
        """Connections that have sent something, and have no protocol yet."""
        self._starting: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Listen, and accept connections from now on.

        Raises:
            PortTakenError: another program listens on the port.
        """
        self._listener.setblocking(False)
        _limit_buffers(self._listener)
        try:
            self._listener.listen(BACKLOG)
        except OSError as error:
            raise PortTakenError(error.errno, error.strerror) from None
        self._is_open = True
        self._loop.add_reader(self._listener, self._accept)

    async def close(self, wait_s: float = 0.0) -> None:
        """Accept the kernel's backlog, stop listening, and close connections that have no protocol.

        The work is spread over iterations of the loop.

        Args:
            wait_s: how long the connections that were accepted last may take until their first bytes arrive.
        """
        if not self._is_open:
            return
        self._loop.remove_reader(self._listener)
        for _ in range(BACKLOG // AT_ONCE):
            if not self._accept():
                break
            await asyncio.sleep(0)
        self._is_open = False
        self._loop.remove_reader(self._listener)
        self._listener.close()
        await asyncio.sleep(wait_s)
        if self._timer is not None:
            self._timer.cancel()
        while waiting := [*islice(chain(self._silent, self._unstarted), ENDED_AT_ONCE)]:
            for connection in waiting:
                connection.abort()
            await asyncio.sleep(0)
        for task in self._starting:
            task.cancel()

    def _accept(self) -> bool:
        """Accept some connections; return whether there may be more."""
        now, is_done = self._loop.time(), False
        for accepted in range(AT_ONCE):
            try:
                sock, peer = self._listener.accept()
            except OSError as error:
                is_done = True
                if error.errno not in _NOTHING_TO_ACCEPT:
                    self._make_room(error)
                elif not accepted:
                    self._queue_first()
                break
            self._failures = 0
            address = peer[0] if isinstance(peer, tuple) else ""
            connection = self._connections.accept(address, self._port, now)
            if connection is None:
                sock.close()
                continue
            sock.setblocking(False)
            self._silent[connection] = sock
            connection.abort = partial(self._drop_silent, connection)
            self._loop.add_reader(sock, self._first_bytes, connection, sock)
        self._watch()
        return not is_done

    def _queue_first(self) -> None:
        """Let the kernel wake this process before siblings on the same socket: one of them was faster.

        The kernel wakes first the process that began to wait last. Otherwise one process could get nearly all
        connections that come one by one.
        """
        self._loop.remove_reader(self._listener)
        self._loop.add_reader(self._listener, self._accept)

    def _make_room(self, error: OSError) -> None:
        """Close an idle connection to make room for a new one in the kernel.

        If that did not help, or none is idle, pause: longer each time, so that a long shortage closes few.
        """
        self._short(error)
        self._failures += 1
        if error.errno == errno.EMFILE and self._failures % 2 and self._connections.make_room():
            return
        self._loop.remove_reader(self._listener)
        self._loop.call_later(min(PAUSE_S * self._failures**2, LONGEST_PAUSE_S), self._resume)

    def _resume(self) -> None:
        if self._is_open:
            self._loop.add_reader(self._listener, self._accept)

    # The first request

    def _first_bytes(self, connection: ClientConnection, sock: socket.socket) -> None:
        self._loop.remove_reader(sock)
        del self._silent[connection]
        try:
            has_left = not sock.recv(1, socket.MSG_PEEK)
        except OSError:
            has_left = True
        if has_left:
            sock.close()
            connection.closed()
            return
        if not self._unstarted:
            self._loop.call_soon(self._begin)
        self._unstarted[connection] = sock
        connection.abort = partial(self._drop_unstarted, connection)

    def _begin(self) -> None:
        for connection, sock in [*islice(self._unstarted.items(), self._at_once)]:
            del self._unstarted[connection]
            task = self._loop.create_task(self._connect(connection, sock))
            connection.abort = partial(_drop_starting, connection, sock, task)
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)
        if self._unstarted:
            self._loop.call_soon(self._begin)

    async def _connect(self, connection: ClientConnection, sock: socket.socket) -> None:
        """Give a connection its protocol, after the TLS handshake if there is one."""
        is_served = False
        try:
            transport = await self._connected(connection, sock)
            connection.abort = transport.abort
            is_served = True
        except OSError:  # the caller has left, or does not speak TLS
            pass
        except Exception:
            log.exception("a connection could not be served", port=self._port)
        finally:
            if not is_served:
                sock.close()
                connection.closed()

    async def _connected(self, connection: ClientConnection, sock: socket.socket) -> asyncio.Transport:
        """Return the transport of a connection.

        A handshake has no protocol of ours, as most of those in an attack fail. uvloop wakes this task before
        it passes on the first bytes.

        Raises:
            OSError: the caller has left, or does not speak TLS.
        """
        make = partial(self._factory, connection)
        if self._tls is None:
            transport, _ = await self._loop.connect_accepted_socket(make, sock)
            return transport
        encrypted, _ = await self._loop.connect_accepted_socket(asyncio.Protocol, sock, ssl=self._tls)
        if encrypted.is_closing():
            raise ConnectionAbortedError
        protocol = make()
        encrypted.set_protocol(protocol)
        protocol.connection_made(encrypted)
        return encrypted

    def _drop_silent(self, connection: ClientConnection) -> None:
        sock = self._silent.pop(connection)
        self._loop.remove_reader(sock)
        sock.close()
        connection.closed()

    def _drop_unstarted(self, connection: ClientConnection) -> None:
        self._unstarted.pop(connection).close()
        connection.closed()

    # Late first requests

    def _watch(self) -> None:
        """Set the timer for the earliest deadline of a first request, over all ports."""
        oldest = next(iter(self._connections.awaiting_request), None)
        if self._timer is None and oldest is not None and self._is_open:
            self._timer = self._loop.call_at(oldest.since + FIRST_REQUEST_S, self._end_late)

    def _end_late(self) -> None:
        self._timer = None
        self._connections.time_out(self._loop.time(), ENDED_AT_ONCE)
        self._watch()


def _limit_buffers(listener: socket.socket) -> None:
    """Limit the kernel's buffers, and how long it keeps unread answers and lost connections.

    Connections inherit this from the listener, and keep it after we close them.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    if listener.family != socket.AF_UNIX and hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(UNREAD_S * 1000))
    if listener.family != socket.AF_UNIX and hasattr(socket, "TCP_KEEPIDLE"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)


def _drop_starting(connection: ClientConnection, sock: socket.socket, task: asyncio.Task[None]) -> None:
    """Close a connection whose protocol is being made, even if the task has not begun.

    If uvloop has the socket, uvloop closes it when the handshake fails. A handshake cannot be cancelled just
    before its first step; the shutdown makes it fail.
    """
    task.cancel()
    with suppress(OSError):  # the caller has left
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
    connection.closed()
