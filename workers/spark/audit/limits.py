"""Whether limits by which was judged are those that stood: what the log's changes of quotas say of that.

Here is the rule, for one quota of one entity; ``stale`` runs it over a log.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from app.domain.quota import PRODUCER_BYTE_RATE, Quota
from app.domain.volumes import scaled

Value = float | None
"""A limit, or that there is none; NaN is one that nobody knows, which is held against no verdict."""

UNKNOWN: Final = math.nan
CLOSE_MS: Final = 1_000
"""Changes so close to each other are put in order by their versions: the clocks of nodes differ a little."""


class Change(NamedTuple):
    """What became of an entity's quotas: JSON objects by quota key, null where there were none."""

    at_ms: int
    version: int | None
    before: str | None
    after: str | None


class Factor(NamedTuple):
    """A throttle factor that a node began to apply, and the one before it; None before its first."""

    at_ms: int
    before: float | None
    after: float


class Use(NamedTuple):
    """A limit that a node judged by: in how many verdicts, the first and the last of them."""

    node: str
    limit: float
    verdicts: int
    first_ms: int
    last_ms: int


class Times(NamedTuple):
    """From when until when verdicts are looked at; how long around a change either side of it is right."""

    from_ms: float
    to_ms: float
    grace_ms: int


class Suspect(NamedTuple):
    """A time in which a limit did not stand, of a node that used it before and after, or then; what stood."""

    node: str
    limit: float
    from_ms: int
    to_ms: int
    exact: str


class Stood(NamedTuple):
    """What stood for a while; of several values any may have."""

    from_ms: float
    to_ms: float
    values: frozenset[Value]


def suspects(
    quota: str,
    uses: Sequence[Use],
    changes: Sequence[Change],
    factors: Mapping[str, Sequence[Factor]],
    times: Times,
) -> Iterator[Suspect]:
    """When the limits of one quota of one entity were not those that stood.

    Args:
        changes: of the entity; without any, the limit used most has to stand all along.
        factors: by node; one that is not there applied nobody knows which.
    """
    scales = quota == PRODUCER_BYTE_RATE
    applied = {use.node: _applied(factors.get(use.node)) if scales else _always(1.0) for use in uses}
    stood = _stood(quota, changes) if changes else _always(_most_used(uses, applied, times.grace_ms))
    for use in uses:
        right = _right(use.limit, stood, applied[use.node], times.grace_ms)
        first, last = max(use.first_ms, times.from_ms), min(use.last_ms, times.to_ms)
        for from_ms, to_ms in _outside(right, first, last):
            yield Suspect(use.node, use.limit, int(from_ms), int(to_ms), _named(stood, from_ms))


def _stood(quota: str, changes: Sequence[Change]) -> list[Stood]:
    """The limits that stood, by the changes of the entity.

    What a change found may be another limit than the one before it left, if the log lacks a change between
    them: either may have stood then.
    """
    ordered = _in_order(changes)
    none: frozenset[Value] = frozenset()
    left = [none, *(frozenset({_limit(change.after, quota)}) for change in ordered)]
    met = [*(frozenset({_limit(change.before, quota)}) for change in ordered), none]
    return _spans([change.at_ms for change in ordered], [a | b for a, b in zip(left, met, strict=True)])


def _applied(factors: Sequence[Factor] | None) -> list[Stood]:
    """The throttle factors that a node applied."""
    if not factors:
        return _always(UNKNOWN)
    ordered = sorted(factors, key=lambda one: one.at_ms)
    values = [ordered[0].before, *(factor.after for factor in ordered)]
    return _spans([factor.at_ms for factor in ordered], [frozenset({value}) for value in values])


def _spans(times: Sequence[int], values: Sequence[frozenset[Value]]) -> list[Stood]:
    return [
        Stood(from_ms, to_ms, stood)
        for from_ms, to_ms, stood in zip([-math.inf, *times], [*times, math.inf], values, strict=True)
    ]


def _always(value: Value) -> list[Stood]:
    return _spans([], [frozenset({value})])


def _in_order(changes: Sequence[Change]) -> list[Change]:
    near: list[list[Change]] = []
    for change in sorted(changes, key=lambda one: one.at_ms):
        if near and change.at_ms - near[-1][-1].at_ms <= CLOSE_MS:
            near[-1].append(change)
        else:
            near.append([change])
    return [change for some in near for change in sorted(some, key=lambda one: one.version or 0)]


def _limit(quotas: str | None, quota: str) -> Value:
    """The limit of a quota on one side of a change.

    >>> [_limit(said, "a") for said in ('{"a": {"limit": 5}}', '{"a": 6}', '{}', None, "no JSON")]
    [5.0, 6.0, None, None, nan]
    """
    if quotas is None:
        return None
    try:
        said = json.loads(quotas).get(quota)
        limit = said["limit"] if isinstance(said, dict) else said
        return None if limit is None else float(limit)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return UNKNOWN


def _most_used(uses: Sequence[Use], applied: Mapping[str, Sequence[Stood]], grace_ms: int) -> Value:
    """The limit that explains the most verdicts, as it is or under a factor that was applied."""
    votes: Counter[float] = Counter()
    for limit in {base for use in uses for base in _bases(use.limit, applied[use.node])}:
        for use in uses:
            right = _right(use.limit, _always(limit), applied[use.node], grace_ms)
            if not any(_outside(right, use.first_ms, use.last_ms)):
                votes[limit] += use.verdicts
    used = {use.limit for use in uses}
    return max(votes or used, key=lambda limit: (votes[limit], limit in used, limit))


def _bases(limit: float, applied: Sequence[Stood]) -> Iterator[float]:
    """What a limit may be without a factor; limits that a factor touches are whole numbers."""
    yield limit
    for factor in {value for stood in applied for value in stood.values}:
        if factor and math.isfinite(limit / factor):
            yield float(round(limit / factor))


def _right(
    limit: float, stood: Sequence[Stood], applied: Sequence[Stood], grace_ms: int
) -> list[tuple[float, float]]:
    """When a verdict may have had a limit, by what stood and the factors applied."""
    return [
        (max(one.from_ms, under.from_ms) - grace_ms, min(one.to_ms, under.to_ms) + grace_ms)
        for one in stood
        for under in applied
        if any(_makes(limit, base, factor) for base in one.values for factor in under.values)
    ]


def _makes(limit: float, base: Value, factor: Value) -> bool:
    """Whether a verdict may have a limit where another stood; none has to be touched by a factor.

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
    return scaled(Quota(PRODUCER_BYTE_RATE, base, "sampled_rate", "delay"), factor).limit == limit


def _outside(
    right: Sequence[tuple[float, float]], first_ms: float, last_ms: float
) -> Iterator[tuple[float, float]]:
    """The parts of a time, ends and all, that are in none of others.

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


def _named(stood: Sequence[Stood], at_ms: float) -> str:
    """What stood at a time, in words."""
    values = next(one.values for one in reversed(stood) if one.from_ms <= at_ms)
    return " or ".join(sorted("no limit" if value is None else f"limit {value:.12g}" for value in values))
