"""How much was admitted in any span of one window, compared with the limit and its stated bound."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from app.domain.quota import Quota
from workers.jobs.audit.bucket_findings import BucketTally

ROUNDING: Final = 1e-9


class AdmittedAmounts:
    """The amounts admitted in the trailing window, less refunds.

    The sum starts again from zero when the limit changes, when the bucket moves back in time, and when the
    store lost charges: after each, a full limit may be admitted once more.
    """

    def __init__(self) -> None:
        self._amounts: deque[tuple[int, float]] = deque()
        self._sum = 0.0
        self._rule: tuple[float, int] | None = None
        self._newest_ms = 0

    def add(self, quota: Quota, amount: float, now_ms: int, tally: BucketTally) -> None:
        """Add an admitted amount, and compare the window's sum with the bound, if the quota has one."""
        bound, window_ms = quota.bound
        if bound is None:
            return
        if self._rule != (quota.limit, window_ms) or self._newest_ms - now_ms > window_ms:
            self._amounts.clear()
            self._sum, self._rule, self._newest_ms = 0.0, (quota.limit, window_ms), now_ms
        self._newest_ms = now_ms = max(now_ms, self._newest_ms)
        self._append(amount, now_ms, window_ms)
        seconds = 1.0 if quota.algorithm == "producer_ids" else window_ms / 1000
        allowed = quota.limit * seconds
        ratio = self._sum / allowed if allowed else math.inf if self._sum > 0 else 0.0
        if tally.bound is None or excess(ratio, bound) >= excess(tally.worst, tally.bound):
            tally.worst, tally.bound = ratio, bound
        tally.over += ratio > bound * (1 + ROUNDING) and amount > 0

    def refund(self, amount: float) -> None:
        """Subtract a refund from the newest amounts, as a bucket does."""
        while amount > 0 and self._amounts:
            at_ms, newest = self._amounts.pop()
            refunded = min(newest, amount)
            self._sum, amount = self._sum - refunded, amount - refunded
            if newest > refunded:
                self._amounts.append((at_ms, newest - refunded))

    def _append(self, amount: float, now_ms: int, window_ms: int) -> None:
        amounts = self._amounts
        before = amounts.pop()[1] if amounts and amounts[-1][0] == now_ms else 0.0
        amounts.append((now_ms, before + amount))
        self._sum += amount
        while amounts and now_ms - amounts[0][0] >= window_ms:
            self._sum -= amounts.popleft()[1]
        if len(amounts) == 1:
            self._sum = amounts[0][1]  # removes rounding errors


def excess(ratio: float, bound: float) -> float:
    """A ratio divided by its bound.

    >>> excess(1.5, 2.0), excess(0.0, 0.0), excess(0.5, 0.0)
    (0.75, 0.0, inf)
    """
    if bound:
        return ratio / bound
    return math.inf if ratio > 0 else 0.0
