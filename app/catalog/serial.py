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
"""The pause between two polls for changes."""


class SerialExecutor:
    """Runs pieces of work one after another; the next piece begins when the last one has ended."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._follower: asyncio.Task[None] | None = None

    async def run(self, work: Callable[[float], Coroutine[Any, Any, T]]) -> T:
        """Run a piece of work after the pieces before it; the wait counts towards the deadline that it gets.

        Raises:
            CatalogUnavailableError: the work took too long.
        """
        until = sql.deadline()
        try:
            async with asyncio.timeout_at(until):
                await self._lock.acquire()
        except TimeoutError as error:
            raise _late() from error
        return await within(work(until), until, ended=lambda _: self._lock.release())

    def follow(
        self, poll: Callable[[], Coroutine[Any, Any, None]], failed: Callable[[Exception], None]
    ) -> None:
        """Begin to poll for changes; ``failed`` is called when a poll fails."""
        self._follower = asyncio.create_task(self._follow(poll, failed), name="follow the catalog")

    async def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Stop polling for changes, wait for the work under way, and do the last piece of work."""
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.wait({self._follower}, timeout=1)
        with suppress(CatalogUnavailableError):
            await self.run(lambda _: last())

    async def _follow(
        self, poll: Callable[[], Coroutine[Any, Any, None]], failed: Callable[[Exception], None]
    ) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.run(lambda _: poll())
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
        CatalogUnavailableError: the database took too long.
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
