"""Publishes one sample of this process a second into the store.

A decision only counts; a task of its own makes the sample from the counters and sends it on connections of
its own. Samples are named by the store's time, which each reply tells. Processes send at different moments
of the second, so that the store never gets the samples of all at once.

A sample that the store did not take is dropped: the next has its counts too. The throttled buckets of a
dropped second are lost, since nobody knows whether the store took them. Those of a minute are sent again, as
a bucket that is throttled for long must not miss a minute; if only the reply was lost, they count twice.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from time import monotonic
from typing import Final, Protocol

import structlog

from app.admission.metrics.metrics import Totals
from app.admission.metrics.tally import Tally
from app.admission.overview.series import Sums, add_throttled, most_throttled
from app.node.tasks import end
from app.store.port import StoreError
from app.store.samples import LONGEST_NODE, MOST_BUCKETS, ProcessSample, ThrottledBucket, packed, short_bucket

EVERY_S: Final = 1.0
SPREAD_S: Final = 0.5
"""Processes publish within this part of each second."""
MOST_IN_MINUTE: Final = 60 * MOST_BUCKETS
"""The most throttled buckets that are added up for a minute, even if the store answers no sample."""

log: Final = structlog.get_logger("quotagate")


class Series(Protocol):
    """The destination of samples, such as ``app.store.samples.SampleSeries``."""

    async def append(self, second: bytes, minute: bytes, at: int | None, at_minute: int) -> tuple[int, bool]:
        """Append packed samples; return the store's time and whether it took them; raise ``StoreError``."""


class Publisher:
    """Publishes samples.

    Args:
        node: the name of this process, and of no other, nor of an earlier start.
        version: of the program.
        totals: returns the counts since the start.
        throttled: the most throttled buckets since the last sample.
        away: whether the store is known to be away, so that nothing is sent meanwhile.
        clock: in seconds, monotonic.

    Attributes:
        dropped: samples that the store did not take, or perhaps did not.
    """

    def __init__(
        self,
        series: Series,
        *,
        node: str,
        version: str,
        totals: Callable[[], Totals],
        throttled: Tally,
        away: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.dropped = 0
        self._series = series
        self._node = node.encode()[:LONGEST_NODE].decode(errors="ignore")
        self._version = version
        self._totals = totals
        self._throttled = throttled
        self._in_minute: Sums = {}
        """The throttled buckets since the last sample of the series by the minute."""
        self._away = away
        self._clock = clock
        self._spread_s = random.uniform(0, SPREAD_S)  # noqa: S311  not a secret
        self._ahead_s: float | None = None
        """The store's time minus the clock; None before the first reply."""
        self._is_first, self._is_first_minute = True, True
        self._minute: int | None = None
        """The minute whose end the last published sample of the minute series has reached."""
        self._task: asyncio.Task[None] | None = None
        self._is_warned = False

    def open(self) -> None:
        """Begin to publish."""
        self._task = asyncio.create_task(self._publish_on(), name="publish samples")

    async def close(self) -> None:
        """Publish once more, if the store can be reached."""
        if self._task is not None:
            await end(self._task)
            await self.publish(is_last=True)

    async def _publish_on(self) -> None:
        while True:
            try:
                await self.publish()
            except Exception:
                log.exception("a sample could not be published")  # the next is tried
            await asyncio.sleep(self._until_next_s())

    def _until_next_s(self) -> float:
        """How long until the next whole second of the store, and this process's part of one."""
        now_s = self._clock() + (self._ahead_s or 0) - self._spread_s
        left_s = math.floor(now_s) + EVERY_S - now_s
        return left_s if left_s > EVERY_S / 10 else left_s + EVERY_S

    async def publish(self, *, is_last: bool = False) -> None:
        """Publish a sample of this moment."""
        if self._away():
            self.dropped += 1
            return
        at = self._at(is_last=is_last)
        ends = 0 if at is None else math.ceil(at / 60) if is_last else at // 60
        is_due = is_last or (at is not None and ends != self._minute and self._minute is not None)
        if self._minute is None and at is not None:
            self._minute = ends
        newest = [
            ThrottledBucket(each.quota, short_bucket(each.bucket), each.asks, each.throttle_ms)
            for each in self._throttled.take(MOST_BUCKETS)
        ]
        if len(self._in_minute) < MOST_IN_MINUTE:
            add_throttled(self._in_minute, newest)
        second = self._packed(newest, is_first=self._is_first, is_last=is_last)
        minute = b""
        if is_due:
            busiest = most_throttled(self._in_minute, MOST_BUCKETS)
            minute = self._packed(busiest, is_first=self._is_first_minute, is_last=is_last)
        try:
            now_ms, took = await self._series.append(second, minute, at, ends)
        except StoreError as error:
            self._drop(f"the store does not take samples: {error.reason}")
            return
        self._ahead_s = now_ms / 1000 - self._clock()
        if not took:
            self._drop("the store has no room for samples")
            return
        self._is_first = self._is_warned = False
        if is_due:
            self._is_first_minute, self._minute, self._in_minute = False, ends, {}

    def _at(self, *, is_last: bool) -> int | None:
        """The time until which a sample of this moment counts, in s by the store's clock; None if unknown."""
        if self._ahead_s is None:
            return None
        now_s = self._clock() + self._ahead_s - self._spread_s
        return math.ceil(now_s) if is_last else round(now_s)

    def _packed(self, throttled: list[ThrottledBucket], *, is_first: bool, is_last: bool) -> bytes:
        counts, latency, queue_asks = self._totals()
        return packed(
            ProcessSample(
                self._node, self._version, is_first, is_last, queue_asks, counts, latency, throttled
            )
        )

    def _drop(self, why: str) -> None:
        self.dropped += 1
        if not self._is_warned:
            self._is_warned = True
            log.warning("samples are dropped", why=why)
