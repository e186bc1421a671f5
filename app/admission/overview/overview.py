"""The overview of all processes, as a node shows it.

A node reads from the store only samples that are new to it, and keeps the sums: 64 processes leave up to 64
MiB of samples, which no request may read again. It reads when somebody asks, at most once a second; requests
that come together share a read, so a caller that asks in a loop costs the store no more than another. The
first read of a node, and one after a long pause, has all samples that are kept: it comes in small replies,
between which the store and this node go on. While the store is away the node shows what it has read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import islice, takewhile
from time import monotonic
from typing import Final, Literal, NamedTuple, Protocol

from app.admission.overview.series import MINUTE_MS, Point, SummedSeries
from app.store.port import StoreError
from app.store.samples import MINUTES_MS, SECONDS_MS, NewSamples

Resolution = Literal["second", "minute"]

STEP_MS: Final = {"second": 1_000, "minute": MINUTE_MS}
LATE_MS: Final = {"second": 1_500, "minute": 5_000}
"""How long after its end a point is final: processes publish in the next half second, or try again later."""
KEPT_S: Final = 1.0
"""How long a node keeps the sums before it reads again."""
GONE_MS: Final = 15_000
"""The age of its last sample from which a process is not shown any more."""
BACK_MS: Final = 60_000
"""If the store's clock went back by more, its series begin anew with the next sample; so does the node."""


class Samples(Protocol):
    """The source of samples, such as ``app.store.samples.SampleSeries``."""

    async def read(self) -> NewSamples:
        """Read the next samples; raise ``StoreError``."""

    def rewind(self) -> None:
        """Read from the beginning again."""


class ShownNode(NamedTuple):
    """A process that publishes samples; ``seen_ms``: the end of the second that its newest sample counts."""

    node: str
    version: str
    seen_ms: int


class View(NamedTuple):
    """The overview at one moment.

    Attributes:
        now_ms: the store's time when the node last read, plus what has passed since.
        points: oldest first; objects that do not change.
        earlier: the kept points before these.
        minutes: all points by the minute.
    """

    now_ms: int
    nodes: list[ShownNode]
    points: list[Point]
    earlier: list[Point]
    minutes: list[Point]


class DeploymentOverview:
    """Adds up the samples of all processes.

    Args:
        away: whether the store is known to be away, so that nothing is read meanwhile.
        clock: in seconds, monotonic.

    Attributes:
        read_at: when this node read the store last, or tried to, by the clock.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        away: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._samples = samples
        self._away = away
        self._clock = clock
        self._now_ms = 0
        """The store's time at the last read."""
        self.read_at = -KEPT_S
        self._reading: asyncio.Task[None] | None = None
        self._begin()

    def _begin(self) -> None:
        self._seconds = SummedSeries(STEP_MS["second"], SECONDS_MS, awaited=3, late_ms=LATE_MS["second"])
        self._minutes = SummedSeries(STEP_MS["minute"], MINUTES_MS, awaited=1, late_ms=LATE_MS["minute"])

    async def refresh(self) -> None:
        """Read new samples, unless this node did so less than a second ago, or cannot."""
        if self._reading is None and self._clock() - self.read_at >= KEPT_S and not self._away():
            self._reading = asyncio.create_task(self._read(), name="read samples")
            self._reading.add_done_callback(self._finished)
        if self._reading is not None:
            await asyncio.shield(self._reading)

    def _finished(self, _task: asyncio.Task[None]) -> None:
        self._reading = None

    async def _read(self) -> None:
        try:
            is_all = False
            while not is_all:
                *_, is_all = found = await self._samples.read()
                newest_ms = max((each.taken_ms for each in (*found.seconds, *found.minutes)), default=0)
                went_back = max(newest_ms, self._now_ms) > found.now_ms + BACK_MS
                self._now_ms = found.now_ms
                if went_back:  # until its next sample, the store has samples of the future
                    self._begin()
                    self._samples.rewind()
                    return
                for sample in found.seconds:
                    self._seconds.add(sample)
                for sample in found.minutes:
                    self._minutes.add(sample)
        except StoreError:
            return  # the sums stay as they are
        finally:
            self.read_at = self._clock()
        self._seconds.close(self._now_ms)
        self._minutes.close(self._now_ms)

    def view(self, resolution: Resolution, since_ms: int | None = None) -> View:
        """Return the overview; ``since_ms``: only points that end later."""
        now_ms = self._now_ms + round((self._clock() - self.read_at) * 1000) if self._now_ms else 0
        nodes = [
            ShownNode(sample.node, sample.version, at * STEP_MS["second"])
            for at, sample in self._seconds.processes
            if not sample.is_last and at * STEP_MS["second"] > now_ms - GONE_MS
        ]
        series = self._seconds if resolution == "second" else self._minutes
        since = -1 if since_ms is None else since_ms // STEP_MS[resolution]
        earlier = list(takewhile(lambda point: point.at <= since, series.points))
        points = list(islice(series.points, len(earlier), None))
        return View(now_ms, sorted(nodes), points, earlier, list(self._minutes.points))

    async def close(self) -> None:
        """End a read that is under way."""
        if (reading := self._reading) is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
