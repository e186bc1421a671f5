"""A relay between a node and its store that can cut or swallow replies, or hold them until they are late."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Final, Literal

Way = Literal["pass", "cut", "late", "swallow"]

CUT_AFTER: Final = 20
"""How many bytes of a cut reply still arrive."""

BETWEEN_LOOKS_S: Final = 0.005


@contextlib.contextmanager
def relaying(socket: Path, store: Path) -> Iterator[Relay]:
    """A relay from one unix socket to another, in a thread of its own."""
    relay = Relay(socket, store)
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

    def __init__(self, socket: Path, store: Path) -> None:
        self.url = f"unix://{socket}"
        self.way: Way = "pass"
        self.connections = 0
        self.listening = threading.Event()
        self.store = store
        """The socket that new connections go to."""
        self.without_store: Callable[[], int] = lambda: 0
        """How many asks were answered without the store so far; a late reply waits until there are more.

        How long a node waits for its store depends on how busy the machine is, so no delay is late on each.
        """
        self._socket = socket
        self._serving: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def run(self) -> None:
        """Listen until stopped."""
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        server = await asyncio.start_unix_server(self._accept, str(self._socket))
        self.listening.set()
        await self._stopping.wait()
        server.close()
        await _turns()  # what is being accepted becomes a connection
        for serving in self._serving:
            serving.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        for writer in self._serving.values():  # some were cancelled before they began, or have unsent bytes
            writer.transport.abort()
        await _turns()

    def stop(self) -> None:
        """Stop listening; called from another thread."""
        self._loop.call_soon_threadsafe(self._stopping.set)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving[self._loop.create_task(self._serve(reader, writer))] = writer
        self.connections += 1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with _closing(writer):
            # The store is not there, or one of them went away; or it stops, which Python 3.11 would log.
            with contextlib.suppress(OSError, asyncio.CancelledError):
                from_store, to_store = await asyncio.open_unix_connection(str(self.store))
                async with _closing(to_store):
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
                await asyncio.sleep(BETWEEN_LOOKS_S)
            writer.write(said)
            await writer.drain()


async def _turns() -> None:
    """Let the loop turn as often as asyncio needs to accept or to close a connection, which is thrice."""
    for _ in range(5):
        await asyncio.sleep(0)


async def _first(*directions: asyncio.Future[None]) -> None:
    """Relay both directions until one ends."""
    try:
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for direction in directions:
            direction.cancel()
        await asyncio.gather(*directions, return_exceptions=True)


@contextlib.asynccontextmanager
async def _closing(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    try:
        yield
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
