"""By which limits was judged, and by which it should have been: the rule, without Spark."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import pytest

from workers.spark.audit.limits import Change, Factor, Suspect, Times, Use, suspects

WHOLE = Times(-math.inf, math.inf, 2_000)
PRODUCE = "producer_byte_rate"
T = 1_000_000


def change(at_ms: int, before: float | None, after: float | None, version: int = 1) -> Change:
    def side(limit: float | None) -> str | None:
        return (
            None if limit is None else json.dumps({PRODUCE: {"limit": 7}, "request_rate": {"limit": limit}})
        )

    return Change(at_ms, version, side(before), side(after))


def used(limit: float, first_ms: int, last_ms: int, node: str = "n", verdicts: int = 10) -> Use:
    return Use(node, limit, verdicts, first_ms, last_ms)


def wrong(*uses: Use, changes: list[Change] | None = None, times: Times = WHOLE) -> list[Suspect]:
    return list(suspects("request_rate", uses, changes or [], {}, times))


LOWERED = change(T, 40, 10)


def test_either_side_of_a_change_is_right_while_nodes_follow():
    assert not wrong(used(40, 0, T + 2_000), used(10, T - 2_000, 2 * T), changes=[LOWERED])


def test_a_node_that_goes_on_with_the_old_limit():
    late = used(40, 0, T + 60_000, "stale")
    assert wrong(used(40, 0, T), late, used(10, T, 2 * T), changes=[LOWERED]) == [
        Suspect("stale", 40, T + 2_001, T + 60_000, "limit 10")
    ]


def test_a_limit_before_it_was_set_and_one_that_never_was():
    assert wrong(used(10, T - 5_000, 2 * T), used(11, T, T), changes=[LOWERED]) == [
        Suspect("n", 10, T - 5_000, T - 2_001, "limit 40"),
        Suspect("n", 11, T, T, "limit 10"),
    ]


def test_removed_and_created_again():
    changes = [change(T, 40, None), change(2 * T, None, 40)]
    assert wrong(used(40, 0, 3 * T), changes=changes) == [
        Suspect("n", 40, T + 2_001, 2 * T - 2_001, "no limit")
    ], "whether there were any verdicts then is looked up"
    first = [change(T, None, 5)]
    assert wrong(used(5, T - 3_000, T), changes=first) == [Suspect("n", 5, T - 3_000, T - 2_001, "no limit")]


def test_a_quota_of_the_entity_that_no_change_speaks_of():
    never = list(suspects("consumer_byte_rate", [used(5, T, T)], [LOWERED], {}, WHOLE))
    assert never == [Suspect("n", 5, T, T, "no limit")]


def test_an_entity_that_never_changed_has_one_limit():
    assert not wrong(used(40, 0, T), used(40, 0, T, "other"))
    assert wrong(used(40, 0, T, verdicts=90), used(10, 5, T, "other", 9)) == [
        Suspect("other", 10, 5, T, "limit 40")
    ]


def test_changes_of_several_nodes_are_put_in_order_by_their_versions():
    changes = [change(T, 10, 20, version=6), change(T + 3, 40, 10, version=5)]
    assert not wrong(used(40, 0, T), used(20, T, 9 * T), changes=changes)
    assert wrong(used(10, 2 * T, 3 * T), changes=changes)[0].exact == "limit 20"


def test_a_change_that_the_log_lacks_is_held_against_nobody():
    changes = [change(T, 40, 10), change(3 * T, 20, 30)]
    assert not wrong(used(10, T, 2 * T), used(20, 2 * T, 3 * T), changes=changes)
    assert wrong(used(40, 2 * T, 2 * T), changes=changes)[0].exact == "limit 10 or limit 20"


def test_only_the_times_that_are_looked_at():
    stale = used(40, 0, T + 9_000)
    assert wrong(stale, changes=[LOWERED], times=Times(0, T + 5_000, 2_000)) == [
        Suspect("n", 40, T + 2_001, T + 5_000, "limit 10")
    ]
    assert not wrong(stale, changes=[LOWERED], times=Times(0, T + 2_000, 2_000))
    assert not wrong(stale, changes=[LOWERED], times=Times(T + 10_000, math.inf, 2_000))


@pytest.mark.parametrize("said", ["", "[]", "7", '{"request_rate": []}', '{"request_rate": {"limit": "x"}}'])
def test_a_change_that_cannot_be_read_is_held_against_nobody(said: str):
    assert not wrong(used(40, 0, 2 * T), changes=[Change(T, None, said, said)])


def produced(
    *uses: Use, factors: Mapping[str, list[Factor]], changes: list[Change] | None = None
) -> list[Suspect]:
    return list(suspects(PRODUCE, uses, changes or [], factors, WHOLE))


HALVED = {
    "n": [Factor(0, None, 1.0), Factor(T, 1.0, 0.5), Factor(2 * T, 0.5, 1.0)],
    "m": [Factor(0, None, 1.0)],
}


@pytest.mark.parametrize("changes", [[], [Change(5, 1, None, '{"producer_byte_rate": {"limit": 1001}}')]])
def test_a_factor_scales_what_its_node_has_to_show(changes: list[Change]):
    base, half = used(1_001, T // 2, 3 * T, verdicts=100), used(500.5, T - 1_000, 2 * T + 2_000)
    assert not produced(base, half, factors=HALVED, changes=changes)
    late = half._replace(last_ms=2 * T + 9_000)
    assert produced(base, late, factors=HALVED, changes=changes) == [
        Suspect("n", 500.5, 2 * T + 2_001, 2 * T + 9_000, "limit 1001")
    ]
    other = half._replace(node="m")
    assert produced(base, other, factors=HALVED, changes=changes) == [
        Suspect("m", 500.5, T - 1_000, 2 * T + 2_000, "limit 1001")
    ]


def test_a_limit_that_is_seen_under_a_factor_alone():
    assert not produced(used(500.5, T, 2 * T), used(1_001, 0, 3 * T, "m", 1), factors=HALVED)


def test_a_factor_touches_no_other_quota():
    halved = list(suspects("consumer_byte_rate", [used(10, 0, T), used(5, T, T, "n", 1)], [], HALVED, WHOLE))
    assert halved == [Suspect("n", 5, T, T, "limit 10")]


def test_a_factor_that_nobody_knows_makes_limits_smaller_only():
    changes = [Change(5, 1, '{"producer_byte_rate": {"limit": 40}}', '{"producer_byte_rate": {"limit": 10}}')]
    assert not produced(used(3.3, T, T), used(10, T, T), factors={}, changes=changes)
    assert produced(used(40, T, T), factors={}, changes=changes) == [Suspect("n", 40, T, T, "limit 10")]


def test_numbers_that_are_none():
    for limit in (math.nan, math.inf, -1.0, 0.0):
        for factor in (0.0, 1e-320, math.inf, math.nan, -1.0):
            factors = {"n": [Factor(0, factor, factor)]}
            produced(used(limit, 0, T), used(5, 0, T), factors=factors)
