"""How much was admitted in any span of one window, against what the limit allows and the stated bound."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from app.domain.quota import Quota
from workers.spark.audit.found import Tally

ROUNDING: Final = 1e-9


class Admitted:
    """The amounts admitted in the trailing window, less what was given back of them.

    It begins anew when the limit changes, the bucket moves back in time, or the store lost charges: as much
    may pass once more.
    """

    def __init__(self) -> None:
        self._amounts: deque[tuple[int, float]] = deque()
        self._sum = 0.0
        self._under: tuple[float, int] | None = None
        self._newest = 0

    def add(self, quota: Quota, amount: float, now_ms: int, tally: Tally) -> None:
        """Count an amount that was admitted; nothing if the quota bounds nothing."""
        bound, window_ms = quota.bound
        if bound is None:
            return
        if self._under != (quota.limit, window_ms) or self._newest - now_ms > window_ms:
            self._amounts.clear()
            self._sum, self._under, self._newest = 0.0, (quota.limit, window_ms), now_ms
        self._newest = now_ms = max(now_ms, self._newest)
        self._take_in(amount, now_ms, window_ms)
        seconds = 1.0 if quota.algorithm == "producer_ids" else window_ms / 1000
        allowed = quota.limit * seconds
        ratio = self._sum / allowed if allowed else math.inf if self._sum > 0 else 0.0
        if tally.bound is None or excess(ratio, bound) >= excess(tally.worst, tally.bound):
            tally.worst, tally.bound = ratio, bound
        tally.over += ratio > bound * (1 + ROUNDING) and amount > 0

    def give_back(self, amount: float) -> None:
        """Count a refund: what was admitted last is given back first, as a bucket does it."""
        while amount > 0 and self._amounts:
            at_ms, newest = self._amounts.pop()
            given = min(newest, amount)
            self._sum, amount = self._sum - given, amount - given
            if newest > given:
                self._amounts.append((at_ms, newest - given))

    def _take_in(self, amount: float, now_ms: int, window_ms: int) -> None:
        amounts = self._amounts
        before = amounts.pop()[1] if amounts and amounts[-1][0] == now_ms else 0.0
        amounts.append((now_ms, before + amount))
        self._sum += amount
        while now_ms - amounts[0][0] >= window_ms:
            self._sum -= amounts.popleft()[1]
        if len(amounts) == 1:
            self._sum = amounts[0][1]  # what rounding left is gone


def excess(ratio: float, bound: float) -> float:
    """A ratio as a part of its bound.

    >>> excess(1.5, 2.0), excess(0.0, 0.0), excess(0.5, 0.0)
    (0.75, 0.0, inf)
    """
    if bound:
        return ratio / bound
    return math.inf if ratio > 0 else 0.0
