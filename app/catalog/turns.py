"""Work on the catalog's database: one piece at a time, and each within the time that an answer may take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar

from app.catalog import sql
from app.catalog.errors import CatalogUnavailableError

T = TypeVar("T")

POLL_S: Final = 0.25
"""The pause between two looks for changes."""


class DatabaseTurns:
    """A queue for work: each piece has its turn, which lasts until the work ends."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._follower: asyncio.Task[None] | None = None

    async def take(self, work: Callable[[float], Coroutine[Any, Any, T]]) -> T:
        """Do work in its turn. The work gets its deadline; waiting for the turn counts towards it.

        Raises:
            CatalogUnavailableError: the work took too long.
        """
        until = sql.deadline()
        try:
            async with asyncio.timeout_at(until):
                await self._turn.acquire()
        except TimeoutError as error:
            raise _late() from error
        return await within(work(until), until, ended=lambda _: self._turn.release())

    def follow(
        self, look: Callable[[], Coroutine[Any, Any, None]], failed: Callable[[Exception], None]
    ) -> None:
        """Begin to look for changes in regular turns; ``failed`` is called when a look fails."""
        self._follower = asyncio.create_task(self._follow(look, failed), name="follow the catalog")

    async def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Stop looking for changes, wait for the work under way, and do the last piece of work."""
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.wait({self._follower}, timeout=1)
        with suppress(CatalogUnavailableError):
            await self.take(lambda _: last())

    async def _follow(
        self, look: Callable[[], Coroutine[Any, Any, None]], failed: Callable[[Exception], None]
    ) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.take(lambda _: look())
            except Exception as error:  # noqa: BLE001 - a follower that dies would go unnoticed
                failed(error)


async def within(
    work: Coroutine[Any, Any, T],
    until: float | None = None,
    ended: Callable[[object], object] = lambda _: None,
) -> T:
    """Wait for the database until a deadline; by default, the deadline of a call that starts now.

    Work that takes longer is abandoned but not cancelled, because a cancelled statement may keep its lock for
    ever. It ends by the database's own timeouts, and a write that ends too late is not committed.

    Raises:
        CatalogUnavailableError: it took too long.
    """
    until = sql.deadline() if until is None else until
    task = asyncio.ensure_future(work)
    task.add_done_callback(ended)
    done, _ = await asyncio.wait({task}, timeout=until - asyncio.get_running_loop().time())
    if not done:
        task.add_done_callback(lambda late: late.cancelled() or late.exception())
        raise _late()
    return task.result()


def _late() -> CatalogUnavailableError:
    return CatalogUnavailableError(f"the catalog did not answer within {sql.ANSWER_S:g} s")
