"""Adds the counts of shadow quotas to those in the store, one batch a second.

A decision only counts; a task of its own sends what was counted. A batch is sent again, under its number,
until the store says that it has it. So each verdict is counted once, except those of the last second before a
process is killed. With more than ``MOST`` shadow quotas asked in a second the counts of some are late: those
that wait longest come first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final, Protocol

import structlog

from app.admission.metrics.shadows import ShadowTally
from app.node.tasks import end
from app.store.port import StoreError
from app.store.shadow_counts import MOST, ShadowCount

EVERY_S: Final = 1.0
LAST_S: Final = 1.0
"""How long a process that stops goes on sending batches."""

log: Final = structlog.get_logger("quotagate")


class CountSink(Protocol):
    """The destination of counts, such as ``app.store.shadow_counts.ShadowCounts``."""

    async def add(self, node: str, batch: int, counts: Sequence[ShadowCount]) -> bool:
        """Add a batch once; return false if there is no room; raise ``StoreError``."""


class ShadowPublisher:
    """Publishes the counts of shadow quotas.

    Args:
        node: the name of this process, and of no other, nor of an earlier start.
        tally: what was counted since the last batch.
        away: whether the store is known to be away, so that nothing is sent meanwhile.
        clock: in seconds, monotonic.
    """

    def __init__(
        self,
        counts: CountSink,
        *,
        node: str,
        tally: ShadowTally,
        away: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._counts = counts
        self._node = node
        self._tally = tally
        self._away = away
        self._clock = clock
        self._number = 0
        self._batch: list[ShadowCount] = []
        """The batch that the store may not have yet."""
        self._task: asyncio.Task[None] | None = None
        self._is_warned = False

    def open(self) -> None:
        """Begin to publish."""
        self._task = asyncio.create_task(self._publish_on(), name="publish counts of shadow quotas")

    async def close(self) -> None:
        """Publish everything that is left, if the store can be reached, for at most a second."""
        if self._task is not None:
            await end(self._task)
            until = self._clock() + LAST_S
            while await self.publish() and self._clock() < until:
                pass

    async def _publish_on(self) -> None:
        while True:
            try:
                await self.publish()
            except Exception:
                log.exception("counts of shadow quotas could not be published")  # they are sent again
            await asyncio.sleep(EVERY_S)

    async def publish(self) -> bool:
        """Send a batch; return whether one was sent and taken, so that there may be more."""
        if self._away():
            return False
        if not self._batch:
            self._batch = self._tally.take(MOST)
            self._number += 1
        if not self._batch:
            return False
        try:
            took = await self._counts.add(self._node, self._number, self._batch)
        except StoreError as error:
            return self._kept(f"the store does not take them: {error.reason}")
        if not took:
            return self._kept("the store has no room for them")
        self._batch, self._is_warned = [], False
        return True

    def _kept(self, why: str) -> bool:
        if not self._is_warned:
            self._is_warned = True
            log.warning("counts of shadow quotas are sent later", why=why)
        return False
