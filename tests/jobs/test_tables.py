"""The audit's tables, compared row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from workers.decision_log.schema import SCHEMA, partition
from workers.jobs.audit import findings, replay, row_rules, scan, tables
from workers.jobs.audit.bucket_findings import SCHEMA as FOUND
from workers.jobs.audit.scan import Scanned, ScanRules
from workers.jobs.audit.tables import Allowed
from workers.jobs.batches import Task
from workers.jobs.files import row_groups
from workers.jobs.period import Period
from workers.jobs.verdicts import LogRows, VerdictPartition

Row = dict[str, Any]
NONE = Allowed()


def log(folder: Path, *rows: Row) -> Task:
    """A log of some rows, which need not name the columns that do not matter."""
    flags = dict.fromkeys(("deny", "recheck", "cluster_action", "charged", "replayed"), False)
    whole: Row = {
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
    file = folder / partition(0) / "part.parquet"
    file.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(made, SCHEMA), file)
    [groups] = row_groups(str(folder), Period())
    return Task(groups, Period(), {})


def scanned(task: Task, slice_ms: int = 1_000) -> tuple[Scanned, pa.Table]:
    """The result of the first stage, and its verdicts."""
    found, [verdicts] = scan.scan(ScanRules(Period(), slice_ms, False, False, 1), task)
    return found, verdicts


def verdict(**said: Any) -> Row:
    whole: Row = {field.name: None for field in SCHEMA.field("verdicts").type.value_type}
    whole |= {"quota": "producer_byte_rate", "entity": "user=*", "bucket": "user=a", "limit": 1.0}
    whole |= {"algorithm": "sampled_rate", "enforcement": "delay", "shadow": False, "scope": "cluster"}
    whole |= {"samples": 11, "sample_ms": 1_000, "burst": 0.0, "window_ms": 0, "interval_ms": 0, "ttl_ms": 0}
    whole |= {"epoch": 0, "usage": 1.0, "outcome": "admit", "throttle_ms": 0, "correction": 0}
    return whole | said


def found(*rows: Row) -> pa.Table:
    return pa.Table.from_pylist([{name: row.get(name) for name in FOUND.names} for row in rows], FOUND)


def rows_of(table: pa.Table, *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in columns) for row in table.to_pylist()]


def test_asks_are_counted_by_principal(tmp_path: Path):
    task = log(
        tmp_path,
        {},
        {"decision": "delay"},
        {"decision": "throttle", "replayed": True},
        {"decision": "admit", "source": "fallback", "order": None, "failure": "timeout"},
        {"decision": "reject", "principal": None},
        {"kind": "ids", "decision": None},
        {"kind": "quota", "decision": None, "principal": None},
    )
    names = (
        *("principal", "asks", "admit", "delay", "throttle", "reject", "fallback", "unordered", "replayed"),
    )
    table = scanned(task)[0].asks.table()
    assert set(rows_of(table, *names)) == {("a", 4, 2, 1, 1, 0, 1, 1, 1), (None, 1, 0, 0, 0, 1, 0, 0, 0)}
    assert table.num_rows == 2


def test_asks_are_counted_by_slice_of_time(tmp_path: Path):
    task = log(
        tmp_path,
        {"at_ms": 999},
        {"at_ms": 3_000, "decision": "delay"},
        {"at_ms": 3_999, "source": "fallback"},
    )
    assert scanned(task)[0].slices == {
        (0, "admit"): 1,
        (3_000, "admit"): 1,
        (3_000, "delay"): 1,
        (3_000, "fallback"): 1,
    }


def test_principals_have_their_asks_and_findings(tmp_path: Path):
    asked = scanned(log(tmp_path, {}, {"principal": None}))[0].asks.table()
    tallies = found(
        {"case": "tally", "principal": "a", "verdicts": 2, "lost_units": 1.5, "worst": 1.9, "bound": 2.0},
        {"case": "tally", "principal": "a", "verdicts": 3, "differs": 1, "worst": 0.5, "bound": 1.0},
        {"case": "tally", "principal": None, "verdicts": 1, "worst": 0.1, "bound": 0.0},
        {"case": "lost", "principal": "a"},
        {"case": "tally", "principal": "gone", "verdicts": 7},
    )
    table = tables.principals(asked, tallies, NONE)
    names = ("principal", "asks", "verdicts", "differs", "lost_units", "worst", "bound")
    assert rows_of(table, *names) == [
        ("a", 1, 5, 1, 1.5, 1.9, 2.0),
        (None, 1, 1, 0, 0.0, 0.1, 0.0),
        ("gone", 0, 7, 0, 0.0, None, None),
    ]
    total = tables.over_all(table, dict.fromkeys(LACKING, 0), NONE, absent=False)
    assert rows_of(total, "principals", "failed", "asks", "verdicts", "worst", "bound") == [
        (3, 1, 2, 13, 1.9, 2.0)
    ]


LACKING = ("missing_batches", "dropped_rows", "missing_rows", "added_rows", "told_twice")
"""The counts of what a log lacks, or has too often."""

COUNTED = (
    *("falsely_seen", "lookups", "over", "differs", "lost", "charged_again", "untold", "stale", "unlikely"),
    *("altered", "contradicts", "clock", "same_order"),
)
"""The counts that lead to findings."""


def counted(principal: str, **counts: int) -> Row:
    return {"principal": principal, **dict.fromkeys(COUNTED, 0), **counts}


@pytest.mark.parametrize("lacks", [False, True])
@pytest.mark.parametrize("allowed", [False, True])
def test_not_held_names_the_findings(*, allowed: bool, lacks: bool):
    """Where rows are known to be missing, ids that look new may have been charged by them."""
    rows = [
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
    ]
    lost = [] if allowed else [findings.LOST]
    excused = allowed and lacks
    judged = tables.judged(pa.Table.from_pylist(rows), Allowed(allowed, allowed, allowed, lacks))
    assert dict(rows_of(judged, "principal", "not_held")) == {
        "good": [],
        "lucky": [],
        "gullible": [] if excused else [findings.FALSELY_SEEN],
        "at once": [] if excused else [findings.UNLIKELY],
        "over": [findings.OVER, findings.DIFFERS],
        "lost": lost,
        "again": lost,
        "altered": [] if allowed else [findings.ALTERED],
        "untold": [] if allowed else [findings.UNTOLD],
        "stale": [findings.STALE],
        "contradicts": [findings.CONTRADICTS],
        "clock": [] if allowed else [findings.CLOCK],
        "copied": [findings.SAME_ORDER],
    }


def test_ids_named_by_a_fallback_before_are_not_falsely_seen(tmp_path: Path):
    """Only within a layer's lifetime, and only if the ask charges."""
    of_ids = verdict(
        quota="producer_ids_rate", algorithm="producer_ids", window_ms=500, interval_ms=500, ttl_ms=1_000
    )
    without_store: Row = {"source": "fallback", "order": None, "failure": "timeout", "mode": "admit"}
    without_store |= {"verdicts": [of_ids]}
    bucket = {"quota": "producer_ids_rate", "bucket": "user=a", "principal": "a", "at_ms": 100_020}
    task = log(
        tmp_path,
        {**without_store, "ids": [1, 2], "at_ms": 100_010},
        {**without_store, "ids": [1, 3], "at_ms": 100_030},
        {**without_store, "ids": [6], "at_ms": 100_010, "mode": "peek"},
        {**without_store, "ids": [7], "at_ms": 20_000},
        {"ids": [4], "at_ms": 10, "verdicts": [of_ids]},
        {**without_store, "ids": [5], "at_ms": 100_010, "principal": "b"},
    )
    counting = replay._Counting(VerdictPartition([scanned(task)[1]]))
    tally = {**bucket, "case": "tally", "falsely_seen": 7}
    a_case = {**bucket, "case": "falsely_seen", "amount": 1.0, "order": 128, "among": 7}
    met = [tally, *({**a_case, "digest": each} for each in range(1, 8))]
    where = {name: bucket[name] for name in ("quota", "bucket", "principal")} | {"case": "tally"}
    assert replay._subtracted(met, counting, 10) == [
        {**where, "falsely_seen": -2},
        {**where, "unlikely": 1},
    ]
    assert replay._subtracted(met[:4], counting, 10) == [{**where, "falsely_seen": -2}], (
        "one of them is possible by chance"
    )


def test_tallies_and_cases_are_separate_tables():
    where = {"quota": "q", "bucket": "b", "bound": 1.0}
    rows = found(
        {**where, "case": "tally", "principal": "a", "judged": 1, "worst": 0.2},
        {**where, "case": "tally", "principal": "c", "judged": 2, "worst": 0.4},
        {**where, "case": "differs", "principal": "c", "order": 3, "logged": "x", "exact": "y"},
        {**where, "case": "lost", "principal": "d", "order": 2, "logged": "v", "exact": "w"},
    )
    assert rows_of(tables.buckets(rows), "quota", "bucket", "judged", "worst") == [("q", "b", 3, 0.4)]
    assert rows_of(tables.cases(rows), "case", "principal", "order", "logged", "exact") == [
        ("lost", "d", 2, "v", "w"),
        ("differs", "c", 3, "x", "y"),
    ]


def test_decision_that_does_not_follow_from_its_verdicts(tmp_path: Path):
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
    [rows] = log(tmp_path, *right, *wrong).each(scan.COLUMNS)
    assert isinstance(rows, LogRows)
    cases = row_rules.findings(rows.table, by_store=False, sequential=False).to_pylist()
    assert {case["order"]: case["exact"] for case in cases if case["case"] == "differs"} == {
        5 + 128: "the decision: delay 70 ms by producer_byte_rate of user=a, set on user=*",
        6 + 128: "the decision: throttle 9 ms by consumer_byte_rate of user=a, set on user=*",
        7 + 128: "the decision: admit",
        8 + 128: "the decision: throttle 9 ms by consumer_byte_rate of user=a, set on user=*",
    }
