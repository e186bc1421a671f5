"""The names of the audit's findings, and tests of whether falsely seen ids are too many for chance."""

from __future__ import annotations

import math
from typing import Final

from app.domain.shape import FALSE_SEEN

IMPROBABLE: Final = 1e-6
"""A bound on a probability is broken if the result is less likely than this: one in a million audits."""

FALSELY_SEEN: Final = "more new ids taken as seen than 1 in 10,000"
OVER: Final = "more admitted than the bound"
DIFFERS: Final = "verdicts that are not the exact ones"
LOST: Final = "charges lost"
UNLIKELY: Final = "new ids of one ask taken as seen, as chance does not"
ALTERED: Final = "charges that are not those of their rows"
UNTOLD: Final = "more charged than the rows tell of"
STALE: Final = "limits that did not stand"
CONTRADICTS: Final = "rows that contradict themselves"
CLOCK: Final = "a clock that was shifted"
SAME_ORDER: Final = "two rows in one place of the store's order"
MISSING: Final = "rows are missing from the log"
ABSENT: Final = "a node is missing from the log"
GAPS: Final = "rows are missing inside of batches"
ADDED: Final = "rows that their batch did not have"
TWICE: Final = "two different rows for one identity"
NOTHING: Final = "nothing was judged"
OLDER: Final = frozenset({FALSELY_SEEN, UNLIKELY, UNTOLD})
"""The findings that appear wrongly if buckets are older than a log that is taken as complete."""


def improbable(falsely_seen: int, lookups: int) -> bool:
    """Whether so many new ids taken as seen contradict the design's probability of 1e-4 each.

    >>> improbable(1, 100), improbable(3, 10_000), improbable(5, 1_000), improbable(0, 0)
    (False, False, True, False)
    """
    expected = FALSE_SEEN * lookups
    return falsely_seen > expected and at_least(falsely_seen, expected) < IMPROBABLE


def unlikely(falsely_seen: int, lookups: int, asks: int) -> bool:
    """Whether so many of one ask's new ids taken as seen contradict the design's probability of 1e-4 each.

    Args:
        asks: how many asks there are: any of them could have had these ids.

    >>> unlikely(1, 1, 10), unlikely(2, 2, 10), unlikely(2, 2, 1_000), unlikely(4, 5, 10**6)
    (False, True, False, True)
    """
    return falsely_seen > 1 and at_least(falsely_seen, FALSE_SEEN * lookups) * asks < IMPROBABLE


def at_least(times: int, expected: float) -> float:
    """The probability of at least so many rare events, given the expected number (Poisson).

    >>> round(at_least(1, 0.5), 4), round(at_least(3, 0.1), 7)
    (0.3935, 0.0001547)
    """
    if expected <= 0:
        return 0.0
    term = math.exp(-expected + times * math.log(expected) - math.lgamma(times + 1))
    probability, more = 0.0, times
    while term > probability * 1e-12:
        probability += term
        more += 1
        term *= expected / more
    return probability
