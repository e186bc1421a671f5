"""The arithmetic of the benchmark: percentiles, the moments of an open loop, the best of several rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final

NS: Final = 1_000_000_000

Histogram = Sequence[tuple[int, int]]
"""Ascending upper bounds in nanoseconds, each with the number of values above the previous bound and at or
below this one."""


def percentile(histogram: Histogram, share: float) -> int:
    """The least bound that at least this share of all values does not exceed; 0 without values.

    >>> percentile([(10, 98), (20, 1), (90, 1)], 0.99)
    20
    """
    total = sum(count for _, count in histogram)
    passed = 0
    for bound, count in histogram:
        passed += count
        if passed >= share * total:
            return bound
    return 0


def merged(histograms: Iterable[Histogram]) -> list[tuple[int, int]]:
    """One histogram with the values of several."""
    counts: Counter[int] = Counter()
    for histogram in histograms:
        for bound, count in histogram:
            counts[bound] += count
    return sorted(counts.items())


def moments(rate: float, seconds: float) -> list[int]:
    """Due times of requests, in nanoseconds from the start: `rate` a second, evenly spaced.

    >>> moments(4, 1)
    [0, 250000000, 500000000, 750000000]
    """
    return [round(number * NS / rate) for number in range(round(rate * seconds))]


def best_ratio(echoes: Sequence[float], works: Sequence[float]) -> float:
    """Decisions for the processor time of one echo: the least time of an echo over the least of a decision.

    A disturbance only adds time, so the least of several rounds is nearest to the undisturbed figure. The
    best of the pairs' own ratios would prefer the round whose echo was disturbed most.
    """
    return min(echoes) / min(works)


def usual_ratio(echoes: Sequence[float], works: Sequence[float]) -> float:
    """The median over the rounds of each work's ratio to the echo of its own round."""
    return median(echo / work for echo, work in zip(echoes, works, strict=True))
