"""Holds: the units that a bucket sets aside for leases, whose holders decide without the store.

A lease takes units from each of its buckets. They count as used while the bucket holds them. Settling the
lease charges the spent units at that moment and frees the rest. Units of an unsettled lease count as spent at
its end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

from app.domain.quota import KEYS

MOST_HOLDS: Final = 64
"""The most leases that one bucket holds units for."""

LONGEST_LEASE_MS: Final = 10_000
"""The longest time that a lease may last."""


class Hold(NamedTuple):
    """The units that one lease holds in one bucket, in the limit's unit, until its end in milliseconds."""

    lease: bytes
    units: float
    ends_ms: int


Holds = tuple[Hold, ...]
"""The holds of a bucket, ordered by their ends."""


def held(holds: Holds) -> float:
    """The units of these holds, added from the last to the first, in the same order as in the script.

    >>> held((Hold(b"a", 2, 100), Hold(b"b", 3.5, 200)))
    5.5
    """
    units = 0.0
    for hold in reversed(holds):
        units += hold.units
    return units


def with_hold(holds: Holds, hold: Hold) -> Holds:
    """The holds with one more, placed after all holds that end no later."""
    before = sum(other.ends_ms <= hold.ends_ms for other in holds)
    return (*holds[:before], hold, *holds[before:])


def without(holds: Holds, lease: bytes) -> tuple[Hold | None, Holds]:
    """The hold of a lease, or None, and the other holds."""
    found = next((hold for hold in holds if hold.lease == lease), None)
    return found, tuple(hold for hold in holds if hold is not found)


def ended(holds: Holds, now_ms: int) -> tuple[Holds, Holds]:
    """The holds that ended by now, and the others.

    >>> [len(part) for part in ended((Hold(b"a", 2, 100), Hold(b"b", 3.5, 200)), 100)]
    [1, 1]
    """
    over = sum(hold.ends_ms <= now_ms for hold in holds)
    return holds[:over], holds[over:]


def moved(holds: Holds, by_ms: int) -> Holds:
    """The holds with their ends shifted."""
    return tuple(hold._replace(ends_ms=hold.ends_ms + by_ms) for hold in holds)


def slice_of(wish: float, free: float, capacity: float, holds: Holds) -> float:
    """The units that a bucket grants of a wish: the whole wish, or a whole number of units.

    They are at most the free units, an equal share of these among the existing leases and this one (at least
    1), and half of the capacity that is not held.

    >>> slice_of(1000, 80, 100, ()), slice_of(0.5, 80, 100, ()), slice_of(1000, 0.5, 100, ())
    (50, 0.5, 0)
    >>> slice_of(1000, 81, 100, (Hold(b"a", 2, 100),)), slice_of(1000, 1.5, 100, (Hold(b"a", 2, 100),))
    (40, 1)
    """
    share = max(1.0, free / (len(holds) + 1))
    most = min(free, share, (capacity - held(holds)) / 2)
    return wish if wish <= most else max(math.floor(most), 0)


PER_UNIT: Final[Mapping[str, float]] = {key.usage: key.per_unit for key in KEYS.values()}
"""The usage in one unit of the limit, by usage field: the same for all quota keys of a field."""


def granted_of(wish: Mapping[str, float], slices: Mapping[str, float]) -> dict[str, float]:
    """The granted part of a wish, by usage field.

    >>> granted_of({"requests": 5, "request_time_ms": 700, "fetch_bytes": 9}, {"request_time_ms": 3})
    {'requests': 5, 'request_time_ms': 30.0, 'fetch_bytes': 9}

    Args:
        slices: the least grant of any bucket of a field, in units of the limit; absent without a quota.
    """
    granted = {}
    for field, amount in wish.items():
        wished = amount / PER_UNIT[field]
        units = slices.get(field, wished)
        granted[field] = amount if units == wished else units * PER_UNIT[field]
    return granted
