"""The connection of the decision path: redis-py greets the store, then hiredis reads what it replies."""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple, cast

import hiredis
from redis._parsers.base import BaseParser
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError  # noqa: A004  redis-py's own name

GREET_WITHIN_S: Final = 5.0
"""A greeting takes several turns of the event loop, and each is long on a busy node. Whether the store is
well is not asked here: the examination has found so just before."""


class Owed(NamedTuple):
    """A reply that the store owes, and since when, by the loop's clock."""

    reply: asyncio.Future[Any]
    since: float


class Connection(asyncio.Protocol):
    """Commands out and replies in, in order; it is opened once and, when it is lost, never opened again.

    Args:
        greeted: a connection of redis-py after the greeting; kept, since its end closes the socket.
        lost: is told when the store closes the connection.
    """

    def __init__(self, greeted: AbstractConnection, lost: Callable[[], None]) -> None:
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
    async def open(cls, unused: AbstractConnection, lost: Callable[[], None]) -> Connection:
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

    async def call(self, *command: str | bytes | int) -> Any:
        """The reply to one command, which is written before this returns to the loop.

        Raises:
            RedisError: an error for a reply, or the connection is lost.
        """
        if not self.is_open:
            raise ConnectionError("the connection is lost")
        owed = Owed(self._loop.create_future(), self._loop.time())
        self._owed.append(owed)
        self._transport.write(hiredis.pack_command(cast("Any", command)))
        return await owed.reply

    def silent_since(self) -> float | None:
        """Since when the store has been silent, by the loop's clock, though it owes a reply.

        None if it owes none, if something is there to read, or if the call has not left this process though
        it could have: then it is the node that is behind. The kernel is asked, as the loop may be late.
        """
        if not self._owed:
            return None
        events = sum(event for _, event in self._poll.poll(0))
        if events & ~select.POLLOUT or (events and self._transport.get_write_buffer_size()):
            return None
        return self._owed[0].since

    def close(self, error: Exception) -> None:
        """Fail what is owed, and hang up; nobody is told that it is lost."""
        self._lost = _known
        self._fail(error)
        self._transport.abort()
        self._forget()

    def data_received(self, data: bytes) -> None:
        """Hand each whole reply to who waits for it."""
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not False:
                if isinstance(reply, hiredis.PushNotification):  # RESP3's, which answers nothing
                    continue
                if not self._owed:
                    raise hiredis.ProtocolError("a reply that nothing asked for")
                waiting = self._owed.popleft().reply
                if waiting.done():  # nobody waits any more
                    continue
                if isinstance(reply, Exception):
                    waiting.set_exception(reply)
                else:
                    waiting.set_result(reply)
        except hiredis.HiredisError as error:
            self._fail(ConnectionError(str(error)))
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what is owed; a reply that was cut short is none."""
        self._fail(ConnectionError(str(exc or "the store closed the connection")))
        self._forget()
        self._lost()

    def pause_writing(self) -> None:
        """The kernel takes no more for now; what is written meanwhile waits in the transport."""

    def resume_writing(self) -> None:
        """The kernel takes more again."""

    def _forget(self) -> None:
        """Let redis-py know that its connection is closed, which would warn of one left open."""
        cast("Any", self._greeted)._close()  # noqa: SLF001

    def _fail(self, error: Exception) -> None:
        while self._owed:
            waiting = self._owed.popleft().reply
            if not waiting.done():
                waiting.set_exception(error)


def _known() -> None:
    """The loss is known to who caused it."""
