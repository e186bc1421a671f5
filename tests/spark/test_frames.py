"""The audit's tables, made from others: compared row by row."""

from __future__ import annotations

from typing import Any

import pytest
from chispa import assert_df_equality
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from workers.decision_log.schema import SCHEMA
from workers.spark.audit import frames, held
from workers.spark.audit.decisions import SCHEMA as COMBINED
from workers.spark.audit.decisions import combining, to_combine
from workers.spark.audit.found import SCHEMA as FOUND
from workers.spark.log import each_once, standing_twice


def log(spark: SparkSession, *rows: dict[str, Any]) -> DataFrame:
    schema = from_arrow_schema(SCHEMA)
    flags = dict.fromkeys(("deny", "recheck", "cluster_action", "charged", "replayed"), False)
    whole: dict[str, Any] = {
        **dict.fromkeys(SCHEMA.names),
        **flags,
        "kind": "decision",
        "batch": "b",
        "node": "n",
        "at_ms": 0,
        "usage": {},
        "throttle_ms": 0,
        "applied": 0,
        "source": "store",
        "decision": "admit",
        "principal": "a",
        "verdicts": [],
    }
    made = [{**whole, "place": place, "order": place + 128, **row} for place, row in enumerate(rows)]
    return spark.createDataFrame([tuple(row[name] for name in SCHEMA.names) for row in made], schema)


def verdict(**said: Any) -> dict[str, Any]:
    whole: dict[str, Any] = {field.name: None for field in SCHEMA.field("verdicts").type.value_type}
    whole |= {"quota": "producer_byte_rate", "entity": "user=*", "bucket": "user=a", "limit": 1.0}
    whole |= {"algorithm": "sampled_rate", "enforcement": "delay", "shadow": False, "scope": "cluster"}
    whole |= {"samples": 11, "sample_ms": 1_000, "burst": 0.0, "window_ms": 0, "interval_ms": 0, "ttl_ms": 0}
    whole |= {"epoch": 0, "usage": 1.0, "outcome": "admit", "throttle_ms": 0, "correction": 0}
    return whole | said


def found(spark: SparkSession, *rows: dict[str, Any]) -> DataFrame:
    schema = from_arrow_schema(FOUND)
    return spark.createDataFrame([tuple(row.get(name) for name in FOUND.names) for row in rows], schema)


def test_asks_are_counted_by_principal(spark: SparkSession):
    rows = log(
        spark,
        {},
        {"decision": "delay"},
        {"decision": "throttle", "replayed": True},
        {"decision": "admit", "source": "fallback", "order": None, "failure": "timeout"},
        {"decision": "reject", "principal": None},
        {"kind": "ids", "decision": None},
        {"kind": "quota", "decision": None, "principal": None},
    )
    expected = spark.createDataFrame(
        [("a", 4, 2, 1, 1, 0, 1, 1, 1), (None, 1, 0, 0, 0, 1, 0, 0, 0)],
        "principal string, asks long, admit long, delay long, throttle long, reject long, "
        "fallback long, unordered long, replayed long",
    )
    assert_df_equality(frames.asks(rows), expected, ignore_row_order=True, ignore_nullable=True)


def test_asks_over_time(spark: SparkSession):
    rows = log(
        spark, {"at_ms": 999}, {"at_ms": 3_000, "decision": "delay"}, {"at_ms": 3_999, "source": "fallback"}
    )
    expected = spark.createDataFrame(
        [(0, 1, 0, 0, 0, 0), (3_000, 1, 1, 0, 0, 1)],
        "from_ms long, admit long, delay long, throttle long, reject long, fallback long",
    )
    assert_df_equality(frames.over_time(rows, 1_000), expected, ignore_nullable=True)


def test_each_row_once(spark: SparkSession):
    rows = log(spark, {}, {"place": 0}, {"place": 0, "batch": "c"}, {"place": 7, "batch": "c"})
    columns = ("batch", "place")
    expected = spark.createDataFrame([("b", 0), ("c", 0), ("c", 7)], "batch string, place int")
    once = each_once(rows, standing_twice(rows)).select(*columns)
    assert_df_equality(once, expected, ignore_row_order=True, ignore_nullable=True)


def test_principals_have_what_was_counted_and_what_was_found(spark: SparkSession):
    asked = frames.asks(log(spark, {}, {"principal": None}))
    tallies = found(
        spark,
        {"case": "tally", "principal": "a", "verdicts": 2, "lost_units": 1.5, "worst": 1.9, "bound": 2.0},
        {"case": "tally", "principal": "a", "verdicts": 3, "differs": 1, "worst": 0.5, "bound": 1.0},
        {"case": "tally", "principal": None, "verdicts": 1, "worst": 0.1, "bound": 0.0},
        {"case": "lost", "principal": "a"},
        {"case": "tally", "principal": "gone", "verdicts": 7},
    )
    table = frames.principals(asked, tallies)
    columns = ("principal", "asks", "verdicts", "differs", "lost_units", "worst", "bound")
    expected = spark.createDataFrame(
        [("a", 1, 5, 1, 1.5, 1.9, 2.0), (None, 1, 1, 0, 0.0, 0.1, 0.0), ("gone", 0, 7, 0, 0.0, None, None)],
        "principal string, asks long, verdicts long, differs long, lost_units double, "
        "worst double, bound double",
    )
    assert_df_equality(table.select(*columns), expected, ignore_row_order=True, ignore_nullable=True)
    total = frames.overall(table).select("principals", "asks", "verdicts", "worst", "bound")
    expected = spark.createDataFrame(
        [(3, 2, 13, 1.9, 2.0)], "principals long, asks long, verdicts long, worst double, bound double"
    )
    assert_df_equality(total, expected, ignore_nullable=True)


COUNTED = (
    *("falsely_seen", "lookups", "over", "differs", "lost", "charged_again", "untold", "stale", "unlikely"),
    *("altered", "contradicts", "clock", "same_order"),
)
"""The counts by which something does not hold."""


def counted(principal: str, **counts: int) -> tuple[Any, ...]:
    return (principal, *(counts.get(name, 0) for name in COUNTED))


@pytest.mark.parametrize("allowed", [False, True])
def test_what_did_not_hold_is_named(spark: SparkSession, allowed: bool):
    table = spark.createDataFrame(
        [
            counted("good"),
            counted("lucky", falsely_seen=1, lookups=10),
            counted("gullible", falsely_seen=9, lookups=100),
            counted("at once", unlikely=1),
            counted("over", over=2, differs=1),
            counted("lost", lost=1),
            counted("again", charged_again=3),
            counted("altered", altered=1),
            counted("untold", untold=1),
            counted("stale", stale=2),
            counted("contradicts", contradicts=1),
            counted("clock", clock=1),
            counted("copied", same_order=1),
        ],
        ", ".join(["principal string", *(f"{count} long" for count in COUNTED)]),
    )
    lost = [] if allowed else [held.LOST]
    expected = spark.createDataFrame(
        [
            ("good", []),
            ("lucky", []),
            ("gullible", [held.FALSELY_SEEN]),
            ("over", [held.OVER, held.DIFFERS]),
            ("lost", lost),
            ("again", lost),
            ("altered", [] if allowed else [held.ALTERED]),
            ("untold", [] if allowed else [held.UNTOLD]),
            ("stale", [held.STALE]),
            ("at once", [held.UNLIKELY]),
            ("contradicts", [held.CONTRADICTS]),
            ("clock", [] if allowed else [held.CLOCK]),
            ("copied", [held.SAME_ORDER]),
        ],
        "principal string, not_held array<string>",
    )
    judged = frames.judged(table, allow_lost=allowed, allow_missing=allowed, allow_clock=allowed)
    named = judged.select("principal", "not_held")
    assert_df_equality(named, expected, ignore_row_order=True, ignore_nullable=True)


def test_ids_that_a_fallback_named_before_are_not_taken_for_seen(spark: SparkSession):
    """Within a layer's life, by an ask that charges."""
    without_store = {
        "source": "fallback",
        "order": None,
        "failure": "timeout",
        "mode": "admit",
        "verdicts": [verdict(ttl_ms=1_000)],
    }
    bucket = {"quota": "producer_ids_rate", "bucket": "user=a", "principal": "a", "at_ms": 100_020}
    rows = log(
        spark,
        {**without_store, "ids": [1, 2], "at_ms": 100_010},
        {**without_store, "ids": [1, 3], "at_ms": 100_030},
        {**without_store, "ids": [6], "at_ms": 100_010, "mode": "peek"},
        {**without_store, "ids": [7], "at_ms": 20_000},
        {"ids": [4], "at_ms": 10},
        {**without_store, "ids": [5], "at_ms": 100_010, "principal": "b"},
    )
    tally = {**bucket, "case": "tally", "falsely_seen": 7}
    a_case = {**bucket, "case": "falsely_seen", "amount": 1.0, "order": 128, "among": 7}
    met = found(spark, tally, *({**a_case, "digest": each} for each in range(1, 8)))
    told = frames.named_before(met, rows)
    less = frames.taken_back(told)
    expected = spark.createDataFrame([("tally", "a", -2)], "case string, principal string, falsely_seen long")
    assert_df_equality(less.select("case", "principal", "falsely_seen"), expected, ignore_nullable=True)
    columns = ["case", "principal", "unlikely"]
    expected = spark.createDataFrame([("tally", "a", 1)], "case string, principal string, unlikely long")
    assert_df_equality(frames.unlikely(met, told, 10).select(*columns), expected, ignore_nullable=True)
    assert not frames.unlikely(met.where("digest <= 3"), told, 10).count(), "one of them is chance"


def test_buckets_and_cases_are_told_apart(spark: SparkSession):
    rows = found(
        spark,
        {
            "case": "tally",
            "quota": "q",
            "bucket": "b",
            "principal": "a",
            "judged": 1,
            "worst": 0.2,
            "bound": 1.0,
        },
        {
            "case": "tally",
            "quota": "q",
            "bucket": "b",
            "principal": "c",
            "judged": 2,
            "worst": 0.4,
            "bound": 1.0,
        },
        {
            "case": "differs",
            "quota": "q",
            "bucket": "b",
            "principal": "c",
            "order": 3,
            "logged": "x",
            "exact": "y",
        },
    )
    expected = spark.createDataFrame(
        [("q", "b", 3, 0.4)], "quota string, bucket string, judged long, worst double"
    )
    summed = frames.buckets(rows).select("quota", "bucket", "judged", "worst")
    assert_df_equality(summed, expected, ignore_nullable=True)
    expected = spark.createDataFrame(
        [("differs", "c", 3, "x", "y")],
        "case string, principal string, order long, logged string, exact string",
    )
    cases = frames.cases(rows).select("case", "principal", "order", "logged", "exact")
    assert_df_equality(cases, expected, ignore_nullable=True)


def test_a_decision_that_its_verdicts_do_not_make(spark: SparkSession):
    delays = verdict(outcome="delay", throttle_ms=70)
    refuses = verdict(quota="consumer_byte_rate", outcome="throttle", throttle_ms=9, enforcement="deny")
    by_bytes = {"quota": "producer_byte_rate", "entity": "user=*", "bucket": "user=a", "reason": None}
    by_fetches = by_bytes | {"quota": "consumer_byte_rate"}
    right: list[dict[str, Any]] = [
        {"verdicts": [verdict()]},
        {"decision": "delay", "throttle_ms": 70, "limited_by": by_bytes, "verdicts": [delays]},
        {"decision": "throttle", "throttle_ms": 9, "limited_by": by_fetches, "verdicts": [delays, refuses]},
        {"verdicts": [delays | {"shadow": True}]},
        {
            "decision": "throttle",
            "throttle_ms": 1,
            "source": "fallback",
            "order": None,
            "verdicts": [refuses],
        },
    ]
    wrong: list[dict[str, Any]] = [
        {"decision": "delay", "throttle_ms": 71, "limited_by": by_bytes, "verdicts": [delays]},
        {"decision": "throttle", "throttle_ms": 9, "limited_by": by_bytes, "verdicts": [delays, refuses]},
        {"decision": "reject", "verdicts": [verdict()]},
        {"decision": "admit", "verdicts": [refuses]},
    ]
    looked = to_combine(log(spark, *right, *wrong))
    assert looked.count() == 7, "what is plainly admitted, or was not decided by the store, is not looked at"
    cases = looked.mapInArrow(combining(sequential=False), from_arrow_schema(COMBINED))
    expected = spark.createDataFrame(
        [
            (5 + 128, "the decision: delay 70 ms by producer_byte_rate of user=a, set on user=*"),
            (6 + 128, "the decision: throttle 9 ms by consumer_byte_rate of user=a, set on user=*"),
            (7 + 128, "the decision: admit"),
            (8 + 128, "the decision: throttle 9 ms by consumer_byte_rate of user=a, set on user=*"),
        ],
        "order long, exact string",
    )
    assert_df_equality(cases.select("order", "exact"), expected, ignore_row_order=True, ignore_nullable=True)
