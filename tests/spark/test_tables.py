"""The audit's tables, compared row by row."""

from __future__ import annotations

from typing import Any

import pytest
from chispa import assert_df_equality
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from workers.decision_log.schema import SCHEMA
from workers.spark.audit import findings, tables
from workers.spark.audit.bucket_findings import SCHEMA as FOUND
from workers.spark.audit.contradictions import DecisionRow, checking
from workers.spark.log import repeated_batches, without_duplicates


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
    assert_df_equality(tables.asks(rows), expected, ignore_row_order=True, ignore_nullable=True)


def test_asks_are_counted_by_slice_of_time(spark: SparkSession):
    rows = log(
        spark, {"at_ms": 999}, {"at_ms": 3_000, "decision": "delay"}, {"at_ms": 3_999, "source": "fallback"}
    )
    expected = spark.createDataFrame(
        [(0, 1, 0, 0, 0, 0), (3_000, 1, 1, 0, 0, 1)],
        "from_ms long, admit long, delay long, throttle long, reject long, fallback long",
    )
    assert_df_equality(tables.over_time(rows, 1_000), expected, ignore_nullable=True)


def test_repeated_rows_are_dropped(spark: SparkSession):
    rows = log(spark, {}, {"place": 0}, {"place": 0, "batch": "c"}, {"place": 7, "batch": "c"})
    columns = ("batch", "place")
    expected = spark.createDataFrame([("b", 0), ("c", 0), ("c", 7)], "batch string, place int")
    once = without_duplicates(rows, repeated_batches(rows)).select(*columns)
    assert_df_equality(once, expected, ignore_row_order=True, ignore_nullable=True)


def test_principals_have_their_asks_and_findings(spark: SparkSession):
    asked = tables.asks(log(spark, {}, {"principal": None}))
    tallies = found(
        spark,
        {"case": "tally", "principal": "a", "verdicts": 2, "lost_units": 1.5, "worst": 1.9, "bound": 2.0},
        {"case": "tally", "principal": "a", "verdicts": 3, "differs": 1, "worst": 0.5, "bound": 1.0},
        {"case": "tally", "principal": None, "verdicts": 1, "worst": 0.1, "bound": 0.0},
        {"case": "lost", "principal": "a"},
        {"case": "tally", "principal": "gone", "verdicts": 7},
    )
    table = tables.principals(asked, tallies)
    columns = ("principal", "asks", "verdicts", "differs", "lost_units", "worst", "bound")
    expected = spark.createDataFrame(
        [("a", 1, 5, 1, 1.5, 1.9, 2.0), (None, 1, 1, 0, 0.0, 0.1, 0.0), ("gone", 0, 7, 0, 0.0, None, None)],
        "principal string, asks long, verdicts long, differs long, lost_units double, "
        "worst double, bound double",
    )
    assert_df_equality(table.select(*columns), expected, ignore_row_order=True, ignore_nullable=True)
    total = tables.overall(table).select("principals", "asks", "verdicts", "worst", "bound")
    expected = spark.createDataFrame(
        [(3, 2, 13, 1.9, 2.0)], "principals long, asks long, verdicts long, worst double, bound double"
    )
    assert_df_equality(total, expected, ignore_nullable=True)


COUNTED = (
    *("falsely_seen", "lookups", "over", "differs", "lost", "charged_again", "untold", "stale", "unlikely"),
    *("altered", "contradicts", "clock", "same_order"),
)
"""The counts that lead to findings."""


def counted(principal: str, **counts: int) -> tuple[Any, ...]:
    return (principal, *(counts.get(name, 0) for name in COUNTED))


@pytest.mark.parametrize("allowed", [False, True])
def test_not_held_names_the_findings(spark: SparkSession, allowed: bool):
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
    lost = [] if allowed else [findings.LOST]
    expected = spark.createDataFrame(
        [
            ("good", []),
            ("lucky", []),
            ("gullible", [findings.FALSELY_SEEN]),
            ("over", [findings.OVER, findings.DIFFERS]),
            ("lost", lost),
            ("again", lost),
            ("altered", [] if allowed else [findings.ALTERED]),
            ("untold", [] if allowed else [findings.UNTOLD]),
            ("stale", [findings.STALE]),
            ("at once", [findings.UNLIKELY]),
            ("contradicts", [findings.CONTRADICTS]),
            ("clock", [] if allowed else [findings.CLOCK]),
            ("copied", [findings.SAME_ORDER]),
        ],
        "principal string, not_held array<string>",
    )
    judged = tables.judged(table, allow_lost=allowed, allow_missing=allowed, allow_clock=allowed)
    named = judged.select("principal", "not_held")
    assert_df_equality(named, expected, ignore_row_order=True, ignore_nullable=True)


def test_ids_named_by_a_fallback_before_are_not_falsely_seen(spark: SparkSession):
    """Only within a layer's lifetime, and only if the ask charges."""
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
    explained = tables.named_before(met, rows)
    less = tables.subtracted(explained)
    expected = spark.createDataFrame([("tally", "a", -2)], "case string, principal string, falsely_seen long")
    assert_df_equality(less.select("case", "principal", "falsely_seen"), expected, ignore_nullable=True)
    columns = ["case", "principal", "unlikely"]
    expected = spark.createDataFrame([("tally", "a", 1)], "case string, principal string, unlikely long")
    assert_df_equality(tables.unlikely(met, explained, 10).select(*columns), expected, ignore_nullable=True)
    assert not tables.unlikely(met.where("digest <= 3"), explained, 10).count(), (
        "one of them is possible by chance"
    )


def test_tallies_and_cases_are_separate_tables(spark: SparkSession):
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
    summed = tables.buckets(rows).select("quota", "bucket", "judged", "worst")
    assert_df_equality(summed, expected, ignore_nullable=True)
    expected = spark.createDataFrame(
        [("differs", "c", 3, "x", "y")],
        "case string, principal string, order long, logged string, exact string",
    )
    cases = tables.cases(rows).select("case", "principal", "order", "logged", "exact")
    assert_df_equality(cases, expected, ignore_nullable=True)


def test_decision_that_does_not_follow_from_its_verdicts(spark: SparkSession):
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
    rows = log(spark, *right, *wrong).select(*DecisionRow._fields)
    check = checking(by_store=False, sequential=False)
    cases = rows.mapInArrow(check, from_arrow_schema(FOUND)).where("case = 'differs'")
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
