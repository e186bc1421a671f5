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


class Moment(NamedTuple):
    """A moment, and how much the loop's thread had worked, or wanted to, by then; in seconds."""

    at: float
    busy_s: float


class Patience:
    """Judges how long a silence may last, by how idle the event loop was meanwhile.

    Idle is the time in which its thread neither ran nor waited for a processor, by the kernel's account.
    Where the kernel gives none (not Linux), only the time it ran is known: a loop held up looks idle.

    Args:
        budget_s: how long on a quiet node; if it is larger than the time for a busy one, for both.
    """

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        self._account: int | None = None

    def now(self, at: float) -> Moment:
        """A moment of the thread that calls, which is the loop's."""
        return Moment(at, self._busy_s())

    def lasts_s(self, since: Moment, now: Moment) -> float:
        """How long a silence that began then may last."""
        idle_s = (now.at - since.at) - (now.busy_s - since.busy_s)
        if 2 * idle_s >= now.at - since.at:
            return self.budget_s
        return max(self.budget_s, BUSY_PATIENCE_S)

    def close(self) -> None:
        """Read the kernel's account no more."""
        if self._account is not None:
            os.close(self._account)
            self._account = None

    def _busy_s(self) -> float:
        if self._account is None:
            with contextlib.suppress(OSError):
                self._account = os.open(SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
        if self._account is None:
            return time.thread_time()
        ran, waited, _ = os.pread(self._account, 64, 0).split()
        return (int(ran) + int(waited)) / 1e9
