"""The most throttled buckets, in bounded memory, whatever names callers make up.

The rule is Misra and Gries' (1982): each bucket has a weight, which an ask raises by one. A new bucket that
finds no room lowers all weights by one, and those at 0 leave. So a bucket with more than 1 in ``KEPT`` of
all throttled asks is always there, even if a caller asks under a new name each time. An ask costs constant
time on average, since each lowering was paid for by an ask that raised the weight.

The counts of a bucket are true from when it came in. With at most ``KEPT`` buckets they are all there is.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest
from typing import Final

from app.store.samples import ThrottledBucket

KEPT: Final = 256


class Tally:
    """Counts throttled asks by bucket, until they are taken."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}
        """Weight, number of asks, and sum of their throttle times in ms, by quota and bucket."""

    def add(self, quota: str, bucket: str, throttle_ms: int) -> None:
        """Count an ask that a bucket throttled."""
        found = self._counts.get((quota, bucket))
        if found is not None:
            found[0] += 1
            found[1] += 1
            found[2] += throttle_ms
        elif len(self._counts) < KEPT:
            self._counts[quota, bucket] = [1, 1, throttle_ms]
        else:
            self._lower()

    def take(self, most: int) -> list[ThrottledBucket]:
        """Return the most throttled buckets, the first ones most, and begin anew."""
        counts, self._counts = self._counts, {}
        return top((ThrottledBucket(*names, *numbers[1:]) for names, numbers in counts.items()), most)

    def _lower(self) -> None:
        for numbers in self._counts.values():
            numbers[0] -= 1
        self._counts = {names: numbers for names, numbers in self._counts.items() if numbers[0]}


def top(buckets: Iterable[ThrottledBucket], most: int) -> list[ThrottledBucket]:
    """Return the buckets that throttled most asks, the first ones most."""
    return nlargest(most, buckets, key=lambda each: (each.asks, each.throttle_ms))
