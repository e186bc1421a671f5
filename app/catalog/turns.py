"""Work on the catalog's database: one after the other, and each within the time that an answer may take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from app.catalog import sql
from app.catalog.port import CatalogAway

T = TypeVar("T")

POLL_S: Final = 0.25
"""How often a follower looks."""


class Turns:
    """Whoever changes something takes a turn; a turn ends when its work does, however late."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def take(self, work: Callable[[float], Coroutine[Any, Any, T]]) -> T:
        """Do this work in its turn.

        The wait for the turn is part of the time that an answer may take; the work is told when that ends.

        Raises:
            CatalogAway: it took too long.
        """
        until = deadline()
        try:
            async with asyncio.timeout_at(until):
                await self._turn.acquire()
        except TimeoutError as error:
            raise _late() from error
        return await within(work(until), until, ended=lambda _: self._turn.release())

    async def follow(
        self, look: Callable[[], Coroutine[Any, Any, None]], lost: Callable[[Exception], None]
    ) -> None:
        """Look for changes for ever; whatever goes wrong is told, and the next look comes."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.take(lambda _: look())
            except Exception as error:  # noqa: BLE001 - a follower that dies would go unnoticed
                lost(error)


def deadline() -> float:
    """When an answer that is asked for now has taken too long, by the event loop's clock."""
    return asyncio.get_running_loop().time() + sql.ANSWER_S


async def within(
    work: Coroutine[Any, Any, T], until: float, ended: Callable[[object], object] = lambda _: None
) -> T:
    """Await an answer of the database until then.

    Work that takes longer is left behind, not cancelled: a cancelled statement may keep its lock for ever. It
    ends by the database's own timeouts, and a write that ends too late is not committed.

    Raises:
        CatalogAway: it took too long.
    """
    task = asyncio.ensure_future(work)
    task.add_done_callback(ended)
    done, _ = await asyncio.wait({task}, timeout=until - asyncio.get_running_loop().time())
    if not done:
        task.add_done_callback(lambda late: late.cancelled() or late.exception())
        raise _late()
    return task.result()


def _late() -> CatalogAway:
    return CatalogAway(f"the catalog did not answer within {sql.ANSWER_S:g} s")
