"""How much was admitted in any span of one window, compared with the limit and its stated bound."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from app.domain.quota import Quota
from workers.jobs.audit.bucket_findings import BucketTally

ROUNDING: Final = 1e-9


@dataclass(slots=True)
class AdmittedAmounts:
    """The amounts admitted in the trailing window, less refunds.

    The sum starts again from zero when the limit changes, when the bucket moves back in time, and when the
    store lost charges: after each, a full limit may be admitted once more.

    Attributes:
        amounts: each with its time.
        rule: the limit, and the window in ms.
    """

    amounts: deque[tuple[int, float]] = field(default_factory=deque)
    total: float = 0.0
    rule: tuple[float, int] | None = None
    newest_ms: int = 0

    def add(self, quota: Quota, amount: float, now_ms: int, tally: BucketTally) -> None:
        """Add an admitted amount, and compare the window's sum with the bound, if the quota has one."""
        bound, window_ms = quota.bound
        if bound is None:
            return
        if self.rule != (quota.limit, window_ms) or self.newest_ms - now_ms > window_ms:
            self.amounts.clear()
            self.total, self.rule, self.newest_ms = 0.0, (quota.limit, window_ms), now_ms
        self.newest_ms = now_ms = max(now_ms, self.newest_ms)
        self._append(amount, now_ms, window_ms)
        seconds = 1.0 if quota.algorithm == "producer_ids" else window_ms / 1000
        allowed = quota.limit * seconds
        ratio = self.total / allowed if allowed else math.inf if self.total > 0 else 0.0
        nearest = tally.bound is not None and (excess(tally.worst, tally.bound), tally.bound)
        if not nearest or (excess(ratio, bound), bound) >= nearest:
            tally.worst, tally.bound = ratio, bound
        tally.over += ratio > bound * (1 + ROUNDING) and amount > 0

    def refund(self, amount: float) -> None:
        """Subtract a refund from the newest amounts, as a bucket does."""
        while amount > 0 and self.amounts:
            at_ms, newest = self.amounts.pop()
            refunded = min(newest, amount)
            self.total, amount = self.total - refunded, amount - refunded
            if newest > refunded:
                self.amounts.append((at_ms, newest - refunded))

    def _append(self, amount: float, now_ms: int, window_ms: int) -> None:
        amounts = self.amounts
        before = amounts.pop()[1] if amounts and amounts[-1][0] == now_ms else 0.0
        amounts.append((now_ms, before + amount))
        self.total += amount
        while amounts and now_ms - amounts[0][0] >= window_ms:
            self.total -= amounts.popleft()[1]
        if len(amounts) == 1:
            self.total = amounts[0][1]  # removes rounding errors


def excess(ratio: float, bound: float) -> float:
    """A ratio divided by its bound.

    >>> excess(1.5, 2.0), excess(0.0, 0.0), excess(0.5, 0.0)
    (0.75, 0.0, inf)
    """
    if bound:
        return ratio / bound
    return math.inf if ratio > 0 else 0.0
