"""Checks that nodes decided by the limits in force, as given by the changes of quotas in the log.

Within a grace period around a change both limits are right. This module checks one quota of one entity in
plain Python; ``stale_limits`` applies the check to a log.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from app.domain.quota import PRODUCER_BYTE_RATE, Quota
from app.domain.volumes import scaled_quota

Value = float | None
"""A limit or a throttle factor. None means no limit; NaN is unknown, and fits every verdict."""

UNKNOWN: Final = math.nan
CLOSE_MS: Final = 1_000
"""Changes this close to each other are ordered by version, as the clocks of nodes differ a little."""


class LimitChange(NamedTuple):
    """A change of an entity's quotas, before and after: JSON objects by quota key, None without quotas."""

    at_ms: int
    version: int | None
    before: str | None
    after: str | None


class FactorChange(NamedTuple):
    """A throttle factor that a node began to apply, and the factor before it (None for the first)."""

    at_ms: int
    before: float | None
    after: float


class LimitUse(NamedTuple):
    """A limit that a node used: in how many verdicts, and the times of the first and the last."""

    node: str
    limit: float
    verdicts: int
    first_ms: int
    last_ms: int


class JudgedPeriod(NamedTuple):
    """The times between which verdicts are checked, and the grace period around a change."""

    from_ms: float
    to_ms: float
    grace_ms: int


class StaleLimit(NamedTuple):
    """A span in which a node used a limit that was not in force; ``exact`` names the limit in force."""

    node: str
    limit: float
    from_ms: int
    to_ms: int
    exact: str


class ValueSpan(NamedTuple):
    """A span of time, and the values that were possibly in force."""

    from_ms: float
    to_ms: float
    values: frozenset[Value]


def stale_limits(
    quota: str,
    uses: Sequence[LimitUse],
    changes: Sequence[LimitChange],
    factors: Mapping[str, Sequence[FactorChange]],
    times: JudgedPeriod,
) -> Iterator[StaleLimit]:
    """The spans in which the limits of one quota of one entity were not in force.

    Args:
        changes: of the entity; without any, the limit used most must have been in force all the time.
        factors: by node; the factors of other nodes are unknown.
    """
    scales = quota == PRODUCER_BYTE_RATE
    applied = {use.node: _applied(factors.get(use.node)) if scales else _always(1.0) for use in uses}
    in_force = _limits(quota, changes) if changes else _always(_most_used(uses, applied, times.grace_ms))
    for use in uses:
        right = _right(use.limit, in_force, applied[use.node], times.grace_ms)
        first, last = max(use.first_ms, times.from_ms), min(use.last_ms, times.to_ms)
        for from_ms, to_ms in _outside(right, first, last):
            yield StaleLimit(use.node, use.limit, int(from_ms), int(to_ms), _named(in_force, from_ms))


def _limits(quota: str, changes: Sequence[LimitChange]) -> list[ValueSpan]:
    """The limits in force, by the changes of the entity.

    If the log lacks a change, the limit after one change differs from the limit before the next: then both
    are possible in between.
    """
    ordered = _in_order(changes)
    after = [{_limit(change.after, quota)} for change in ordered]
    before = [{_limit(change.before, quota)} for change in ordered]
    values = [frozenset(a | b) for a, b in zip([set(), *after], [*before, set()], strict=True)]
    return _spans([change.at_ms for change in ordered], values)


def _applied(factors: Sequence[FactorChange] | None) -> list[ValueSpan]:
    """The throttle factors in force on a node."""
    if not factors:
        return _always(UNKNOWN)
    ordered = sorted(factors, key=lambda one: one.at_ms)
    values = [ordered[0].before, *(factor.after for factor in ordered)]
    return _spans([factor.at_ms for factor in ordered], [frozenset({value}) for value in values])


def _spans(times: Sequence[int], values: Sequence[frozenset[Value]]) -> list[ValueSpan]:
    return [ValueSpan(*span) for span in zip([-math.inf, *times], [*times, math.inf], values, strict=True)]


def _always(value: Value) -> list[ValueSpan]:
    return _spans([], [frozenset({value})])


def _in_order(changes: Sequence[LimitChange]) -> list[LimitChange]:
    near: list[list[LimitChange]] = []
    for change in sorted(changes, key=lambda one: one.at_ms):
        if near and change.at_ms - near[-1][-1].at_ms <= CLOSE_MS:
            near[-1].append(change)
        else:
            near.append([change])
    return [change for some in near for change in sorted(some, key=lambda one: one.version or 0)]


def _limit(quotas: str | None, quota: str) -> Value:
    """The limit of a quota on one side of a change.

    >>> [_limit(quotas, "a") for quotas in ('{"a": {"limit": 5}}', '{"a": 6}', '{}', None, "not JSON")]
    [5.0, 6.0, None, None, nan]
    """
    if quotas is None:
        return None
    try:
        value = json.loads(quotas).get(quota)
        limit = value["limit"] if isinstance(value, dict) else value
        return None if limit is None else float(limit)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return UNKNOWN


def _most_used(uses: Sequence[LimitUse], applied: Mapping[str, Sequence[ValueSpan]], grace_ms: int) -> Value:
    """The limit that explains the most verdicts, by itself or with a throttle factor."""
    votes: Counter[float] = Counter()
    for limit in {base for use in uses for base in _bases(use.limit, applied[use.node])}:
        for use in uses:
            right = _right(use.limit, _always(limit), applied[use.node], grace_ms)
            if not any(_outside(right, use.first_ms, use.last_ms)):
                votes[limit] += use.verdicts
    used = {use.limit for use in uses}
    return max(votes or used, key=lambda limit: (votes[limit], limit in used, limit))


def _bases(limit: float, applied: Sequence[ValueSpan]) -> Iterator[float]:
    """The limits that may give this one, with or without a factor; factors apply to whole numbers only."""
    yield limit
    for factor in {value for span in applied for value in span.values}:
        if factor and math.isfinite(limit / factor):
            yield float(round(limit / factor))


def _right(
    limit: float, in_force: Sequence[ValueSpan], applied: Sequence[ValueSpan], grace_ms: int
) -> list[tuple[float, float]]:
    """The spans in which a verdict may have this limit, given the limits and factors in force."""
    return [
        (max(one.from_ms, under.from_ms) - grace_ms, min(one.to_ms, under.to_ms) + grace_ms)
        for one in in_force
        for under in applied
        if any(_makes(limit, base, factor) for base in one.values for factor in under.values)
    ]


def _makes(limit: float, base: Value, factor: Value) -> bool:
    """Whether a verdict may have a limit, given a base limit and a factor, which may or may not be applied.

    >>> _makes(5.0, 10.0, 0.5), _makes(10.0, 10.0, 0.5), _makes(6.0, 10.0, 0.5), _makes(6.0, 10.0, UNKNOWN)
    (True, True, False, True)
    """
    if base is None:
        return False
    if math.isnan(base) or base == limit:
        return True
    if not factor:
        return False
    if math.isnan(factor):
        return 0 < limit < base
    return scaled_quota(Quota(PRODUCER_BYTE_RATE, base, "sampled_rate", "delay"), factor).limit == limit


def _outside(
    right: Sequence[tuple[float, float]], first_ms: float, last_ms: float
) -> Iterator[tuple[float, float]]:
    """The parts of a span, with both ends, that no span of ``right`` covers.

    >>> list(_outside([(4, 6), (5, 7), (20, 30)], 1, 25)), list(_outside([(9, 8), (0, 9)], 1, 9))
    ([(1, 3), (8, 19)], [])
    """
    for from_ms, to_ms in sorted(span for span in right if span[0] <= span[1]):
        if from_ms > last_ms:
            break
        if from_ms > first_ms:
            yield first_ms, from_ms - 1
        first_ms = max(first_ms, to_ms + 1)
    if first_ms <= last_ms:
        yield first_ms, last_ms


def _named(in_force: Sequence[ValueSpan], at_ms: float) -> str:
    """The limit in force at a time, in words."""
    values = next(one.values for one in reversed(in_force) if one.from_ms <= at_ms)
    return " or ".join(sorted("no limit" if value is None else f"limit {value:.12g}" for value in values))
