"""A relay between a node and its store that can cut or swallow replies, or hold them until they are late."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Final, Literal

Way = Literal["pass", "cut", "late", "swallow"]
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]

CUT_AFTER: Final = 20
"""How many bytes of a cut reply still arrive."""

POLL_EVERY_S: Final = 0.005


@contextlib.contextmanager
def relaying(path: Path, store: Path) -> Iterator[Relay]:
    """A relay from one unix socket to another, in a thread of its own."""
    relay = Relay(path, store)
    thread = threading.Thread(target=asyncio.run, args=(relay.run(),))
    thread.start()
    relay.listening.wait()
    try:
        yield relay
    finally:
        relay.stop()
        thread.join()


class Relay:
    """Relays in the mode that is set, and counts connections."""

    def __init__(self, path: Path, store: Path) -> None:
        self.url = f"unix://{path}"
        self.way: Way = "pass"
        self.connections = 0
        self.listening = threading.Event()
        self.store = store
        """The socket that new connections go to."""
        self.without_store: Callable[[], int] = lambda: 0
        """Returns how many asks were answered without the store; a late reply waits until that number grows.

        A node's timeout depends on the load of the machine, so no fixed delay is late on each.
        """
        self._path = path
        self._serving: dict[asyncio.Task[None], socket.socket] = {}

    async def run(self) -> None:
        """Listen until stopped."""
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(self._path))
            listening.listen()
            listening.setblocking(False)
            # Not asyncio's server: Python 3.11 loses a connection that it accepts while it is being closed.
            self._loop.add_reader(listening, self._accept, listening)
            self.listening.set()
            await self._stopping.wait()
            self._loop.remove_reader(listening)
        for serving in self._serving:
            serving.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        for connection in self._serving.values():  # some were cancelled before they began
            connection.close()

    def stop(self) -> None:
        """Stop listening; called from another thread."""
        self._loop.call_soon_threadsafe(self._stopping.set)

    def _accept(self, listening: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):  # the caller went away
            connection, _ = listening.accept()
            self._serving[self._loop.create_task(self._serve(connection))] = connection
            self.connections += 1

    async def _serve(self, connection: socket.socket) -> None:
        # The store is away, an end closed, or the relay stops, which Python 3.11 would log.
        with contextlib.suppress(OSError, asyncio.CancelledError):
            async with (
                _closing(await asyncio.open_unix_connection(sock=connection)) as (reader, writer),
                _closing(await asyncio.open_unix_connection(str(self.store))) as (from_store, to_store),
            ):
                ends = (self._pass_on(reader, to_store), self._pass_back(from_store, writer))
                await _first(*map(asyncio.ensure_future, ends))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while said := await reader.read(65536):
            if self.way != "swallow":
                writer.write(said)
                await writer.drain()

    async def _pass_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while said := await reader.read(65536):
            if self.way == "cut":
                writer.write(said[:CUT_AFTER])
                await writer.drain()
                return
            before = self.without_store()
            while self.way == "late" and self.without_store() == before:  # noqa: ASYNC110  in another thread
                await asyncio.sleep(POLL_EVERY_S)
            writer.write(said)
            await writer.drain()


async def _first(*directions: asyncio.Future[None]) -> None:
    """Relay both directions until one ends."""
    try:
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for direction in directions:
            direction.cancel()
        await asyncio.gather(*directions, return_exceptions=True)


@contextlib.asynccontextmanager
async def _closing(ends: Ends) -> AsyncIterator[Ends]:
    """Close a connection at the end, and drop unsent data."""
    _, writer = ends
    try:
        yield ends
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
