"""How long the store may be silent before a call is late: 50 ms on a quiet node, 400 ms on a busy one.

When the node is busy, the store's processor is likely to be crowded too. So before a silence is judged, this
module asks the kernel how busy the node was since the call began, and during the half second or more before.
The node counts as busy if either was true for more than half of that time:

- the thread of the event loop ran, or waited for a processor;
- any thread of the machine waited for a processor. (A loop that waits for a store that has no processor looks
  idle.) During the call a quarter of the time is enough: the kernel averages over the processors in use,
  so a store that waits for one of two processors shows as at most half of the time.

The time before the call counts too: during a flood the loop becomes idle as soon as one call takes longer,
because all asks wait for that call.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from typing import Final, NamedTuple

BUSY_PATIENCE_S: Final = 0.4
"""The patience on a busy node: a healthy store was measured to be silent for up to 147 ms."""

SCHEDSTAT: Final = "/proc/thread-self/schedstat"
"""Linux's accounting of a thread: nanoseconds that it ran, and that it waited for a processor."""

STRETCH_S: Final = 0.5
"""The shortest time before a call that is examined."""

KEPT_S: Final = 0.005
"""How long a reading of the accounting is reused for new calls: a reading takes as long as several asks."""

PRESSURE: Final = "/proc/pressure/cpu"
"""Linux's accounting of the machine; its first line ends with the microseconds that any thread waited."""


class Moment(NamedTuple):
    """A time, and the kernel's accounting at that time, all in seconds.

    Attributes:
        at: by the monotonic clock.
        busy_s: how long the loop's thread had run or waited for a processor.
        crowded_s: how long any thread of the machine had waited for a processor.
    """

    at: float
    busy_s: float
    crowded_s: float = 0.0


class Patience:
    """Decides how long the store may be silent.

    Without the kernel's accounting (not Linux), only the time that the loop's thread ran is known.

    Args:
        budget_s: the patience on a quiet node; on a busy node too, if it is larger than ``BUSY_PATIENCE_S``.
    """

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        self._newest = Moment(-math.inf, 0.0)
        self._older: Moment | None = None
        self._newer: Moment | None = None
        self._account: int | None = None
        self._pressure = _opened(PRESSURE)

    def now(self, at: float) -> Moment:
        """Return the accounting now; must be called on the loop's thread."""
        return Moment(at, self._busy_s(), self._crowded_s())

    def begin(self, at: float) -> Moment:
        """Return the accounting at the start of a call or shortly before, and remember it for later calls."""
        if at - self._newest.at < KEPT_S:
            return self._newest
        now = self._newest = self.now(at)
        if self._newer is None or at - self._newer.at >= STRETCH_S:
            self._older, self._newer = self._newer, now
        return now

    def lasts_s(self, since: Moment, now: Moment) -> float:
        """Return how long the store may be silent during a call that began at ``since``."""
        in_call = _was_busy(since, now, crowded_weight=2)
        if in_call or (self._older is not None and _was_busy(self._older, since)):
            return max(self.budget_s, BUSY_PATIENCE_S)
        return self.budget_s

    def close(self) -> None:
        """Close the files of the kernel's accounting."""
        for account in (self._account, self._pressure):
            if account is not None:
                os.close(account)
        self._account = self._pressure = None

    def _crowded_s(self) -> float:
        if self._pressure is None:
            return 0.0
        some, _, _ = os.pread(self._pressure, 256, 0).partition(b"\n")
        return int(some.rpartition(b"=")[2]) / 1e6

    def _busy_s(self) -> float:
        if self._account is None:
            self._account = _opened(SCHEDSTAT)
        if self._account is None:
            return time.thread_time()
        ran, waited, _ = os.pread(self._account, 64, 0).split()
        return (int(ran) + int(waited)) / 1e9


def _was_busy(since: Moment, now: Moment, crowded_weight: int = 1) -> bool:
    """Return whether the node was busy for more than half of the time between two moments."""
    busy_s = max(now.busy_s - since.busy_s, crowded_weight * (now.crowded_s - since.crowded_s))
    return 2 * busy_s > now.at - since.at


def _opened(account: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.open(account, os.O_RDONLY | os.O_CLOEXEC)
    return None
