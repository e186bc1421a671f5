"""Waiting in a test until a condition holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], *, every_s: float = 0.01, within_s: float = 60.0) -> None:
    """Wait until a condition is true.

    Args:
        every_s: the polling interval; 0 polls in each iteration of the event loop.

    Raises:
        TimeoutError: the condition was not true in time.
    """
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110  what conditions look at sets no event: a store, private state
            await asyncio.sleep(every_s)
