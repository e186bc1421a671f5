"""The retention of the history: drops old changes in small transactions, one node at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import structlog
from sqlalchemy import delete, func, or_, select, update

from app.catalog.errors import CatalogUnavailableError
from app.catalog.serial import SerialExecutor
from app.catalog.sql import Sql
from app.catalog.tables import CHANGES, STATE

CLEANUPS: Final = 24
"""How many cleanups there are in one retention; the first node that finds one due does it."""
CLEANUP_MS: Final = (1_000, 3_600_000)
"""The shortest and the longest time between two cleanups."""
LONGEST_POLL_S: Final = 60.0
"""The longest time after which a node checks again whether a cleanup is due."""
PART: Final = 500
"""How many changes one transaction examines."""
PAUSE_S: Final = 0.05
"""The pause between two transactions, in which others write."""

log = structlog.get_logger("quotagate.history")


class HistoryPart(NamedTuple):
    """Consecutive changes: the number of the last one, and how many were dropped."""

    last: int
    dropped: int


class HistoryRetention:
    """Drops changes that are older than the retention; the newest change of each entity stays.

    A statement drops a change only if it sees a newer one of the same entity. So nodes that drop changes at
    the same moment do no harm; they share the cleanups only to spare the database.

    Args:
        retention_ms: None keeps all changes.
        pause_s: the pause between two transactions.
    """

    def __init__(self, database: Sql, retention_ms: int | None, *, pause_s: float = PAUSE_S) -> None:
        self._sql = database
        self._retention_ms = retention_ms
        self._pause_s = pause_s
        self._cleanup_ms = min(max((retention_ms or 0) // CLEANUPS, CLEANUP_MS[0]), CLEANUP_MS[1])
        self._serial = SerialExecutor()
        self._poll_task: asyncio.Task[None] | None = None

    def open(self, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        """Begin to poll for changes that must be dropped, by this clock."""
        if self._retention_ms is not None:
            self._poll_task = asyncio.create_task(self._poll(now_ms), name="drop old history")

    async def close(self) -> None:
        """Stop after the transaction under way."""
        if self._poll_task is not None:
            self._poll_task.cancel()
            await asyncio.wait({self._poll_task})
        await self._serial.close(lambda: asyncio.sleep(0))

    async def drop_old(self, now_ms: int) -> int | None:
        """Drop the changes that are old now, and return how many; None if no cleanup is due yet.

        Raises:
            CatalogUnavailableError: the database cannot be reached.
        """
        if self._retention_ms is None or not await self._serial.run(partial(self._claim, now_ms)):
            return None
        before_ms = now_ms - self._retention_ms
        total = after = 0
        while part := await self._serial.run(partial(self._drop, before_ms, after)):
            after, total = part.last, total + part.dropped
            await asyncio.sleep(self._pause_s)
        return total

    async def _poll(self, now_ms: Callable[[], int]) -> None:
        while True:
            try:
                if dropped := await self.drop_old(now_ms()):
                    log.info("old changes dropped from the history", changes=dropped)
            except CatalogUnavailableError as error:
                log.warning("old changes not dropped from the history", error=str(error))
            await asyncio.sleep(min(self._cleanup_ms / 1000, LONGEST_POLL_S))

    async def _claim(self, now_ms: int, until: float) -> bool:
        """Claim a cleanup if one is due: the last began long enough ago, or in the future by this clock."""
        last = STATE.c.history_turn_ms
        due = or_(last.is_(None), last <= now_ms - self._cleanup_ms, last > now_ms + self._cleanup_ms)
        async with self._sql.writing(until) as connection:
            taken = await connection.execute(update(STATE).where(due).values(history_turn_ms=now_ms))
        return taken.rowcount == 1

    async def _drop(self, before_ms: int, after: int, until: float) -> HistoryPart | None:
        """Drop the old changes in the next part after the change ``after``; None if that part has none.

        Changes are numbered in the order of time, as far as the clocks of nodes agree.
        """
        part = select(CHANGES.c.id, CHANGES.c.at_ms).where(CHANGES.c.id > after)
        some = part.order_by(CHANGES.c.id).limit(PART).subquery()
        async with self._sql.reading() as connection:
            last, oldest_ms = (
                await connection.execute(select(func.max(some.c.id), func.min(some.c.at_ms)))
            ).one()
        if last is None or oldest_ms >= before_ms:
            return None
        every = CHANGES.alias()
        newest = select(every.c.id).where(every.c.entity_hash == CHANGES.c.entity_hash)
        newest = newest.order_by(every.c.id.desc()).limit(1)
        # A scalar subquery, since PostgreSQL may turn EXISTS into a join with the whole table.
        is_dropped = (
            CHANGES.c.id.between(after + 1, last),
            CHANGES.c.at_ms < before_ms,
            CHANGES.c.id < newest.scalar_subquery(),
        )
        async with self._sql.writing(until) as connection:
            dropped = await connection.execute(delete(CHANGES).where(*is_dropped))
        return HistoryPart(last, dropped.rowcount)
