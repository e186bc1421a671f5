"""How long the store may be silent before a call is late: less on a quiet node than on a busy one."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Final, NamedTuple

BUSY_PATIENCE_S: Final = 0.4
"""On a busy node the store's processor is likely as crowded: a healthy one was silent for up to 147 ms."""

SCHEDSTAT: Final = "/proc/thread-self/schedstat"
"""Linux's own account of a thread: nanoseconds that it ran, and that it waited for a processor."""

STRETCH_S: Final = 0.5
"""A node that was busy for so long before a call is busy, also while it only waits for the reply."""

PRESSURE: Final = "/proc/pressure/cpu"
"""Linux's account of the machine: at the end of its first line the microseconds that any thread waited."""


class Moment(NamedTuple):
    """A moment; how much by then the loop's thread had worked, or wanted to, and anybody waited; seconds."""

    at: float
    busy_s: float
    crowded_s: float = 0.0


class Patience:
    """Judges how long a silence may last, by how idle the event loop and the machine were meanwhile.

    Idle is the time in which its thread neither ran nor waited for a processor, by the kernel's account.
    Where the kernel gives none (not Linux), only the time it ran is known: a loop held up looks idle.
    A loop that waits for a store without a processor is idle, too. So the time in which any thread of the
    machine waited for one is no idle time either, where the kernel tells it. And a node under a flood idles
    as soon as a call takes longer, for everybody waits for it: so it is also asked whether the half second
    or more before the call was busy.

    Args:
        budget_s: how long on a quiet node; if it is larger than the time for a busy one, for both.
    """

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        self._older: Moment | None = None
        self._newer: Moment | None = None
        self._account: int | None = None
        self._pressure = _opened(PRESSURE)

    def now(self, at: float) -> Moment:
        """A moment of the thread that calls, which is the loop's."""
        return Moment(at, self._busy_s(), self._crowded_s())

    def began(self, at: float) -> Moment:
        """The moment at which a call begins."""
        now = self.now(at)
        if self._newer is None or at - self._newer.at >= STRETCH_S:
            self._older, self._newer = self._newer, now
        return now

    def lasts_s(self, since: Moment, now: Moment) -> float:
        """How long the silence may last of a call that began then."""
        if _was_busy(since, now) or (self._older is not None and _was_busy(self._older, since)):
            return max(self.budget_s, BUSY_PATIENCE_S)
        return self.budget_s

    def close(self) -> None:
        """Read the kernel's account no more."""
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


def _was_busy(since: Moment, now: Moment) -> bool:
    """Whether the loop idled for less than half of the time between two moments."""
    return 2 * max(now.busy_s - since.busy_s, now.crowded_s - since.crowded_s) > now.at - since.at


def _opened(account: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.open(account, os.O_RDONLY | os.O_CLOEXEC)
    return None
