"""Missing parts of a log, and limits that were not in force."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from chispa import assert_df_equality
from pyspark.sql import DataFrame, SparkSession

from app.domain.ask import Ask
from app.domain.oracle import Oracle
from tests.spark.audits import audit
from tests.spark.logs import SECRET, OracleLog, asks
from tests.spark.test_tables import found, log, verdict
from workers.decision_log.schema import HOUR_MS
from workers.spark.audit import findings, missing, stale_limits, terminal
from workers.spark.audit.batches import BatchFaults, summaries
from workers.spark.audit.limits import FactorChange, JudgedPeriod
from workers.spark.audit.missing import LogGaps, NodeGap
from workers.spark.log import format_instant

GAPS = "node string, first long, last long, missing long, begins long"


def gaps_of(rows: DataFrame) -> LogGaps:
    return missing.gaps_in(rows, summaries(rows))


def batches(spark: SparkSession, *names: str) -> DataFrame:
    return log(spark, *({"batch": name} for name in names))


def test_gaps_in_the_batch_numbers_of_each_node(spark: SparkSession):
    names = ["n-1-000000000003", "n-1-000000000005", "n-1-000000000005", "n-1-000000000009", "m-000000000001"]
    expected = spark.createDataFrame([("n-1", 3, 9, 4, 3), ("m", 1, 1, 0, 1)], GAPS)
    found = missing.number_gaps(missing.batch_numbers(batches(spark, *names)))
    assert_df_equality(found, expected, ignore_row_order=True, ignore_nullable=True)
    elsewhere = missing.batch_numbers(
        batches(spark, "n-1-000000000004", "n-1-000000000010", "m-000000000009")
    )
    found = missing.number_gaps(missing.batch_numbers(batches(spark, *names)), elsewhere)
    expected = spark.createDataFrame([("n-1", 3, 9, 3, 3), ("m", 1, 1, 0, 1)], GAPS)
    assert_df_equality(found, expected, ignore_row_order=True, ignore_nullable=True)


def test_other_batch_names_are_ignored(spark: SparkSession):
    names = [
        "",
        "b",
        "n-00000000001",
        "n-0000000000012",
        "n-99999999999999999999",
        "n-١٢٣٤٥٦٧٨٩٠١٢",
        "n-000000000001x",
    ]
    assert gaps_of(batches(spark, *names)) == LogGaps(0, 0, False, ())
    odd = ["<b>\n-000000000001", "<b>\n-999999999999", "-000000000002", "a-000000000002\n"]
    lacks = gaps_of(batches(spark, *odd))
    assert lacks.batches == 999_999_999_997
    assert lacks.nodes == (NodeGap("<b>\n", 1, 999_999_999_999, 999_999_999_997),)
    assert lacks.beginning, "the node with the empty name begins with 2"


@pytest.mark.parametrize(
    ("said", "rows"),
    [
        ('{"rows": 7}', 7),
        ('{"rows": -3}', 1),
        ('{"rows": "many"}', 1),
        ("no JSON", 1),
        (None, 1),
        ('{"rows": 9223372036854775807}', 10**12),
    ],
)
def test_dropped_rows_are_summed(spark: SparkSession, said: str | None, rows: int):
    change = {
        "what": "too much waits to be sent",
        "before": None,
        "after": said,
        "who": None,
        "version": None,
    }
    dropped = {"kind": "dropped", "order": None, "change": tuple(change.values()), "decision": None}
    assert gaps_of(log(spark, {}, dropped, dropped)).rows == 2 * rows


def test_unlogged_charges_beyond_those_of_fallback_decisions_are_untold(spark: SparkSession):
    late = {"source": "fallback", "order": None, "failure": "budget", "mode": "admit"}
    rows = log(
        spark,
        late | {"verdicts": [verdict(bucket="explained"), verdict(bucket="both")]},
        late | {"verdicts": [verdict(bucket="answered")]},
        {"kind": "late", "mode": "admit", "verdicts": [verdict(bucket="answered")]},
        late | {"mode": "peek", "verdicts": [verdict(bucket="peeked")]},
    )
    met = [
        ("explained", "a", 1),
        ("both", "a", 1),
        ("both", "b", 1),
        ("answered", "c", 1),
        ("peeked", None, 2),
    ]
    tallies = [
        {
            "case": "tally",
            "quota": "producer_byte_rate",
            "bucket": bucket,
            "principal": name,
            "unlogged": times,
        }
        for bucket, name, times in met
    ]
    case = {
        "case": "unlogged",
        "quota": "producer_byte_rate",
        "bucket": "explained",
        "principal": "z",
        "unlogged": 9,
    }
    untold = missing.untold(found(spark, *tallies, case), rows).select(
        "case", "bucket", "principal", "untold"
    )
    expected = spark.createDataFrame(
        [
            ("tally", "both", "a", 1),
            ("tally", "both", "b", 1),
            ("tally", "answered", "c", 1),
            ("tally", "peeked", None, 2),
        ],
        "case string, bucket string, principal string, untold long",
    )
    assert_df_equality(untold, expected, ignore_row_order=True, ignore_nullable=True)


@pytest.mark.parametrize(
    ("lacks", "judged", "allowed", "says"),
    [
        (LogGaps(0, 0, True, ()), 5, False, []),
        (LogGaps(1, 0, False, ()), 5, False, [findings.MISSING]),
        (LogGaps(0, 1, False, ()), 5, False, [findings.MISSING]),
        (LogGaps(1, 1, False, ()), 5, True, []),
        (LogGaps(1, 0, False, ()), 0, True, [findings.NOTHING]),
    ],
)
def test_findings_over_all(spark: SparkSession, lacks: LogGaps, judged: int, allowed: bool, says: list[str]):
    total = spark.createDataFrame(
        [(7, judged, [findings.LOST])], "verdicts long, judged long, not_held array<string>"
    )
    [row] = missing.with_gaps(total, lacks, BatchFaults(0, 0, ()), 0, allow_missing=allowed).collect()
    assert row["not_held"] == [findings.LOST, *says]
    assert (row["missing_batches"], row["dropped_rows"]) == (lacks.batches, lacks.rows)


def set_to(limit: float) -> dict[str, Any]:
    return {"producer_byte_rate": {"limit": 1}, "request_rate": {"limit": limit}}


def test_verdicts_by_limits_not_in_force(spark: SparkSession):
    def asked(at_ms: int, limit: float, **row: Any) -> dict[str, Any]:
        said = verdict(limit=float(limit), outcome="throttle", quota="request_rate")
        return {"at_ms": at_ms, "verdicts": [said, verdict(limit=1.0)]} | row

    def lowered(at_ms: int, before: float, after: float) -> dict[str, Any]:
        sides = (json.dumps(set_to(limit)) for limit in (before, after))
        return {"kind": "quota", "at_ms": at_ms, "order": None, "change": ("user=*", *sides, None, 1)}

    rows = log(
        spark,
        {"kind": "quota", "order": None, "change": ("user=*", None, json.dumps(set_to(40)), None, 1)},
        lowered(10_000, 40, 10),
        asked(9_000, 40),
        asked(11_000, 40),
        asked(13_000, 40),
        asked(14_000, 40, principal="b"),
        asked(14_500, 40, principal=None),
        asked(15_000, 40),
        asked(16_000, 10, node="other"),
        asked(17_000, 40, source="fallback", order=None),
        asked(17_000, 40, replayed=True),
        asked(17_500, 40.5, kind="late"),
        asked(18_000, 40),
        {"kind": "factor", "order": None, "change": ("throttle_factor", None, "1.0", None, None)},
        {"kind": "factor", "order": None, "change": ("throttle_factor", None, "broken", None, None)},
    )
    applied = stale_limits.factors(rows)
    assert applied == {"n": [FactorChange(0, None, 1.0)]}
    times = JudgedPeriod(-math.inf, 17_999, 2_000)
    suspected = stale_limits.stale_uses(rows, rows, applied, times)
    named = stale_limits.stale_verdicts(rows, suspected).select(
        "principal", "at_ms", "order", "logged", "exact", "stale"
    )
    expected = spark.createDataFrame(
        [
            ("a", 13_000, 132, "throttle, limit 40 of user=*", "limit 10", 2),
            ("b", 14_000, 133, "throttle, limit 40 of user=*", "limit 10", 1),
            (None, 14_500, 134, "throttle, limit 40 of user=*", "limit 10", 1),
        ],
        "principal string, at_ms long, order long, logged string, exact string, stale long",
    )
    assert_df_equality(named, expected, ignore_row_order=True, ignore_nullable=True)


def changed(log: OracleLog, entity: str, before: Any, after: Any) -> None:
    sides = {"before": json.dumps(before), "after": json.dumps(after)}
    log.add(kind="quota", change={"what": entity, **sides, "who": "x", "version": 2})


def test_audit_finds_node_that_keeps_an_old_limit(spark: SparkSession, tmp_path: Path):
    log = OracleLog(Oracle(SECRET))
    log.run(asks(1, ["a", "b"]), 100, (0, 50))
    addresses = {
        key: {"limit": limit} for key, limit in (("request_rate", 20), ("connection_creation_rate", 3))
    }
    changed(log, "ip=*", addresses, addresses | {"connection_creation_rate": {"limit": 2}})
    log.run(asks(2, ["a", "b"]), 300, (0, 50))
    folder = log.write(tmp_path / "log")
    old = audit(spark, folder)
    assert not old.held
    assert old.not_held == {name: {findings.STALE} for name in ("a", "b", None)}
    assert set(old.overall["not_held"]) == {findings.STALE}
    said = terminal.summary(old.report, "out", 1)
    assert f"  a: {findings.STALE}" in said
    cases = [case for case in old.cases if case["case"] == "stale"]
    assert {(case["quota"], case["exact"]) for case in cases} == {("connection_creation_rate", "limit 2")}
    assert all(case["logged"].endswith("limit 3 of ip=*") for case in cases)
    assert sum(case["amount"] for case in cases) == old.overall["stale"] > 10
    page = (old.folder / "report.html").read_text(encoding="utf-8")
    assert "limit 3 of ip=*" in page
    assert audit(spark, folder, "--grace", "60").held, "within the grace period either limit is right"


def test_audit_finds_missing_rows(spark: SparkSession, tmp_path: Path):
    log = OracleLog(Oracle(SECRET))
    log.run(asks(1, ["a"]), 60, (0, 100))
    change = dict.fromkeys(("what", "before", "after", "who", "version"))
    log.add(kind="dropped", change=change | {"what": "the stream is full", "after": '{"rows": 250}'})
    whole = [
        row | {"node": "<b>", "batch": f"<b>-{1 + at // 20:012d}", "place": at % 20}
        for at, row in enumerate(log.rows)
    ]
    folder = log.write(tmp_path / "log", whole)
    lacking = audit(spark, folder)
    assert (lacking.held, lacking.not_held) == (False, {})
    assert lacking.overall["not_held"] == [findings.MISSING]
    assert (lacking.overall["missing_batches"], lacking.overall["dropped_rows"]) == (0, 250)
    said = terminal.summary(lacking.report, "out", 1)
    assert said.startswith("Not all bounds held:\n  over all: rows are missing from the log\n60 decisions, ")
    assert ", 0 batches missing, 250 rows dropped; the report is out/report.html" in said
    rest = [row for row in whole if row["batch"] != "<b>-000000000002" and row["kind"] != "dropped"]
    log.write(tmp_path / "cut", rest)
    cut = audit(spark, tmp_path / "cut")
    assert findings.MISSING in cut.overall["not_held"]
    assert (cut.overall["missing_batches"], cut.overall["dropped_rows"]) == (1, 0)
    page = (cut.folder / "report.html").read_text(encoding="utf-8")
    assert "Missing from the log" in page
    assert "<td>&lt;b&gt;</td>" in page
    allowed = audit(spark, folder, "--allow-missing")
    assert allowed.held
    assert terminal.summary(allowed.report, "out", 1).startswith("All bounds held: 60 decisions, ")


def test_batch_outside_the_period_is_not_missing(spark: SparkSession, tmp_path: Path):
    """If callers' clocks differ, all rows of a batch between others may be of another hour."""
    log = OracleLog(Oracle(SECRET))
    log.run(asks(1, ["a"]), 60, (0, 10))
    rows = [row | {"batch": f"n-{1 + at // 20:012d}", "place": at % 20} for at, row in enumerate(log.rows)]
    for row in rows[20:40]:
        row["at_ms"] -= 5 * HOUR_MS
    folder = log.write(tmp_path / "log", rows)
    found = audit(spark, folder, "--from", "2026-11-21T10:00:00Z", "--lead-in", "0")
    assert found.overall["missing_batches"] == 0
    for file in folder.glob("*/hour=05/*"):
        file.unlink()
    found = audit(spark, folder, "--from", "2026-11-21T10:00:00Z", "--lead-in", "0")
    assert found.overall["missing_batches"] == 1


def test_change_just_after_the_period_may_apply_within_it(spark: SparkSession, tmp_path: Path):
    log = OracleLog(Oracle(SECRET))
    log.run(asks(1, ["a"]), 80, (100,))
    others = {"connection_creation_rate": {"limit": 3}}
    changed(log, "ip=*", others | {"request_rate": {"limit": 21}}, others | {"request_rate": {"limit": 20}})
    for row in log.rows[:70]:
        for said in row.get("verdicts") or ():
            said["limit"] += said["entity"] == "ip=*" and said["quota"] == "request_rate"
    folder = log.write(tmp_path / "log")
    to_ms = log.now_ms - 200
    instant = format_instant(to_ms).replace(" UTC", "+00:00")
    assert audit(spark, folder, "--to", instant).overall["stale"] == 0
    assert audit(spark, folder, "--to", instant, "--grace", "0.1").overall["stale"] > 0


@pytest.mark.parametrize("is_logged", [True, False])
def test_logged_load_excuses_unlogged_charges(spark: SparkSession, tmp_path: Path, is_logged: bool):
    """Unlogged charges represent a load; the row is as ``quotagate backfill load`` writes it."""
    log = OracleLog(Oracle(SECRET))
    for first in range(0, 8, 2):
        log.now_ms += 100
        log.ask(Ask({}, (first, first + 1), "a", detail=True))
    order, loaded = log.order, len(log.rows)
    log.ask(Ask({}, tuple(range(10, 20)), "a", detail=True))
    del log.rows[loaded:]
    log.batch = loaded
    if is_logged:
        change = {"what": "user=a", "before": None, "after": '{"quotas": ["producer_ids_rate"]}'}
        log.add(
            kind="load", order=order, change={**change, "who": "quotagate backfill load", "version": None}
        )
    for first in range(8, 30, 2):
        log.now_ms += 100
        log.ask(Ask({}, (first, first + 1), "a", detail=True))
    found = audit(spark, log.write(tmp_path / "log"))
    assert found.held == is_logged
    assert found.not_held == ({} if is_logged else {"a": {findings.UNTOLD}})
