"""The demand of entities: how many of their asks needed which limit of a quota."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from workers.jobs.needs import Need, Needs
from workers.jobs.whatif.quota_form import THROTTLE
from workers.jobs.whatif.rows import LoggedAsk
from workers.jobs.whatif.slices import RowDecoder, RowSlice

DIGITS: Final = 3
"""The significant digits of counted needs, which are rounded up; this bounds the memory for each entity."""


@dataclass(slots=True)
class Demand:
    """The needs of one entity for one quota key.

    Attributes:
        entity: as it is spelled; where no entity can have the name (a network), the name of the bucket.
        needs: the number of asks by the limit that they needed, which may be a fraction of a whole limit.
        asks: their number.
        usage: the sum, in units of the limit; for producer ids, the number of new ids.
        first_ms, last_ms: the times of the first and the last ask.
        usage_after: the sum after the first ask, the second, the fourth, and so on.
    """

    entity: str
    needs: Counter[float] = field(default_factory=Counter)
    asks: int = 0
    usage: float = 0.0
    first_ms: int = 0
    last_ms: int = 0
    usage_after: list[float] = field(default_factory=list)

    @property
    def history_ms(self) -> int:
        """The time from the first ask to the last."""
        return self.last_ms - self.first_ms

    def add(self, need: Need) -> None:
        """Add an ask."""
        if not self.asks:
            self.first_ms = need.at_ms
        self.last_ms = max(self.last_ms, need.at_ms)
        self.asks += 1
        self.usage += need.usage
        if self.asks & (self.asks - 1) == 0:
            self.usage_after.append(self.usage)
        self.needs[rounded_up(need.limit)] += 1

    @property
    def late(self) -> tuple[float, int]:
        """The usage and the number of the last asks, half to three quarters of all: without the first ids."""
        if self.asks < 2:
            return self.usage, self.asks
        half = self.asks.bit_length() - 2
        return self.usage - self.usage_after[half], self.asks - (1 << half)

    def quantile(self, quantile: float) -> float:
        """The least limit under which at least this share of the asks is not held up.

        >>> Demand("user=a", Counter({1.0: 90, 5.0: 9, 80.0: 1}), 100).quantile(0.99)
        5.0
        """
        allowed = (1 - quantile) * self.asks + 1e-9
        held = 0
        above = 0.0
        for need, count in sorted(self.needs.items(), reverse=True):
            held += count
            above = need
            if held > allowed:
                break
        return above

    def held(self, limit: float) -> int:
        """The number of asks that needed more than a limit."""
        return sum(count for need, count in self.needs.items() if need > limit)


@dataclass(slots=True)
class Demands:
    """All demand of a period.

    Attributes:
        by_key: the demand of each entity, by quota key.
        asks: how many asks could be charged: all in modes admit and record.
        uncovered: how many of them no quota key of ``by_key`` limits.
        refused: how many of them the quotas of the log refused; their callers may have asked again.
    """

    by_key: dict[str, dict[str, Demand]] = field(default_factory=dict)
    asks: int = 0
    uncovered: int = 0
    refused: int = 0


def demands(slices: Iterable[RowSlice], needs: Needs, from_ms: int) -> Demands:
    """The demand in a log.

    Args:
        slices: its rows, as ``in_order`` gives them.
        needs: an empty replay, with a quota of each key that is measured.
        from_ms: asks before this time fill the buckets, and are not counted.
    """
    found = Demands()
    for row in RowDecoder().rows(slices):
        if not isinstance(row, LoggedAsk) or not _charges(row):
            continue
        mine = list(needs.of(row))
        if row.at_ms < from_ms:
            continue
        found.asks += 1
        found.uncovered += not mine
        found.refused += row.rank >= THROTTLE
        for need in mine:
            by_entity = found.by_key.setdefault(need.quota, {})
            entity = need.bucket.partition(";")[0]
            demand = by_entity.get(entity)
            if demand is None:
                demand = by_entity[entity] = Demand(entity)
            demand.add(need)
    return found


def _charges(ask: LoggedAsk) -> bool:
    """Whether an ask could be charged. Of a late call the decision was logged when it was answered."""
    return ask.kind == "decision" and not ask.replayed and ask.mode in {"admit", "record"}


def rounded_up(value: float) -> float:
    """A number with ``DIGITS`` significant digits that is not below this one, and at most 1 % above.

    >>> rounded_up(0.1), rounded_up(23.41), rounded_up(797), rounded_up(1_234_567)
    (0.1, 23.5, 797.0, 1240000.0)
    """
    if value <= 0 or not math.isfinite(value):
        return max(value, 0.0)
    places = DIGITS - 1 - math.floor(math.log10(value))
    scale = 10.0 ** abs(places)
    whole = math.ceil(value * scale if places >= 0 else value / scale)
    found = whole / scale if places >= 0 else whole * scale
    return found if found >= value else ((whole + 1) / scale if places >= 0 else (whole + 1) * scale)
