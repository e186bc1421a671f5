"""The connection of the decision path: redis-py greets the store, then hiredis parses its replies."""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, cast

import hiredis
from redis._parsers.base import BaseParser
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError  # noqa: A004  redis-py's own name

from app.node.shortage import shortage_of
from app.store.port import ShortageError

GREET_WITHIN_S: Final = 5.0
"""A greeting takes several iterations of the event loop, and each is long on a busy node. The examination
before it has shown that the store works."""


Command = Sequence[str | bytes | int]

Done = Callable[[Any], None]
"""Called with the reply to a command, or with the error in place of one."""


class Owed(NamedTuple):
    """A reply that is due, and when it became due by the loop's clock."""

    done: Done
    since: float


class Connection(asyncio.Protocol):
    """Sends commands and matches replies to them, in order. It is opened once, and not again after a loss.

    Args:
        greeted: a connection of redis-py after the greeting; kept, because the socket closes with it.
        lost: called with the reason when the connection is lost, unless this process closed it.
    """

    def __init__(self, greeted: AbstractConnection, lost: Callable[[Exception], None]) -> None:
        self._greeted = greeted
        self._lost = lost
        self._owed: deque[Owed] = deque()
        self._reader = hiredis.Reader(replyError=cast("Any", BaseParser.parse_error))
        self._loop = asyncio.get_running_loop()
        writer = greeted._writer  # noqa: SLF001  redis-py has no public way to hand a transport over
        assert writer is not None
        self._transport = cast("asyncio.Transport", writer.transport)
        self._transport.set_protocol(self)
        self._poll = select.poll()
        self._poll.register(
            self._transport.get_extra_info("socket").fileno(), select.POLLIN | select.POLLOUT | select.POLLHUP
        )

    @classmethod
    async def open(cls, unused: AbstractConnection, lost: Callable[[Exception], None]) -> Connection:
        """Greet the store as the URL says (TLS, credentials, database) and take the connection over.

        Raises:
            RedisError, OSError: there is no such store, or it refused the greeting.
        """
        try:
            async with asyncio.timeout(GREET_WITHIN_S):
                await cast("Any", unused).connect()
        except TimeoutError:
            await unused.disconnect(nowait=True)
            raise
        return cls(unused, lost)

    @property
    def is_open(self) -> bool:
        """Whether commands can be written."""
        return not self._transport.is_closing()

    def send(self, command: Command, done: Done) -> None:
        """Send one command; ``done`` is called once, and never before this returns.

        Raises:
            ConnectionError: the connection is lost, and nothing was sent.
        """
        if self._transport.is_closing():
            raise ConnectionError("the connection is lost")
        packed = hiredis.pack_command(cast("Any", command))
        self._owed.append(Owed(done, self._loop.time()))
        self._transport.write(packed)

    async def call(self, *command: str | bytes | int) -> Any:
        """The reply to one command, which is sent before this returns to the loop.

        Raises:
            RedisError: an error for a reply, or the connection is lost.
        """
        reply = self._loop.create_future()

        def came(with_: Any) -> None:
            if reply.done():  # nobody waits any more
                return
            if isinstance(with_, Exception):
                reply.set_exception(with_)
            else:
                reply.set_result(with_)

        self.send(command, came)
        return await reply

    def silent_since(self) -> float | None:
        """When the store's silence began, by the loop's clock, while a reply is due.

        None if no reply is due, or if bytes wait to be read. None also if the socket takes bytes but the call
        is still in this process: then the node is slow. The kernel is asked, since the loop may be late.
        """
        if not self._owed:
            return None
        events = sum(event for _, event in self._poll.poll(0))
        if events & ~select.POLLOUT or (events and self._transport.get_write_buffer_size()):
            return None
        return self._owed[0].since

    def close(self, error: Exception) -> None:
        """Fail all due replies and close the connection, without calling ``lost``."""
        self._lost = lambda _error: None  # the caller knows
        self._fail(error)
        self._transport.abort()
        self._forget()

    def data_received(self, data: bytes) -> None:
        """Pass each complete reply to its callback."""
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not False:
                if isinstance(reply, hiredis.PushNotification):  # a push message of RESP3, which is no reply
                    continue
                if not self._owed:
                    raise hiredis.ProtocolError("an unexpected reply")
                self._owed.popleft().done(reply)
        except hiredis.HiredisError as error:
            self._fail(ConnectionError(str(error)))
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all due replies, also one that was cut short, or could not be read for lack of memory."""
        resource = shortage_of(exc) if exc is not None else None
        if resource is not None:
            error: Exception = ShortageError(resource, str(exc), was_sent=True)
        else:
            error = ConnectionError(str(exc or "the store closed the connection"))
        self._fail(error)
        self._forget()
        self._lost(error)

    def _forget(self) -> None:
        """Mark redis-py's connection as closed; otherwise redis-py warns that it was left open."""
        cast("Any", self._greeted)._close()  # noqa: SLF001

    def _fail(self, error: Exception) -> None:
        # In the loop's next iteration: a callback that sends another command then sees the lost connection.
        while self._owed:
            self._loop.call_soon(self._owed.popleft().done, error)
