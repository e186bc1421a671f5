"""Chooses limits from demand: a default for the many, own limits for the few, and outliers apart.

A limit rests on a need: the quantile of the limits that an entity's asks needed. The default rests on the
need that most entities do not exceed. Each of the others gets a limit of its own, unless it is an outlier:

- by its peers: it needs several times as much as the entities of nearest traffic let expect. An entity's own
  history is no argument, however long it is.
- by new producer ids: every fourth of its asks, or more, brings in a new one, and there are many.

Outliers get no limit of their own for any key, so the defaults hold them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal, NamedTuple, Self

from app.domain.entity import Entity
from app.domain.errors import EntityError
from app.domain.quota import CONNECTION_CREATION_RATE, KEYS, MAX_PRODUCER_IDS, PRODUCER_IDS_RATE
from workers.jobs.recommend.demand import Demand, rounded_up

COMPARED: Final = frozenset({"user=*", "ip=*"})
"""The default entities whose entities are compared with each other; listeners are few, and no tenants."""

MANY: Final = 0.95
"""The share of entities that the default is for."""

PEERS: Final = 15
"""The number of entities that an entity is compared with: those of nearest traffic."""

GROWTH: Final = 0.75
GROWTH_OF: Final = {PRODUCER_IDS_RATE: 0.5, CONNECTION_CREATION_RATE: 0.0}
"""The power of an entity's traffic with which its need may grow beyond the needs of its peers. More traffic
has flatter bursts, and comes from the same producers. Connections are no excuse for more connections."""

FEWEST_PEERS: Final = 3
"""The fewest peers: an entity with fewer is no outlier by comparison."""

ABNORMAL: Final = 5.0
ABNORMAL_IDS: Final = 10.0
"""The need of an outlier, in needs of its peers. Of new producer ids a principal may bring many at first, for
all its producers."""

SPREADS: Final = 4.0
"""If needs differ widely, an outlier is beyond so many standard deviations of their logarithms. Beyond three
is by chance one of 740 entities, and beyond four one of 32,000."""

DEVIATION: Final = 1.4826
"""The standard deviation of a normal distribution, in median absolute deviations."""

LATE_IDS: Final = 16
LATE_IDS_OF_AN_ASK: Final = 0.05
"""The fewest late new ids of a principal that loops, in all and per ask; more traffic excuses none."""

LOOPING_IDS: Final = 2.0
LOOPING_IDS_OF_AN_ASK: Final = 0.5
"""The need of an outlier that loops, in needs of its peers, if it brings in so many late with an ask."""

LOOPING_POWER: Final = math.log(ABNORMAL_IDS / LOOPING_IDS, LOOPING_IDS_OF_AN_ASK / LATE_IDS_OF_AN_ASK)
"""The power with which that need falls, from ``ABNORMAL_IDS`` on, as new ids come more often."""

MANY_IDS: Final = 100
MANY_IDS_OF_AN_ASK: Final = 0.25
"""An entity with so many new ids, and so many late ones per ask, is an outlier whatever its peers do."""

LEAST_COMPARED: Final = {CONNECTION_CREATION_RATE: 0.4}
"""Smaller needs do not differ in a comparison. Needs are compared as rates: of whole limits, most addresses
need 1 and a storm 3, which hides how far they are apart."""

MOST_OF_NEED: Final = 1.5
"""The most that a whole limit is of the need, unless more headroom is asked for: 1 stays 1, 2 becomes 3."""

DAY_MS: Final = 86_400_000
Confidence = Literal["low", "medium", "high"]
KNOWN_AFTER_MS: Final[Mapping[Confidence, int]] = {"high": 7 * DAY_MS, "medium": DAY_MS}
"""The history that a confidence needs: a week has every weekday, and a day every hour."""


@dataclass(frozen=True, slots=True)
class Basis:
    """The demands on a recommendation.

    Attributes:
        quantile: the share of an entity's asks that its limit must not hold up.
        headroom: the part of the need that is added to it.
        max_ids: ids remembered for each principal, which bounds the limit of new ones.
    """

    quantile: float
    headroom: float
    max_ids: int = 1_000_000


class Limit(NamedTuple):
    """A recommended limit.

    Attributes:
        need: the need that it rests on.
        entities: how many it is for.
        asks: their asks in the period.
        held: how many of these needed more than the limit.
        history_ms: the longest time from the first to the last ask of one of them.
    """

    entity: str
    limit: float
    need: float
    entities: int
    asks: int
    held: int
    history_ms: int
    confidence: Confidence


class Outlier(NamedTuple):
    """An entity that gets no limit of its own.

    Attributes:
        typical: the need that its peers let expect; None if there are too few peers.
        ids_of_an_ask: how many new producer ids it brings in with an ask; None for other keys.
        held: how many asks needed more than the default.
    """

    entity: str
    need: float
    typical: float | None
    ids_of_an_ask: float | None
    asks: int
    held: int
    history_ms: int

    @property
    def times_typical(self) -> float | None:
        """Its need, as a multiple of the typical need of its peers."""
        return None if self.typical is None else self.need / self.typical


class KeyLimits(NamedTuple):
    """The recommendation for a quota key.

    Attributes:
        default: None if all entities are outliers.
        own: limits of single entities, the largest first.
        outliers: entities that the default holds up, most abnormal first.
        entities, asks: the number of all entities, and of their asks.
        is_compared: there are enough entities to find outliers by their peers.
    """

    quota: str
    default: Limit | None
    own: Sequence[Limit]
    outliers: Sequence[Outlier]
    entities: int
    asks: int
    is_compared: bool


def recommended(
    demands: Mapping[str, Mapping[str, Demand]], defaults: Mapping[str, str], basis: Basis
) -> list[KeyLimits]:
    """The limits of each quota key that an ask needs.

    Args:
        demands: of each entity, by quota key.
        defaults: the default entity of each quota key; all entities of the key have its type.
    """
    found = [
        _Judged.of(key, defaults[key], demands[key].values(), basis) for key in defaults if key in demands
    ]
    judged = [each for each in found if each.needs]
    named: set[str] = set()
    while True:  # without them the defaults may be lower, and hold up more
        limits = [each.limits(named, basis) for each in judged]
        outliers = {outlier.entity for each in limits for outlier in each.outliers}
        if outliers <= named:
            return limits
        named |= outliers


@dataclass(frozen=True, slots=True)
class _Judged:
    """The needs of a quota key.

    Attributes:
        needs: of each entity that needs any limit, as a rate.
        typical: the needs that their peers let expect, as far as there are enough peers.
        abnormal: the entities that need too much.
    """

    quota: str
    default: str
    needs: Sequence[tuple[Demand, float]]
    typical: Mapping[str, float]
    abnormal: AbstractSet[str]

    @classmethod
    def of(cls, quota: str, default: str, demands: Iterable[Demand], basis: Basis) -> Self:
        quantiles = ((demand, demand.quantile(basis.quantile)) for demand in demands)
        needs = [(demand, need) for demand, need in quantiles if need > 0]
        least = LEAST_COMPARED.get(quota, 0.0)
        compared = [(demand, max(need, least)) for demand, need in needs]
        typical, abnormal = _compared(quota, compared) if default in COMPARED else ({}, set())
        if quota == PRODUCER_IDS_RATE:
            abnormal |= {
                demand.entity
                for demand, _ in needs
                if demand.usage >= MANY_IDS and late_ids_of_an_ask(demand) >= MANY_IDS_OF_AN_ASK
            }
        return cls(quota, default, needs, typical, abnormal)

    def limits(self, named: AbstractSet[str], basis: Basis) -> KeyLimits:
        """The limits.

        Args:
            named: outliers for any key. They get no limit, and count for the default only if all others are
                abnormal here.
        """
        is_whole = KEYS[self.quota].integer_limit
        by_need = sorted(
            (
                (demand, math.ceil(need) if is_whole else need)
                for demand, need in self.needs
                if demand.entity not in self.abnormal
            ),
            key=lambda one: one[1],
        )
        normal = [one for one in by_need if one[0].entity not in named] or by_need
        default = _default(self.quota, self.default, normal, basis)
        most = default.limit if default is not None else 0.0
        outliers = [
            Outlier(
                demand.entity,
                need,
                self.typical.get(demand.entity),
                late_ids_of_an_ask(demand) if self.quota == PRODUCER_IDS_RATE else None,
                demand.asks,
                demand.held(most),
                demand.history_ms,
            )
            for demand, need in self.needs
            if demand.entity in self.abnormal and need > most
        ]
        outliers.sort(key=lambda one: (-(one.times_typical or math.inf), one.entity))
        own = [
            _limit(self.quota, demand.entity, need, [demand], basis)
            for demand, need in reversed(normal)
            if default is not None
            and need > default.need
            and demand.entity not in named
            and _is_settable(demand.entity)
        ]
        asks = sum(demand.asks for demand, _ in self.needs)
        is_compared = self.default not in COMPARED or len(self.needs) > FEWEST_PEERS
        return KeyLimits(self.quota, default, own, outliers, len(self.needs), asks, is_compared)


def _default(quota: str, entity: str, normal: Sequence[tuple[Demand, float]], basis: Basis) -> Limit | None:
    """The limit for the many.

    Args:
        normal: all entities without the outliers, by need.
    """
    if not normal:
        return None
    need = normal[math.floor(MANY * (len(normal) - 1))][1]
    # a network, or a name that is too long, cannot have a limit of its own
    need = max([need, *(need for demand, need in normal if not _is_settable(demand.entity))])
    return _limit(quota, entity, need, [demand for demand, least in normal if least <= need], basis)


def _limit(quota: str, entity: str, need: float, demands: Sequence[Demand], basis: Basis) -> Limit:
    limit = with_headroom(quota, need, basis)
    asks = sum(demand.asks for demand in demands)
    history_ms = max(demand.history_ms for demand in demands)
    return Limit(
        entity,
        limit,
        need,
        len(demands),
        asks,
        sum(demand.held(limit) for demand in demands),
        history_ms,
        confidence(history_ms, asks, basis.quantile),
    )


def with_headroom(quota: str, need: float, basis: Basis) -> float:
    """The limit that rests on a need.

    >>> basis = Basis(0.999, 0.2)
    >>> [with_headroom("producer_ids_rate", need, basis) for need in (1.0, 2.0, 13.0)]
    [1, 3, 16]
    >>> with_headroom("request_rate", 0.1, basis)
    0.12
    """
    row = KEYS[quota]
    most = min(MAX_PRODUCER_IDS, basis.max_ids // 2) if quota == PRODUCER_IDS_RATE else row.max_limit
    limit = need * (1 + basis.headroom)
    if row.integer_limit:
        ratio = max(MOST_OF_NEED, 1 + basis.headroom)
        return int(min(math.ceil(limit), max(math.floor(need * ratio), math.ceil(need)), most))
    return min(rounded_up(limit), most)


def confidence(history_ms: int, asks: int, quantile: float) -> Confidence:
    """How far a limit can be trusted: by the length of history, and by the asks that a quantile takes."""
    if (1 - quantile) * asks < 1 - 1e-9:
        return "low"
    return next((name for name, least_ms in KNOWN_AFTER_MS.items() if history_ms >= least_ms), "low")


def _compared(quota: str, needs: Sequence[tuple[Demand, float]]) -> tuple[dict[str, float], set[str]]:
    """For each entity the need that its peers let expect; and the outliers by it.

    Outliers are no peers of others, so the others are compared anew until none is left.
    """
    if len(needs) <= FEWEST_PEERS:
        return {}, set()
    by_asks = sorted(needs, key=lambda one: (one[0].asks, one[0].entity))
    typical = _typical(quota, by_asks)
    logs = [math.log(need / typical[demand.entity]) for demand, need in needs]
    middle = median(logs)
    spread = math.exp(SPREADS * DEVIATION * median(abs(each - middle) for each in logs))
    abnormal: set[str] = set()
    while len(by_asks) > FEWEST_PEERS:
        found = {
            demand.entity
            for demand, need in by_asks
            if need / typical[demand.entity] > _abnormal(quota, demand, spread)
        }
        if not found:
            break
        abnormal |= found
        by_asks = [one for one in by_asks if one[0].entity not in found]
        typical |= _typical(quota, by_asks)
    return typical, abnormal


def _typical(quota: str, by_asks: Sequence[tuple[Demand, float]]) -> dict[str, float]:
    """The need that the peers of each entity let expect.

    Args:
        by_asks: the entities, by the number of their asks.
    """
    asks = [demand.asks for demand, _ in by_asks]
    found = {}
    for place, (demand, _) in enumerate(by_asks):
        low, high = place, place + 1  # the entities from low to high are nearest to it, and itself
        while high - low - 1 < min(PEERS, len(asks) - 1):
            below = asks[place] / asks[low - 1] if low else math.inf
            above = asks[high] / asks[place] if high < len(asks) else math.inf
            low, high = (low - 1, high) if below <= above else (low, high + 1)
        growth = 0.0 if _loops(quota, demand) else GROWTH_OF.get(quota, GROWTH)
        found[demand.entity] = median(
            by_asks[at][1] * max(1.0, asks[place] / asks[at]) ** growth
            for at in range(low, high)
            if at != place
        )
    return found


def _abnormal(quota: str, demand: Demand, spread: float) -> float:
    """The need of an outlier, in needs of its peers.

    Args:
        spread: how far their needs are apart, as a factor.
    """
    if not _loops(quota, demand):
        return max(ABNORMAL_IDS if quota == PRODUCER_IDS_RATE else ABNORMAL, spread)
    often = min(late_ids_of_an_ask(demand) / LOOPING_IDS_OF_AN_ASK, 1.0)
    return LOOPING_IDS / math.pow(often, LOOPING_POWER)


def late_ids_of_an_ask(demand: Demand) -> float:
    """The number of new ids with an ask, of late."""
    ids, asks = demand.late
    return ids / asks


def _loops(quota: str, demand: Demand) -> bool:
    return quota == PRODUCER_IDS_RATE and demand.late[0] >= max(LATE_IDS, LATE_IDS_OF_AN_ASK * demand.late[1])


def _is_settable(entity: str) -> bool:
    """Whether a quota can be set on an entity."""
    try:
        return str(Entity.parse(entity)) == entity
    except EntityError:
        return False
