"""Limits that nodes used, against the limits in force: the rule, without Spark."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import pytest

from workers.jobs.audit.limits import (
    FactorChange,
    JudgedPeriod,
    LimitChange,
    LimitUse,
    StaleLimit,
    stale_limits,
)

WHOLE = JudgedPeriod(-math.inf, math.inf, 2_000)
PRODUCE = "producer_byte_rate"
T = 1_000_000


def change(at_ms: int, before: float | None, after: float | None, version: int = 1) -> LimitChange:
    def side(limit: float | None) -> str | None:
        return (
            None if limit is None else json.dumps({PRODUCE: {"limit": 7}, "request_rate": {"limit": limit}})
        )

    return LimitChange(at_ms, version, side(before), side(after))


def used(limit: float, first_ms: int, last_ms: int, node: str = "n", verdicts: int = 10) -> LimitUse:
    return LimitUse(node, limit, verdicts, first_ms, last_ms)


def wrong(
    *uses: LimitUse, changes: list[LimitChange] | None = None, times: JudgedPeriod = WHOLE
) -> list[StaleLimit]:
    return list(stale_limits("request_rate", uses, changes or [], {}, times))


LOWERED = change(T, 40, 10)


def test_both_limits_are_right_within_the_grace_period():
    assert not wrong(used(40, 0, T + 2_000), used(10, T - 2_000, 2 * T), changes=[LOWERED])


def test_node_that_keeps_the_old_limit_is_found():
    late = used(40, 0, T + 60_000, "stale")
    assert wrong(used(40, 0, T), late, used(10, T, 2 * T), changes=[LOWERED]) == [
        StaleLimit("stale", 40, T + 2_001, T + 60_000, "limit 10")
    ]


def test_limit_used_too_early_and_limit_never_set():
    assert wrong(used(10, T - 5_000, 2 * T), used(11, T, T), changes=[LOWERED]) == [
        StaleLimit("n", 10, T - 5_000, T - 2_001, "limit 40"),
        StaleLimit("n", 11, T, T, "limit 10"),
    ]


def test_limit_removed_and_created_again():
    changes = [change(T, 40, None), change(2 * T, None, 40)]
    assert wrong(used(40, 0, 3 * T), changes=changes) == [
        StaleLimit("n", 40, T + 2_001, 2 * T - 2_001, "no limit")
    ], "whether there were verdicts in this span is checked later"
    first = [change(T, None, 5)]
    assert wrong(used(5, T - 3_000, T), changes=first) == [
        StaleLimit("n", 5, T - 3_000, T - 2_001, "no limit")
    ]


def test_quota_that_no_change_of_the_entity_names_has_no_limit():
    never = list(stale_limits("consumer_byte_rate", [used(5, T, T)], [LOWERED], {}, WHOLE))
    assert never == [StaleLimit("n", 5, T, T, "no limit")]


def test_entity_without_changes_has_one_limit():
    assert not wrong(used(40, 0, T), used(40, 0, T, "other"))
    assert wrong(used(40, 0, T, verdicts=90), used(10, 5, T, "other", 9)) == [
        StaleLimit("other", 10, 5, T, "limit 40")
    ]


def test_changes_of_several_nodes_are_ordered_by_version():
    changes = [change(T, 10, 20, version=6), change(T + 3, 40, 10, version=5)]
    assert not wrong(used(40, 0, T), used(20, T, 9 * T), changes=changes)
    assert wrong(used(10, 2 * T, 3 * T), changes=changes)[0].exact == "limit 20"


def test_missing_change_leaves_both_limits_possible():
    changes = [change(T, 40, 10), change(3 * T, 20, 30)]
    assert not wrong(used(10, T, 2 * T), used(20, 2 * T, 3 * T), changes=changes)
    assert wrong(used(40, 2 * T, 2 * T), changes=changes)[0].exact == "limit 10 or limit 20"


def test_only_the_judged_period_is_checked():
    stale = used(40, 0, T + 9_000)
    assert wrong(stale, changes=[LOWERED], times=JudgedPeriod(0, T + 5_000, 2_000)) == [
        StaleLimit("n", 40, T + 2_001, T + 5_000, "limit 10")
    ]
    assert not wrong(stale, changes=[LOWERED], times=JudgedPeriod(0, T + 2_000, 2_000))
    assert not wrong(stale, changes=[LOWERED], times=JudgedPeriod(T + 10_000, math.inf, 2_000))


@pytest.mark.parametrize("said", ["", "[]", "7", '{"request_rate": []}', '{"request_rate": {"limit": "x"}}'])
def test_unreadable_change_fits_every_limit(said: str):
    assert not wrong(used(40, 0, 2 * T), changes=[LimitChange(T, None, said, said)])


def produced(
    *uses: LimitUse, factors: Mapping[str, list[FactorChange]], changes: list[LimitChange] | None = None
) -> list[StaleLimit]:
    return list(stale_limits(PRODUCE, uses, changes or [], factors, WHOLE))


HALVED = {
    "n": [FactorChange(0, None, 1.0), FactorChange(T, 1.0, 0.5), FactorChange(2 * T, 0.5, 1.0)],
    "m": [FactorChange(0, None, 1.0)],
}


@pytest.mark.parametrize(
    "changes", [[], [LimitChange(5, 1, None, '{"producer_byte_rate": {"limit": 1001}}')]]
)
def test_throttle_factor_scales_the_limit_of_its_node(changes: list[LimitChange]):
    base, half = used(1_001, T // 2, 3 * T, verdicts=100), used(500.5, T - 1_000, 2 * T + 2_000)
    assert not produced(base, half, factors=HALVED, changes=changes)
    late = half._replace(last_ms=2 * T + 9_000)
    assert produced(base, late, factors=HALVED, changes=changes) == [
        StaleLimit("n", 500.5, 2 * T + 2_001, 2 * T + 9_000, "limit 1001")
    ]
    other = half._replace(node="m")
    assert produced(base, other, factors=HALVED, changes=changes) == [
        StaleLimit("m", 500.5, T - 1_000, 2 * T + 2_000, "limit 1001")
    ]


def test_limit_seen_only_under_a_factor():
    assert not produced(used(500.5, T, 2 * T), used(1_001, 0, 3 * T, "m", 1), factors=HALVED)


def test_throttle_factor_applies_to_no_other_quota():
    halved = list(
        stale_limits("consumer_byte_rate", [used(10, 0, T), used(5, T, T, "n", 1)], [], HALVED, WHOLE)
    )
    assert halved == [StaleLimit("n", 5, T, T, "limit 10")]


def test_unknown_factor_can_only_lower_a_limit():
    changes = [
        LimitChange(5, 1, '{"producer_byte_rate": {"limit": 40}}', '{"producer_byte_rate": {"limit": 10}}')
    ]
    assert not produced(used(3.3, T, T), used(10, T, T), factors={}, changes=changes)
    assert produced(used(40, T, T), factors={}, changes=changes) == [StaleLimit("n", 40, T, T, "limit 10")]


def test_extreme_numbers_do_not_fail():
    for limit in (math.nan, math.inf, -1.0, 0.0):
        for factor in (0.0, 1e-320, math.inf, math.nan, -1.0):
            factors = {"n": [FactorChange(0, factor, factor)]}
            produced(used(limit, 0, T), used(5, 0, T), factors=factors)
