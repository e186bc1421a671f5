"""A sampled rate whose state does not follow from the log: partial knowledge until it is known again.

The log may lack charges of the bucket. Its samples are known again once they have all expired, or once the
charges in the log alone explain the shown numbers.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from app.domain import sampled_rate
from app.domain.sampled_rate import Samples
from workers.jobs.verdicts import BucketRow

EQUAL: Final = 1e-9
"""The allowed difference of numbers: they went through the store as text and through Parquet."""


class LoggedCharge(NamedTuple):
    """A charge or a refund in the log."""

    at_ms: int
    usage: float
    is_refund: bool


@dataclass(slots=True)
class UncertainRate:
    """The events since the state was last known.

    Attributes:
        unlogged_ms: when the bucket last showed a charge that the log does not have.
        tried_ms: when the logged charges were last tried as an explanation.
        units, shown_ms: the units that the last row showed, and its time.
    """

    unlogged_ms: int
    tried_ms: int
    charges: deque[LoggedCharge] = field(default_factory=deque)
    units: float | None = None
    shown_ms: int = 0

    def add(self, row: BucketRow) -> None:
        """Keep the charge or refund of a row; the units that its bucket shows replace the last ones."""
        if row.is_charged or row.mode == "refund":
            self.charges.append(LoggedCharge(row.at_ms, row.usage, row.mode == "refund"))
        while self.charges and row.at_ms - self.charges[0].at_ms > (row.samples + 2) * row.sample_ms:
            self.charges.popleft()
        shown = observed_units(row)
        self.units, self.shown_ms = shown.units if shown else None, row.at_ms

    def has_unlogged_charge(self, row: BucketRow) -> bool:
        """Whether the bucket grew by more than this row's charge; expiring samples only shrink it."""
        shown = observed_units(row)
        if shown is None or self.units is None or row.samples == 1 or row.at_ms < self.shown_ms:
            return False
        if not exceeds(shown.units, self.units + (row.usage if row.is_charged else 0.0)):
            return False
        self.unlogged_ms = row.at_ms
        return True

    def has_expired(self, row: BucketRow) -> bool:
        """Whether all samples have expired, so that the bucket is empty."""
        last_ms = max(self.charges[-1].at_ms if self.charges else self.unlogged_ms, self.unlogged_ms)
        return row.at_ms - last_ms >= sampled_rate.kept_samples(row.samples) * row.sample_ms

    def states(self, row: BucketRow) -> Iterator[Samples]:
        """The states by the logged charges, one for each possible start of the oldest sample."""
        if row.at_ms - self.tried_ms < row.sample_ms:
            return
        self.tried_ms = row.at_ms
        for start_ms in oldest_starts(row):
            known = list(itertools.dropwhile(lambda one: one.at_ms != start_ms, self.charges))  # noqa: B023
            if known:
                yield _replayed(known, row)


class ObservedUnits(NamedTuple):
    """The units that a bucket showed in one row of the log, and the window of the measurement."""

    units: float
    window_ms: int


def observed_units(row: BucketRow) -> ObservedUnits | None:
    """The units and the window that the bucket showed; None if they do not follow from the row.

    ``observed`` is the units divided by the window; ``remaining`` is the limit times the window, less the
    units.
    """
    if row.observed is None or row.remaining is None:
        return None
    spare = row.limit - row.observed
    if abs(spare) <= EQUAL * row.limit:
        return None
    window_ms = round(row.remaining * 1000 / spare)
    return ObservedUnits(row.observed * (window_ms / 1000), window_ms)


def oldest_starts(row: BucketRow) -> Iterator[int]:
    """The possible starts of the oldest sample, given the window that the bucket showed."""
    if shown := observed_units(row):
        for missing in range(row.samples):
            yield row.at_ms - (shown.window_ms - missing * row.sample_ms)


def guesses(state: Samples, surplus: float, now_ms: int, row: BucketRow) -> Iterator[Samples]:
    """The state with one unlogged charge, made now or at a possible start of the oldest sample."""
    if surplus > EQUAL:
        for at_ms in (now_ms, *oldest_starts(row)):
            if not state or state[-1].last_ms <= at_ms <= now_ms:
                yield sampled_rate.record(state, surplus, at_ms, row.samples, row.sample_ms)


def exceeds(one: float, other: float) -> bool:
    """Whether a number is larger than another by more than rounding."""
    return one > other + EQUAL * max(1.0, abs(other))


def _replayed(charges: list[LoggedCharge], row: BucketRow) -> Samples:
    state: Samples = ()
    for at_ms, usage, is_refund in charges:
        if is_refund:
            state = sampled_rate.refund(state, usage)
        else:
            state = sampled_rate.record(state, usage, at_ms, row.samples, row.sample_ms)
    return state
