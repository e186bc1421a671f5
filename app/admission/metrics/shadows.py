"""Counts of shadow quotas: what each would have said of the asks that went ahead.

A decision adds one to a counter; the counters wait here until they are written to the store. There is one
entry for each shadow quota that was asked since then, so their number follows from the catalog and not from
the names of callers.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from app.store.compiled_quota import ShadowPeriod
from app.store.shadow_counts import OUTCOMES, ShadowCount

_PLACES: Final = {outcome: place for place, outcome in enumerate(OUTCOMES)}


class ShadowTally:
    """Counts the verdicts of shadow quotas, until they are taken."""

    def __init__(self) -> None:
        self._counts: dict[ShadowPeriod, list[int]] = {}

    def add(self, period: ShadowPeriod, outcome: str) -> None:
        """Count a verdict."""
        counts = self._counts.get(period)
        if counts is None:
            counts = self._counts[period] = [0] * len(OUTCOMES)
        counts[_PLACES[outcome]] += 1

    def take(self, most: int) -> list[ShadowCount]:
        """Return the counts of the quotas that wait longest, and forget them."""
        return [(period, self._counts.pop(period)) for period in [*islice(self._counts, most)]]
