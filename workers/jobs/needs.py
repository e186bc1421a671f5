"""The limits that asks would have needed: a replay in which no quota refuses or delays anything.

For each ask and each quota that applies, this gives the least limit under which the ask would have been
admitted at once, after all earlier asks of the bucket had been admitted. A q-quantile of them, taken as the
limit, holds up about a share of 1 - q of the asks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from app.domain.ladder import MatchingRules, Quotas
from app.domain.oracle import key_of
from app.domain.quota import Quota
from app.domain.usage import usage_field
from workers.jobs.whatif.buckets import Bucket, Ids, Rate, new_bucket
from workers.jobs.whatif.matching import QuotaMatcher
from workers.jobs.whatif.quota_form import QuotaForm
from workers.jobs.whatif.rows import LoggedAsk, LoggedCaller


class Need(NamedTuple):
    """The limit that an ask needed of one quota.

    Attributes:
        entity: the entity on which the quota is set.
        bucket: the entity that the bucket belongs to.
        limit: in the key's unit; infinite if no limit admits the ask, as it is larger than a given burst.
        usage: in units of the limit; for producer ids, the number of new ids.
    """

    at_ms: int
    principal: str | None
    quota: str
    entity: str
    bucket: str
    limit: float
    usage: float


@dataclass(slots=True)
class TokenDemand:
    """The least refill rate under which a token bucket never ran dry.

    With a burst of ``span_s`` times the limit plus ``fixed`` units, the charges from any one on until now, C,
    must fit: C <= fixed + limit * (span_s + seconds since). The least such limit is the steepest line from a
    point of the past, on the lower hull of (time, sum before it), to the point of now.

    Attributes:
        hull: times in seconds and the sums charged before them.
    """

    span_s: float
    fixed: float
    total: float = 0.0
    hull: list[tuple[float, float]] = field(default_factory=list)

    def need(self, usage: float, at_ms: int) -> float:
        """Charge usage, and return the least limit for all charges that end with it."""
        now_s = at_ms / 1000
        if self.hull and now_s < self.hull[-1][0]:
            now_s = self.hull[-1][0]
        point = (now_s, self.total)
        hull = self.hull
        while len(hull) > 1 and _turn(hull[-2], hull[-1], point) <= 0:
            hull.pop()
        if not hull or hull[-1][0] < now_s:
            hull.append(point)
        self.total += usage
        if self.span_s == 0 and usage > self.fixed:
            return math.inf
        x, y = now_s + self.span_s, self.total - self.fixed
        low, high = 0, len(hull) - 1
        while low < high:  # the slope rises along the hull, up to the tangent
            middle = (low + high) // 2
            if _slope(hull[middle + 1], x, y) > _slope(hull[middle], x, y):
                low = middle + 1
            else:
                high = middle
        return max(_slope(hull[low], x, y), 0.0)


class _Planned(NamedTuple):
    """A quota that applies to a caller."""

    quota: Quota
    entity: str
    name: str
    bucket: Bucket | TokenDemand
    form: QuotaForm
    place: int
    per_unit: float


@dataclass(slots=True)
class Needs:
    """Replays asks under quotas that refuse nothing.

    Attributes:
        quotas: say which keys are measured, and how: algorithm, samples, window and scope count, limits do
            not. The burst of a token bucket counts if it is not the default, which follows from the limit.
    """

    quotas: Quotas
    rules: MatchingRules
    max_ids: int = 1_000_000
    buckets: dict[tuple[object, ...], Bucket | TokenDemand] = field(default_factory=dict)
    _matcher: QuotaMatcher = field(init=False)

    def __post_init__(self) -> None:
        self._matcher = QuotaMatcher(self.quotas, self.rules)

    def of(self, ask: LoggedAsk) -> Iterator[Need]:
        """Charge an ask, and give the limit that it needed of each quota; peeks and refunds need none."""
        if ask.kind not in {"decision", "late"} or ask.replayed or ask.mode not in {"admit", "record"}:
            return
        if ask.kind == "late":  # its decision was logged, and charged here, as it was answered
            return
        at_ms = ask.at_ms
        for quota, entity, name, bucket, form, place, per_unit in ask.caller.plan or self._plan(ask.caller):
            if isinstance(bucket, Ids):
                usage: float = len(bucket.unseen(form, at_ms, ask.ids))
                bucket.charge(form, len(ask.ids), at_ms, ask.ids)
                if not ask.ids:
                    continue
                limit: float = bucket.shows(form, at_ms)[0] if usage else 0
            else:
                usage = ask.amounts[place] / per_unit
                if isinstance(bucket, Rate):
                    bucket.charge(form, usage, at_ms)
                    limit = bucket.shown(form, at_ms)
                    if form.is_deny:
                        limit = max(limit, usage / (form.full_ms / 1000)) if usage else 0.0
                else:
                    assert isinstance(bucket, TokenDemand)
                    limit = bucket.need(usage, at_ms)
            yield Need(at_ms, ask.caller.principal, quota.key, entity, name, limit, usage)

    def _plan(self, caller: LoggedCaller) -> list[_Planned]:
        plan = []
        for applied, _ in self._matcher.matches(caller):
            quota, key = applied.quota, key_of(applied)
            free = replace(quota, limit=math.inf, max_debt=math.inf)
            found = self.buckets.get(key)
            if found is None:
                found = self.buckets[key] = _unlimited(quota, free, self.max_ids)
            field_, per_unit = usage_field(quota) if quota.algorithm != "producer_ids" else ("", 1.0)
            place = caller.fields.index(field_) if field_ else -1
            form = QuotaForm(free, quota.enforcement)
            plan.append(_Planned(quota, applied.entity, applied.bucket, found, form, place, per_unit))
        caller.plan = plan
        return plan


def _unlimited(quota: Quota, free: Quota, max_ids: int) -> Bucket | TokenDemand:
    if quota.algorithm != "token_bucket":
        return new_bucket(free, max_ids)
    span_s = quota.samples * quota.sample_ms / 1000
    is_default = not quota.limit or math.isclose(quota.burst, span_s * quota.limit)
    return TokenDemand(span_s, 0.0) if is_default else TokenDemand(0.0, quota.burst)


def _turn(one: tuple[float, float], two: tuple[float, float], three: tuple[float, float]) -> float:
    """Above 0 if the way over three points turns left."""
    return (two[0] - one[0]) * (three[1] - one[1]) - (two[1] - one[1]) * (three[0] - one[0])


def _slope(point: tuple[float, float], x: float, y: float) -> float:
    """The slope from a point to (x, y); at the same time, infinitely steep if y is higher."""
    if x == point[0]:
        return math.inf if y > point[1] else -math.inf
    return (y - point[1]) / (x - point[0])
