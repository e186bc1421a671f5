"""Uvicorn's server with an acceptor of our own; after SIGTERM it serves on for a while."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import structlog
import uvicorn

from app.http.server.acceptor import LAST_S, Acceptor
from app.http.server.connections import ClientConnection, Connections
from app.http.server.drain import DrainState

log = structlog.get_logger("quotagate")


class Server(uvicorn.Server):
    """One API process.

    SIGTERM begins the drain: the process is no longer ready, but for ``drain_s`` more it accepts and answers,
    each answer with ``Connection: close``. SIGINT, or a second SIGTERM, ends it without the drain.

    Args:
        config: its ``http`` makes the protocol of a connection.
        listener: the bound socket of the HTTP port; it listens once the application is open.
        drained: called when the drain begins.
        announce: called while the process listens, until it returns True: it has announced readiness.
        short: called with the ``OSError`` when the kernel has no room for a connection.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        listener: socket.socket,
        connections: Connections,
        *,
        drain: DrainState,
        drain_s: float = 0.0,
        drained: Callable[[], None] = lambda: None,
        announce: Callable[[], bool] = lambda: True,
        short: Callable[[OSError], None] = lambda _error: None,
    ) -> None:
        super().__init__(config)
        self._listener = listener
        self._connections = connections
        self._drain = drain
        self._drain_s = drain_s
        self._drained = drained
        self._announce = announce
        self._is_announced = False
        self._short = short
        self._acceptor: Acceptor | None = None
        self._is_signalled = False
        self._drains_until = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal; it may come at any place of the program, so the next tick does the work."""
        if sig == signal.SIGTERM and self._drain_s and self.started and not self._is_signalled:
            self._is_signalled = True
            self._drains_until = time.monotonic() + self._drain_s
        else:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002
        """Open the application, then listen."""
        await super().startup(sockets=[])
        self._acceptor = Acceptor(
            self._listener, "http", self._connections, self._connect, self.config.ssl, self._short
        )
        self._acceptor.start()

    async def on_tick(self, counter: int) -> bool:
        """Announce readiness, begin and end the drain, and do uvicorn's own work; ten times a second."""
        self._is_announced = self._is_announced or self._announce()
        if self._is_signalled:
            if not self._drain.has_begun:
                log.info("api drains", seconds=self._drain_s)
                self._drain.has_begun = True
                self._drained()
                for connection in cast("set[Any]", self.server_state.connections):
                    connection.drain()
            if time.monotonic() >= self._drains_until:
                self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002
        """Accept nothing more, answer the requests in flight, and close the application."""
        self._drain.has_begun = True
        if self._acceptor is not None:
            await self._acceptor.close(LAST_S if self._drain_s else 0.0)
        await super().shutdown(sockets=[])

    def _connect(self, connection: ClientConnection) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = make(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            connection=connection,
        )
        return protocol
