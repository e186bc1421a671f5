"""Answers that wait for the end of a turn of the event loop, to be sent one right after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

log: Final = structlog.get_logger("quotagate.http")


class Outbox:
    """The answers of one turn of the event loop, over all connections of a process.

    Each write wakes its receiver. Where receivers share a host with this node, or a proxy has many
    connections, a receiver that finds one answer after the other is woken once. One that finds pauses between
    them goes to sleep in each, and waking it costs this process about a fifth of a decision.

    Args:
        failed: called for each answer that could not be written.
    """

    def __init__(self, failed: Callable[[], None]) -> None:
        self._failed = failed
        self._waiting: list[tuple[asyncio.Transport, bytes]] = []

    def add(self, transport: asyncio.Transport, answer: bytes, loop: asyncio.AbstractEventLoop) -> None:
        """Send an answer at the end of this turn."""
        if not self._waiting:
            loop.call_soon(self.flush)
        self._waiting.append((transport, answer))

    def flush(self) -> None:
        """Send what waits now: before anything else is sent on one of the connections."""
        waiting, self._waiting = self._waiting, []
        for transport, answer in waiting:
            if not transport.is_closing():
                try:
                    transport.write(answer)
                except Exception:
                    log.exception("an answer could not be sent")  # and the other connections get theirs
                    self._failed()
                    transport.abort()
