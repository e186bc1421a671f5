"""Ends tasks: waits for them, or cancels them."""

from __future__ import annotations

import asyncio
from typing import Final

PATIENCE_S: Final = 0.1
"""After this a cancellation counts as lost and is repeated."""


async def finish(task: asyncio.Task[None] | None, within_s: float) -> None:
    """Wait up to ``within_s`` for a task to finish by itself, then cancel it."""
    if task is not None:
        await asyncio.wait({task}, timeout=within_s)
    await end(task)


async def end(task: asyncio.Task[None] | None) -> None:
    """Cancel a task until it has ended: before Python 3.12, ``wait_for`` can lose a cancellation."""
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=PATIENCE_S)
