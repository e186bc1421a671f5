"""The connections of one process, on all its ports: counted when they are accepted, and bounded."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import Final, Literal

from app.http.access.slowdown import source_of

MOST: Final = 8_192
MOST_OF_AN_ADDRESS: Final = 2_048
MOST_WITH_TLS: Final = 3_072
"""A connection with TLS takes up to 60 KiB, most of it for the handshake."""
MOST_OF_AN_ADDRESS_WITH_TLS: Final = 768
ENDED: Final = 256
"""``freed`` is called whenever this many connections have ended."""

FIRST_REQUEST_S: Final = 10.0
"""The longest time from accepting a connection to its first request, TLS handshake included."""

UNREAD_S: Final = 10.0
"""How long an answer may wait while its caller reads nothing."""

Port = Literal["http", "envoy"]
Reason = Literal["process", "address", "timeout"]
"""Why a connection was closed: the bound of the process, of its address, or no request in time."""

_idle_since: Final = attrgetter("idle_since")


class ClientConnection:
    """One accepted connection.

    Attributes:
        address: the caller's IP address; empty for a unix socket.
        source: the network that it counts for: its address, or for IPv6 the /64.
        since: when it was accepted, by the loop's clock in seconds.
        idle_since: since when it waits for its caller, by the loop's clock; ``math.inf`` while a complete
            request is being answered.
        abort: closes it at once.
        time_out: ends it because its first request did not arrive in time; None: by ``abort``.
    """

    __slots__ = ("_connections", "abort", "address", "idle_since", "port", "since", "source", "time_out")

    def __init__(self, connections: Connections, address: str, port: Port, since: float) -> None:
        self._connections = connections
        self.address = address
        self.source = source_of(address)
        self.port = port
        self.since = self.idle_since = since
        self.abort: Callable[[], None] = _nothing
        self.time_out: Callable[[], None] | None = None

    def request_received(self) -> None:
        """Lift the first deadline: the first request (for HTTP, its head) has arrived."""
        self._connections.awaiting_request.pop(self, None)

    def late(self) -> None:
        """Count it as timed out, unless its first request has arrived."""
        self._connections.count_late(self)

    def closed(self) -> None:
        """Stop counting the connection; later calls have no effect."""
        self._connections.remove(self)


class Connections:
    """Counts the connections of one process, and closes those above a bound.

    An IPv6 network of 64 bits counts as one address, since a caller may have any address in it.

    Args:
        most: the bound of the process.
        most_of_an_address: the bound of one address.

    Attributes:
        refused: called with the port and the ``Reason`` whenever a connection is closed for it.
        open: how many there are.
        freed: called from time to time, as ended connections have left free memory.
        awaiting_request: the connections whose first request has not arrived, the oldest first.
    """

    def __init__(self, most: int = MOST, most_of_an_address: int = MOST_OF_AN_ADDRESS) -> None:
        self._most = most
        self._most_of_an_address = most_of_an_address
        self.open = 0
        self._by_source: dict[str, dict[ClientConnection, None]] = {}
        # The sources by their number of connections, so that the largest is found at once.
        self._by_count: dict[int, dict[str, None]] = {}
        self._largest = 0
        self._idle: list[tuple[float, ClientConnection]] = []
        """The connections idle when it was made, each with its ``idle_since``; the longest idle is last."""
        self._ended = 0
        self.freed: Callable[[], None] = _nothing
        self.awaiting_request: dict[ClientConnection, None] = {}
        self.refused: Callable[[Port, Reason], None] = lambda _port, _reason: None

    def accept(self, address: str, port: Port, now: float) -> ClientConnection | None:
        """Count a new connection; return None if it must be closed instead.

        At the bound of the process, the longest idle connection of the address with the most is closed
        instead; if that address has none idle, the longest idle one of all. Where all are busy, one of the
        address with the most is closed for an address with fewer connections.

        >>> connections = Connections(3, 2)
        >>> own = [connections.accept(address, "http", 0.0) for address in ("10.0.0.7", "10.0.0.7")]
        >>> connections.accept("10.0.0.7", "http", 1.0) is None
        True
        >>> own[0].abort = lambda: print("closed")
        >>> others = [connections.accept(address, "http", 1.0) for address in ("10.0.0.8", "10.0.0.9")]
        closed
        >>> connections.open, None in others
        (3, False)
        """
        new = ClientConnection(self, address, port, now)
        own = self._open_of(new.source)
        if own >= self._most_of_an_address:
            self.refused(port, "address")
            return None
        if self.open >= self._most and not self.make_room(own):
            self.refused(port, "process")
            return None
        self.open += 1
        own = self._open_of(new.source)  # the closed connection may be of the same address
        self._recount(new.source, own, own + 1)
        self._by_source.setdefault(new.source, {})[new] = self.awaiting_request[new] = None
        return new

    def make_room(self, own: int | None = None) -> bool:
        """Close one connection, by the rule of ``accept``; return False if none is closed.

        Args:
            own: how many connections the address has that needs room. A busy connection is closed only if
                the largest address has at least two more, so that two addresses never take turns. Without
                ``own``, no busy connection is closed.
        """
        if not self._largest:
            return False
        source = next(iter(self._by_count[self._largest]))
        victim = min(self._by_source[source], key=_idle_since)
        if victim.idle_since == math.inf:
            victim = self._longest_idle() or victim
        if victim.idle_since == math.inf and (own is None or self._largest < own + 2):
            return False
        self.refused(victim.port, "process")
        abort = victim.abort
        self.remove(victim)
        abort()
        return True

    def _longest_idle(self) -> ClientConnection | None:
        """Return the connection that is idle for longest; None if all are busy.

        The list of all idle ones is made once for many calls, as thousands of addresses may hold one each.
        """
        for _ in range(2):
            while self._idle:
                since, connection = self._idle.pop()
                if connection.idle_since == since and connection in self._by_source.get(
                    connection.source, ()
                ):
                    return connection
            every = (one for own in self._by_source.values() for one in own)
            self._idle = [(one.idle_since, one) for one in every if one.idle_since < math.inf]
            self._idle.sort(key=itemgetter(0), reverse=True)
        return None

    def time_out(self, now: float, most: int) -> None:
        """End the connections whose first request is late, at most so many of them.

        Args:
            now: the loop's clock.
        """
        for late in [
            one for one, _ in zip(self.awaiting_request, range(most), strict=False) if is_late(one, now)
        ]:
            self.count_late(late)
            (late.time_out or late.abort)()

    def count_late(self, connection: ClientConnection) -> None:
        """Count a connection that is closed because its first request is late, once."""
        if connection in self.awaiting_request:
            del self.awaiting_request[connection]
            self.refused(connection.port, "timeout")

    def remove(self, connection: ClientConnection) -> None:
        """Stop counting a connection, unless it is not counted any more."""
        own = self._by_source.get(connection.source)
        if own is None or connection not in own:
            return
        self.awaiting_request.pop(connection, None)
        self.open -= 1
        self._recount(connection.source, len(own), len(own) - 1)
        del own[connection]
        if not own:
            del self._by_source[connection.source]
        # Otherwise it would stay in a cycle with its task or protocol until the collector's next full run.
        connection.abort, connection.time_out = _nothing, None
        self._ended += 1
        if self._ended % ENDED == 0:
            self.freed()

    def _open_of(self, source: str) -> int:
        return len(self._by_source.get(source, ()))

    def _recount(self, source: str, before: int, after: int) -> None:
        if before:
            sources = self._by_count[before]
            del sources[source]
            if not sources:
                del self._by_count[before]
        if after:
            self._by_count.setdefault(after, {})[source] = None
        if after > self._largest or (before == self._largest and before not in self._by_count):
            self._largest = after


def usual_bounds(*, with_tls: bool) -> tuple[int, int]:
    """Return the bounds of the process and of one address by default."""
    return (MOST_WITH_TLS, MOST_OF_AN_ADDRESS_WITH_TLS) if with_tls else (MOST, MOST_OF_AN_ADDRESS)


def is_late(connection: ClientConnection, now: float) -> bool:
    """Whether the time for the first request of a connection is over."""
    return now >= connection.since + FIRST_REQUEST_S


def _nothing() -> None:
    """Do nothing."""
