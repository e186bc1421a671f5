"""A sampled rate of which the log does not tell all: what is known of it until its rows explain it again."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from app.domain import sampled_rate
from app.domain.sampled_rate import Samples
from workers.spark.buckets import Asked

EQUAL: Final = 1e-9
"""What numbers may differ by that went through the store as text and through Parquet."""


class Told(NamedTuple):
    """A charge or a refund as the log tells of it."""

    at_ms: int
    usage: float
    is_refund: bool


@dataclass(slots=True)
class Unsure:
    """What happened since the bucket was last known.

    Attributes:
        stirred_ms: when there was last a charge that no row tells of, as far as was seen.
        looked_ms: when it was last tried to explain the bucket by what is told.
        units, seen_ms: what the last row showed, and when.
    """

    stirred_ms: int
    looked_ms: int
    told: deque[Told] = field(default_factory=deque)
    units: float | None = None
    seen_ms: int = 0

    def tell(self, row: Asked) -> None:
        """Note a row."""
        if charges(row) or row.mode == "refund":
            self.told.append(Told(row.at_ms, row.usage, row.mode == "refund"))
        while self.told and row.at_ms - self.told[0].at_ms > (row.samples + 2) * row.sample_ms:
            self.told.popleft()
        shown = shows(row)
        self.units, self.seen_ms = shown.units if shown else None, row.at_ms

    def grew(self, row: Asked) -> bool:
        """Whether the bucket holds more than before and this charge: samples that die only make it less."""
        shown = shows(row)
        if shown is None or self.units is None or row.samples == 1 or row.at_ms < self.seen_ms:
            return False
        if not exceeds(shown.units, self.units + (row.usage if charges(row) else 0.0)):
            return False
        self.stirred_ms = row.at_ms
        return True

    def has_rested(self, row: Asked) -> bool:
        """Whether all that is not known has died: a rate that rested for its span is as an absent one."""
        last_ms = max(self.told[-1].at_ms if self.told else self.stirred_ms, self.stirred_ms)
        return row.at_ms - last_ms >= sampled_rate.kept(row.samples) * row.sample_ms

    def states(self, row: Asked) -> Iterator[Samples]:
        """What the bucket holds if all of it was told, for each time at which that may have begun."""
        if row.at_ms - self.looked_ms < row.sample_ms:
            return
        self.looked_ms = row.at_ms
        for start_ms in starts(row):
            known = list(itertools.dropwhile(lambda one: one.at_ms != start_ms, self.told))  # noqa: B023
            if known:
                yield _replayed(known, row)


class Shown(NamedTuple):
    """What a bucket showed in a row: how many units, over which window."""

    units: float
    window_ms: int


def shows(row: Asked) -> Shown | None:
    """What the bucket showed; None if the row does not tell.

    ``remaining`` is what the limit allows over the window, less the units; ``observed`` is units by window.
    """
    if row.observed is None or row.remaining is None:
        return None
    spare = row.limit - row.observed
    if abs(spare) <= EQUAL * row.limit:
        return None
    window_ms = round(row.remaining * 1000 / spare)
    return Shown(row.observed * (window_ms / 1000), window_ms)


def starts(row: Asked) -> Iterator[int]:
    """When the oldest sample may have begun: the window that the bucket showed says how long ago."""
    shown = shows(row)
    for missing in range(row.samples if shown else 0):
        assert shown is not None
        yield row.at_ms - (shown.window_ms - missing * row.sample_ms)


def guesses(state: Samples, surplus: float, now_ms: int, row: Asked) -> Iterator[Samples]:
    """The state with a charge that no row tells of: made now, or when the window that is shown began."""
    if surplus > EQUAL:
        for at_ms in (now_ms, *starts(row)):
            if not state or state[-1].last_ms <= at_ms <= now_ms:
                yield sampled_rate.record(state, surplus, at_ms, row.samples, row.sample_ms)


def charges(row: Asked) -> bool:
    """Whether a row's usage was charged."""
    return row.mode in {"admit", "record"} and not row.is_refused


def exceeds(one: float, other: float) -> bool:
    """Whether a number is larger, and not by rounding."""
    return one > other + EQUAL * max(1.0, abs(other))


def _replayed(known: list[Told], row: Asked) -> Samples:
    state: Samples = ()
    for at_ms, usage, is_refund in known:
        if is_refund:
            state = sampled_rate.refund(state, usage)
        else:
            state = sampled_rate.record(state, usage, at_ms, row.samples, row.sample_ms)
    return state
