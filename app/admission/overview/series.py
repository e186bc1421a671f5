"""Adds up the samples of all processes: one point for each second, or each minute.

A process counts from its start, so a point has the difference to its sample before. Points are made in the
order in which the store took the samples and by its clock alone, so every node makes the same ones, now or
later.

A point is **final** once samples for it have had time to come. If one is lost, there is no
point: a sum without one process would look like less traffic. The next point has the counts of both; so
each point counts since the point before it, the sum over all points is exact, and nothing is counted twice.
A process is lost if it did not say that it stops. The others wait for it for a few points of theirs, then
they go on without it. So processes may come back one after another when the store was away for all. A process
that alone was without the store for longer comes back as a peak: its counts are all in one point. So does one
that began while the store was away, if its first sample comes after the first point.

Counts before the first sample that is still kept are not known, and belong to no point.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct

from app.admission.metrics.tally import top
from app.store.samples import COUNTED, LATENCY_S, ProcessSample, ThrottledBucket, TimedSample

MOST_THROTTLED: Final = 32
"""The most throttled buckets of a point, so that a day of them takes some megabytes at most."""

MINUTE_MS: Final = 60_000
PAUSE_MS: Final = MINUTE_MS
"""Throttled asks with a longer pause between them are two stretches."""
PRESENT_MS: Final = 3 * MINUTE_MS
"""An older point by the minute says nothing about the present: each comes up to two minutes late."""
LONG_MS: Final = 30 * MINUTE_MS
"""A bucket that has throttled asks for this time has done so for long."""

Sums = dict[tuple[str, str], tuple[int, int]]
"""The number of asks, and the sum of their throttle times in ms, by quota and bucket."""


class Point(Struct, frozen=True):
    """The counts of all processes in a second or a minute.

    Attributes:
        at: its end, in seconds or minutes since 1970.
        counts: by the names of ``COUNTED``.
        latency: as in ``ProcessSample``.
        throttled: the most throttled buckets, the first ones most.
    """

    at: int
    counts: list[int]
    latency: list[int]
    queue_asks: int
    throttled: list[ThrottledBucket]


class _Process:
    """A process: its newest sample, until when that counts, and the points of others that it missed since."""

    __slots__ = ("at", "missed", "newest")

    def __init__(self, at: int, newest: ProcessSample) -> None:
        self.at = at
        self.newest = newest
        self.missed = 0


class _Sum:
    """The counts that wait for their point."""

    __slots__ = ("counts", "latency", "throttled")

    def __init__(self) -> None:
        self.counts = [0] * len(COUNTED)
        self.latency = [0] * (len(LATENCY_S) + 1)
        self.throttled: Sums = {}

    def add(self, counts: list[int], latency: list[int], throttled: list[ThrottledBucket]) -> None:
        for sums, more in ((self.counts, counts), (self.latency, latency)):
            for place, number in enumerate(more[: len(sums)]):  # another version may count more, or less
                sums[place] += number
        add_throttled(self.throttled, throttled)


class SummedSeries:
    """The points of one resolution.

    Args:
        step_ms: the length of a point.
        span_ms: how far the points go back.
        awaited: for how many points of others a process without samples counts as lost; then it is gone.
        late_ms: how long after its end a point becomes final.

    Attributes:
        points: the final points, oldest first.
    """

    def __init__(self, step_ms: int, span_ms: int, *, awaited: int, late_ms: int) -> None:
        self.points: deque[Point] = deque()
        self._step_ms = step_ms
        self._span = span_ms // step_ms
        self._awaited = awaited
        self._late_ms = late_ms
        self._processes: dict[str, _Process] = {}
        self._waiting: dict[int, _Sum] = {}
        """Counts that are not in the series yet, by the point that they belong to."""
        self._carried: _Sum | None = None
        """The counts of points that a lost sample prevented."""
        self._lost: set[int] = set()
        """Points, not final yet, for which the sample of a process did not come, though a later one did."""
        self._closed = 0
        """The last point that is final."""

    def add(self, timed: TimedSample) -> None:
        """Add a sample, in the order of the store."""
        self.close(timed.taken_ms)
        sample, at = timed.sample, timed.at
        if sample is None:
            return
        known = self._processes.get(sample.node)
        if known is not None:
            before = known.newest
            counts = [now - then for now, then in zip(sample.counts, before.counts, strict=False)]
            latency = [now - then for now, then in zip(sample.latency, before.latency, strict=False)]
            if known.missed <= self._awaited:
                self._lost.update(range(max(known.at, self._closed) + 1, at))
            known.at, known.newest, known.missed = max(at, known.at), sample, 0
        else:
            self._processes[sample.node] = _Process(at, sample)
            counts, latency = sample.counts, sample.latency
            if not sample.is_first:
                counts, latency = [0] * len(counts), [0] * len(latency)
            elif not self.points or self.points[-1].at < self._closed:  # it began in the gap
                self._lost.update(range(self._closed + 1, at))
        place = max(at, self._closed + 1)
        self._waiting.setdefault(place, _Sum()).add(counts, latency, sample.throttled)

    @property
    def processes(self) -> Iterable[tuple[int, ProcessSample]]:
        """The newest sample of each process, and until when it counts."""
        return ((each.at, each.newest) for each in self._processes.values())

    def close(self, now_ms: int) -> None:
        """Make the points that are final at this time."""
        final = (now_ms - self._late_ms) // self._step_ms
        if final <= self._closed:
            return
        processes = self._processes.values()
        newest = max(max((each.at for each in processes), default=0), max(self._waiting, default=0))
        oldest = min(self._waiting, default=newest + 1)
        for at in range(max(self._closed + 1, oldest), min(final, newest) + 1):
            self._close(at)
        self._closed = final
        self._lost = {at for at in self._lost if at > final}
        since = final - self._span
        while self.points and self.points[0].at <= since:
            self.points.popleft()
        for node in [node for node, each in self._processes.items() if each.at <= since]:
            del self._processes[node]

    def _close(self, at: int) -> None:
        ready = self._waiting.pop(at, None)
        if ready is not None:
            if self._carried is None:
                self._carried = ready
            else:
                busiest = most_throttled(ready.throttled, MOST_THROTTLED)  # a gap can be long
                self._carried.add(ready.counts, ready.latency, busiest)
        absent = [each for each in self._processes.values() if each.at < at and not each.newest.is_last]
        for each in absent:
            each.missed += ready is not None
        is_lost = at in self._lost or any(each.missed <= self._awaited for each in absent)
        if is_lost or self._carried is None:
            return
        done, self._carried = self._carried, None
        alive = (each.newest for each in self._processes.values() if each.at >= at)
        queue_asks = sum(sample.queue_asks for sample in alive if not sample.is_last)
        self.points.append(
            Point(at, done.counts, done.latency, queue_asks, most_throttled(done.throttled, MOST_THROTTLED))
        )


def add_throttled(sums: Sums, buckets: list[ThrottledBucket]) -> None:
    """Add throttled buckets to their sums."""
    for each in buckets:
        asks, throttle_ms = sums.get((each.quota, each.bucket), (0, 0))
        sums[each.quota, each.bucket] = asks + each.asks, throttle_ms + each.throttle_ms


def most_throttled(sums: Sums, most: int) -> list[ThrottledBucket]:
    """Return the buckets that throttled most asks, the first ones most."""
    return top((ThrottledBucket(*names, *numbers) for names, numbers in sums.items()), most)


def throttled_since(
    points: Sequence[Point], step_ms: int, buckets: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], int]:
    """Return since when buckets have throttled asks, in ms, with no longer pause than ``PAUSE_MS``.

    A stretch ends with the newest point that names the bucket; the kept points bound its length.

    Args:
        points: all that are kept, oldest first.
        buckets: by quota and name.
    """
    since: dict[tuple[str, str], int] = {}
    followed = set(buckets)
    for place in range(len(points) - 1, -1, -1):
        if not followed:
            break
        point = points[place]
        began = points[place - 1].at if place else point.at - 1  # after a gap it counts for the gap, too
        for each in point.throttled:
            name = (each.quota, each.bucket)
            if name in followed:
                if (since.get(name, point.at) - point.at) * step_ms > PAUSE_MS:
                    followed.remove(name)
                else:
                    since[name] = began
    return {name: at * step_ms for name, at in since.items()}


def present(minutes: Sequence[Point], now_ms: int) -> list[Point]:
    """Return the newest points by the minute, at most two, unless they are too old to show the present."""
    return [point for point in minutes[-2:] if now_ms - point.at * MINUTE_MS < PRESENT_MS]


def throttled_long(minutes: Sequence[Point], newest: Sequence[Point]) -> dict[tuple[str, str], int]:
    """Return the buckets that have throttled asks for 30 minutes or more and still do, the longest first.

    Args:
        minutes: all points by the minute that are kept, oldest first.
        newest: as ``present`` returns them.

    Returns:
        Since when, in ms, by quota and name.
    """
    buckets = {(each.quota, each.bucket) for point in newest for each in point.throttled}
    since = throttled_since(minutes, MINUTE_MS, buckets)
    long = [(at, name) for name, at in since.items() if minutes[-1].at * MINUTE_MS - at >= LONG_MS]
    return {name: at for at, name in sorted(long)}
