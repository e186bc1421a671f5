"""The end of a task that somebody else started."""

from __future__ import annotations

import asyncio
from typing import Final

PATIENCE_S: Final = 0.1
"""After this a cancellation is taken to be lost."""


async def finish(task: asyncio.Task[None] | None, within_s: float) -> None:
    """Wait for a task's own end, but not for ever."""
    if task is not None:
        await asyncio.wait({task}, timeout=within_s)
        await end(task)


async def end(task: asyncio.Task[None]) -> None:
    """Cancel a task until it has ended: below Python 3.12 a cancellation can be lost in ``wait_for``."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=PATIENCE_S)
