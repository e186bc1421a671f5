"""The deadlines of one connection, for both protocols: for requests to arrive, and for answers to be read."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import ClassVar

from app.http.server.connections import UNREAD_S, ClientConnection


class RequestDeadline:
    """The time by which a caller must have sent something.

    A connection has one timer. A later deadline leaves the timer alone; when the timer runs out, it is set
    again. Most deadlines never pass. Time in which this node reads nothing does not count.

    Args:
        connection: its ``idle_since`` says whether a deadline is set: the connection then waits for its
            caller. The hot protocol sets both itself around an ordinary request.
        passed: called when the deadline has passed.

    Attributes:
        at: the deadline, by the loop's clock in seconds.
        rings_at: when the timer runs out, by the same clock; ``math.inf`` without one.
    """

    HEAD_S: ClassVar[float] = 10.0
    """The longest time for a head."""
    BODY_S: ClassVar[float] = 10.0
    """The longest time for a body, plus a second for each 64 KiB."""
    BODY_RATE: ClassVar[float] = 65_536
    """The slowest body in bytes per second."""

    __slots__ = ("_connection", "_loop", "_passed", "_paused_at", "_timer", "at", "rings_at")

    def __init__(
        self, connection: ClientConnection, loop: asyncio.AbstractEventLoop, passed: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._loop = loop
        self._passed = passed
        self._paused_at = math.inf  # while the connection is read
        self.rings_at = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self.at = 0.0

    def set(self, at: float) -> None:
        """Wait for the caller, until this time."""
        self.at = at
        if self._connection.idle_since == math.inf:
            self._connection.idle_since = self._loop.time()
        if self.rings_at > at:
            self.cancel()
            self.rings_at = at
            self._timer = self._loop.call_at(at, self._ring)

    def body_s(self, size: int) -> float:
        """Return the longest time for a body of this size."""
        return self.BODY_S + size / self.BODY_RATE

    def note_arrival(self) -> None:
        """Restart the idle time: the caller that the connection waits for has sent something."""
        if self._connection.idle_since < math.inf:
            self._connection.idle_since = self._loop.time()

    def drop(self) -> None:
        """Wait for no caller: a complete request is being answered."""
        self._connection.idle_since = math.inf

    def cancel(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self.rings_at = None, math.inf

    def end(self) -> None:
        """Stop the timer for good, and forget the connection, so that no reference cycle keeps it."""
        self.cancel()
        self.drop()
        self._passed = _nothing

    def pause(self) -> None:
        """Stop counting, as nothing is read from the connection now."""
        self._paused_at = min(self._paused_at, self._loop.time())

    def resume(self) -> None:
        """Resume counting: the deadline moves by the time in which nothing was read."""
        if self._paused_at < math.inf:
            self.at += self._loop.time() - self._paused_at
            self._paused_at = math.inf
            if self._connection.idle_since < math.inf:
                self.set(self.at)

    def _ring(self) -> None:
        self._timer, self.rings_at = None, math.inf
        if self._connection.idle_since < math.inf == self._paused_at:
            if self._loop.time() < self.at:
                self.set(self.at)
            else:
                self._passed()


class UnreadDeadline:
    """Ends a connection whose caller reads nothing of its answers for a while."""

    UNREAD_S: ClassVar[float] = UNREAD_S

    __slots__ = ("_loop", "_timer", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Check later whether the caller has read any of the bytes that wait now."""
        self.cancel()
        size = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(self.UNREAD_S, self._check, size)

    def cancel(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, before: int) -> None:
        self._timer = None
        left = self._transport.get_write_buffer_size()
        if left >= before:
            self._transport.abort()
        elif left:
            self.watch()


def _nothing() -> None:
    """Do nothing."""
