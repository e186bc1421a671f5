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
    machine waited for one is no idle time either, where the kernel tells it.

    Args:
        budget_s: how long on a quiet node; if it is larger than the time for a busy one, for both.
    """

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        self._account: int | None = None
        self._pressure = _opened(PRESSURE)

    def now(self, at: float) -> Moment:
        """A moment of the thread that calls, which is the loop's."""
        return Moment(at, self._busy_s(), self._crowded_s())

    def lasts_s(self, since: Moment, now: Moment) -> float:
        """How long a silence that began then may last."""
        lasted_s = now.at - since.at
        busy_s = max(now.busy_s - since.busy_s, now.crowded_s - since.crowded_s)
        if 2 * busy_s <= lasted_s:
            return self.budget_s
        return max(self.budget_s, BUSY_PATIENCE_S)

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


def _opened(account: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.open(account, os.O_RDONLY | os.O_CLOEXEC)
    return None
