"""The choice of limits: properties for any demand, and demand that is shaped to mislead it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.quota import KEYS
from workers.jobs.needs import Need
from workers.jobs.recommend.demand import Demand, rounded_up
from workers.jobs.recommend.forms import DEFAULTS
from workers.jobs.recommend.limits import (
    DAY_MS,
    Basis,
    KeyLimits,
    confidence,
    recommended,
    with_headroom,
)

BASIS = Basis(quantile=0.999, headroom=0.2)
IDS, REQUESTS, CONNECTIONS = "producer_ids_rate", "request_rate", "connection_creation_rate"
NEEDS = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=20)


def demand(entity: str, needs: Iterable[float], quota: str = REQUESTS, apart_ms: int = 1_000) -> Demand:
    """The demand of asks with these needs; of producer ids, each ask that raises the need brings new ones."""
    found, before = Demand(entity), 0.0
    for number, need in enumerate(needs):
        usage = max(0.0, need - before) if quota == IDS else 1.0
        found.add(Need(number * apart_ms, None, quota, DEFAULTS[quota], entity, need, usage))
        before = max(before, need)
    return found


def chosen(quota: str, demands: Iterable[Demand], basis: Basis = BASIS) -> KeyLimits:
    """The limits of one key."""
    (found,) = recommended({quota: {each.entity: each for each in demands}}, DEFAULTS, basis)
    return found


def producers(name: str, ids: int, asks: int) -> Demand:
    """A principal with so many producers, each with an id for life."""
    return demand(name, [float(min(number + 1, ids)) for number in range(asks)], IDS)


def teams(count: int, ids: int = 6, asks: int = 200) -> list[Demand]:
    return [producers(f"user=team-{number}", ids + number % 5, asks + number) for number in range(count)]


@given(st.floats(1e-9, 1e15))
def test_rounding_adds_at_most_one_in_a_hundred(value: float) -> None:
    assert value <= rounded_up(value) <= 1.01 * value * (1 + 1e-12)


@given(NEEDS, st.sampled_from([0.5, 0.9, 0.99, 0.999, 1.0]))
def test_a_quantile_holds_up_no_more_than_its_share(needs: list[float], quantile: float) -> None:
    found = demand("user=a", needs)
    limit = found.quantile(quantile)
    assert found.held(limit) <= (1 - quantile) * len(needs) + 1e-9
    smaller = [need for need in found.needs if need < limit]
    if smaller:
        assert found.held(max(smaller)) > (1 - quantile) * len(needs), "a smaller one holds up more"


@given(st.sampled_from(list(KEYS)), st.floats(0.001, 4e5), st.floats(0, 0.5))
def test_a_limit_is_at_least_its_need_and_at_most_half_more(
    quota: str, value: float, headroom: float
) -> None:
    need = float(-(-value // 1)) if KEYS[quota].integer_limit else rounded_up(value)
    limit = with_headroom(quota, need, Basis(0.999, headroom))
    assert need <= limit <= max(1.5, (1 + headroom) * 1.01) * need
    assert not KEYS[quota].integer_limit or isinstance(limit, int)


@given(st.lists(NEEDS, min_size=1, max_size=30), st.sampled_from([IDS, REQUESTS, CONNECTIONS]))
def test_limits_hold_nobody_up_but_outliers(needs: list[list[float]], quota: str) -> None:
    name = DEFAULTS[quota].partition("=")[0]
    demands = [
        demand(f"{name}=10.0.0.{number}", [min(need, 1e5) for need in mine], quota)
        for number, mine in enumerate(needs)
    ]
    found = chosen(quota, demands)
    own = {limit.entity: limit for limit in found.own}
    outliers = {outlier.entity for outlier in found.outliers}
    assert not own.keys() & outliers
    for each in demands:
        need = each.quantile(BASIS.quantile)
        if each.entity in outliers:
            assert found.default is None or need > found.default.limit
            continue
        limit = own.get(each.entity, found.default)
        assert limit is not None
        assert limit.limit >= need
        assert each.held(limit.limit) <= (1 - BASIS.quantile) * each.asks + 1e-9
    for limit in [*own.values(), *([found.default] if found.default else [])]:
        assert limit.need <= limit.limit <= 1.5 * limit.need


@given(st.lists(st.tuples(NEEDS, NEEDS), min_size=1, max_size=30))
def test_no_outlier_for_a_key_has_a_limit_for_any(needs: list[tuple[list[float], list[float]]]) -> None:
    demands: dict[str, dict[str, Demand]] = {IDS: {}, REQUESTS: {}}
    for number, mine in enumerate(needs):
        for quota, of_quota in zip(demands, mine, strict=True):
            name = f"user=team-{number}"
            demands[quota][name] = demand(name, [min(need, 1e5) for need in of_quota], quota)
    found = recommended(demands, DEFAULTS, BASIS)
    outliers = {outlier.entity for each in found for outlier in each.outliers}
    assert outliers.isdisjoint(limit.entity for each in found for limit in each.own)


class TestAdversaries:
    """Demand that is shaped to get a high limit, or to take a fair one from others."""

    def test_months_of_growing_usage_bless_nobody(self) -> None:
        """The new ids of an ask grow by a hundredth each day, for half a year."""
        days, needs = 180, []
        for day in range(days):
            needs += [float(round(7 * 1.02**day))] * 5
        patient = demand("user=patient", needs, IDS, apart_ms=DAY_MS // 5)
        found = chosen(IDS, [*teams(40, asks=900), patient])
        assert patient.quantile(0.999) > 200
        assert patient.history_ms >= (days - 1) * DAY_MS
        assert [outlier.entity for outlier in found.outliers] == ["user=patient"]
        assert found.default is not None
        assert found.default.limit < 20
        assert not found.own

    def test_an_accomplice_of_the_same_size_is_no_excuse(self) -> None:
        loops = [demand(f"user=loop-{number}", map(float, range(1, 300)), IDS) for number in range(4)]
        found = chosen(IDS, [*teams(30), *loops])
        assert {outlier.entity for outlier in found.outliers} == {each.entity for each in loops}

    def test_looping_is_no_excuse_where_everybody_loops(self) -> None:
        found = chosen(IDS, [demand(f"user=loop-{n}", map(float, range(1, 300)), IDS) for n in range(20)])
        assert found.default is None
        assert len(found.outliers) == 20

    def test_first_ids_are_no_loop(self) -> None:
        """A large principal brings in all its ids at first, and none later."""
        found = chosen(IDS, [*teams(30), producers("user=large", 60, 6_000)])
        assert not found.outliers
        assert found.own[0].entity == "user=large"

    @pytest.mark.parametrize(("asks_of_an_id", "is_outlier"), [(9, False), (4, True)])
    def test_producers_that_restart_at_times_are_no_loop(self, asks_of_an_id: int, is_outlier: bool) -> None:
        """Four times the ids of peers, or nine times, which come late as well."""
        ids = [float(1 + number // asks_of_an_id) for number in range(300)]
        found = chosen(IDS, [*teams(30), demand("user=restarting", ids, IDS)])
        assert [each.entity for each in (found.outliers or found.own)] == ["user=restarting"]
        assert bool(found.outliers) is is_outlier

    @pytest.mark.parametrize(("need", "is_outlier"), [(1.9, False), (2.1, True)])
    def test_a_storm_is_found_though_whole_limits_hide_it(self, need: float, is_outlier: bool) -> None:
        """All others need the limit 1, and this one 2 or 3."""
        quiet = [demand(f"ip=10.0.0.{n}", [0.09 + n / 100] * 20, CONNECTIONS) for n in range(30)]
        found = chosen(CONNECTIONS, [*quiet, demand("ip=10.1.1.1", [need] * 100, CONNECTIONS)])
        assert [each.entity for each in (found.outliers or found.own)] == ["ip=10.1.1.1"]
        assert bool(found.outliers) is is_outlier
        assert found.default is not None
        assert (found.default.limit, found.default.need) == (1, 1)

    def test_half_of_the_traffic_from_one_principal(self) -> None:
        """Traffic explains its need, so it gets a limit of its own, and the default is for the others."""
        small = [demand(f"user=team-{number}", [0.1, 0.2, 0.3] * 10) for number in range(100)]
        large = demand("user=large", [25.0] * 3_000)
        found = chosen(REQUESTS, [*small, large])
        assert not found.outliers
        assert found.default is not None
        assert found.default.limit < 0.4
        assert [(limit.entity, limit.asks) for limit in found.own] == [("user=large", 3_000)]

    def test_a_burst_is_no_traffic(self) -> None:
        teams_ = [demand(f"user=team-{number}", [0.5 + number / 100] * 100) for number in range(30)]
        found = chosen(REQUESTS, [*teams_, demand("user=burst", [float(n) for n in range(1, 100)])])
        assert [outlier.entity for outlier in found.outliers] == ["user=burst"]

    def test_an_outlier_for_one_key_gets_no_limit_for_any(self) -> None:
        loop = demand("user=loop", map(float, range(1, 300)), IDS)
        requests = [demand(f"user=team-{number}", [1.0] * 200) for number in range(30)]
        busy = demand("user=loop", [2.0] * 300)
        of_ids, of_requests = recommended(
            {
                IDS: {each.entity: each for each in [*teams(30), loop]},
                REQUESTS: {each.entity: each for each in [*requests, busy]},
            },
            DEFAULTS,
            BASIS,
        )
        assert [outlier.entity for outlier in of_ids.outliers] == ["user=loop"]
        assert (of_requests.outliers, of_requests.own) == ([], [])
        assert of_requests.default is not None
        assert of_requests.default.limit == 1.2

    def test_a_crowd_of_small_outliers_moves_the_default_by_little(self) -> None:
        """Of thirty principals three loop: they are outliers, and no part of the many."""
        loops = [demand(f"user=loop-{n}", map(float, range(1, 300)), IDS) for n in range(3)]
        with_, without = chosen(IDS, [*teams(27), *loops]).default, chosen(IDS, teams(27)).default
        assert with_ == without


@pytest.mark.parametrize(("count", "own"), [(1, 0), (2, 1), (3, 1)])
def test_few_principals(count: int, own: int) -> None:
    """The largest gets a limit of its own, so that a new principal does not get that."""
    found = chosen(REQUESTS, [demand(f"user=team-{n}", [10.0**n] * 50) for n in range(count)])
    assert (len(found.own), found.outliers, found.is_compared) == (own, [], False)


def test_network_cannot_have_a_limit_of_its_own() -> None:
    networks = [f"ip=2001%3Adb8%3A{number}%3A%3A%2F64" for number in range(25)]
    found = chosen(CONNECTIONS, [demand(name, [2.0] * 50, CONNECTIONS) for name in networks[:-1]]
                   + [demand(networks[-1], [5.0] * 50, CONNECTIONS)])  # fmt: skip
    assert not found.own
    assert found.default is not None
    assert found.default.need == 5.0, "so the default has to cover it"


def test_demand_of_nobody() -> None:
    assert recommended({}, DEFAULTS, BASIS) == []
    assert recommended({REQUESTS: {"user=a": demand("user=a", [0.0])}}, DEFAULTS, BASIS) == []


@pytest.mark.parametrize(
    ("history_ms", "asks", "expected"),
    [
        (8 * DAY_MS, 5_000, "high"),
        (2 * DAY_MS, 5_000, "medium"),
        (DAY_MS // 2, 5_000, "low"),
        (8 * DAY_MS, 900, "low"),
    ],
)
def test_confidence_follows_from_history_and_asks(history_ms: int, asks: int, expected: str) -> None:
    assert confidence(history_ms, asks, 0.999) == expected


def test_counts_of_a_demand() -> None:
    found = demand("user=a", [1.0, 2.0, 2.0, 4.0], apart_ms=10)
    assert found.needs == Counter({2.0: 2, 1.0: 1, 4.0: 1})
    assert (found.asks, found.usage, found.history_ms) == (4, 4.0, 30)
