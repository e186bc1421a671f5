"""The end of a task that somebody else started."""

from __future__ import annotations

import asyncio

PATIENCE_S = 0.1


async def end(task: asyncio.Task[None]) -> None:
    """Cancel a task until it has ended: below Python 3.12 a cancellation can be lost in ``wait_for``."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=PATIENCE_S)
