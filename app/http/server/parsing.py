"""Fair turns for parsing: connections that sent much share a little of each iteration of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Protocol

import structlog

from app.admission.gathering.fair_turns import FairTurns

log = structlog.get_logger("quotagate.http")


class UnparsedConnection(Protocol):
    """A connection with unparsed bytes.

    Attributes:
        source: the network that its turns are charged to.
    """

    source: str

    def parse(self, until: float) -> bool:
        """Parse some of the bytes; return whether more can be parsed.

        Args:
            until: no further piece is begun after this time, by the clock of ``ParsingTurns``.
        """

    def abort(self) -> None:
        """Close the connection at once."""


class ParsingTurns:
    """Shares the time for parsing among sources, in small steps.

    A frame of HTTP/2 takes 10 to 100 us, a field of a head or a chunk of a body 2 to 5 us, of few bytes each.

    Args:
        turn_s: how long connections parse before the event loop continues with other work.
    """

    def __init__(self, turn_s: float, *, clock: Callable[[], float] = perf_counter) -> None:
        self._turn_s = turn_s
        self._clock = clock
        self._turns: FairTurns[deque[UnparsedConnection]] = FairTurns(deque)
        self._added: list[UnparsedConnection] = []
        """Connections that were added since the last turn; none joins the turns while another parses."""
        self._is_scheduled = False

    def add(self, connection: UnparsedConnection) -> None:
        """Let a connection parse at its turn."""
        self._added.append(connection)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._is_scheduled = False
        for connection in self._added:
            self._turns.of(connection.source).append(connection)
        self._added.clear()
        began = now = self._clock()
        while self._turns and now - began < self._turn_s:
            _, waiting = self._turns.first()
            connection = waiting.popleft()
            try:
                is_left = connection.parse(began + self._turn_s)
            except Exception:
                log.exception("a connection could not be parsed")
                connection.abort()
                is_left = False
            if is_left:
                waiting.append(connection)
            before, now = now, self._clock()
            self._turns.charge(now - before, is_left=bool(waiting))
        if self._turns:
            self._schedule()
