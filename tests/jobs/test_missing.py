"""Missing parts of a log, and limits that were not in force."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from app.domain.ask import Ask
from app.domain.oracle import Oracle
from tests.jobs.audits import audit
from tests.jobs.logs import SECRET, OracleLog, asks
from tests.jobs.test_tables import LACKING, Row, found, log, rows_of, scanned, verdict
from workers.decision_log.schema import HOUR_MS
from workers.jobs.audit import findings, replay, tables, terminal
from workers.jobs.audit.limits import FactorChange, JudgedPeriod
from workers.jobs.audit.scan import ASKS
from workers.jobs.audit.stale_limits import stale_uses, stale_verdicts
from workers.jobs.audit.tables import Allowed
from workers.jobs.batches import BatchSummary, LogGaps, NodeGap, Overview, gaps_in
from workers.jobs.period import Period, format_instant
from workers.jobs.verdicts import VerdictPartition


def batches(*names: str) -> Overview:
    return Overview({name: BatchSummary(1, [(0, 0)], 1, 1, 0) for name in names})


def test_gaps_in_the_batch_numbers_of_each_node():
    there = batches("n-1-000000000003", "n-1-000000000005", "n-1-000000000009", "m-000000000001")
    assert gaps_in(there) == LogGaps(4, True, (NodeGap("n-1", 3, 9, 4),))
    elsewhere = batches("n-1-000000000004", "n-1-000000000010", "m-000000000009")
    assert gaps_in(there, elsewhere) == LogGaps(3, True, (NodeGap("n-1", 3, 9, 3),))


def test_other_batch_names_are_ignored():
    names = [
        "",
        "b",
        "n-00000000001",
        "n-0000000000012",
        "n-99999999999999999999",
        "n-١٢٣٤٥٦٧٨٩٠١٢",
        "n-000000000001x",
    ]
    assert gaps_in(batches(*names)) == LogGaps(0, False, ())
    odd = ["<b>\n-000000000001", "<b>\n-999999999999", "-000000000002", "a-000000000002\n"]
    lacks = gaps_in(batches(*odd))
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
def test_dropped_rows_are_summed(said: str | None, rows: int, tmp_path: Path):
    change = change_of("too much waits to be sent", None, said)
    dropped = {"kind": "dropped", "order": None, "change": change, "decision": None}
    assert scanned(log(tmp_path, {}, dropped, dropped))[0].counts["dropped"] == 2 * rows


def change_of(what: str, before: str | None, after: str | None, version: int | None = None) -> Row:
    return {"what": what, "before": before, "after": after, "who": None, "version": version}


def test_unlogged_charges_beyond_those_of_fallback_decisions_are_untold(tmp_path: Path):
    late = {"source": "fallback", "order": None, "failure": "budget", "mode": "admit"}
    task = log(
        tmp_path,
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
    quota = {"quota": "producer_byte_rate"}
    tallies = [
        {"case": "tally", **quota, "bucket": bucket, "principal": name, "unlogged": times}
        for bucket, name, times in met
    ]
    case = {"case": "unlogged", **quota, "bucket": "explained", "principal": "z", "unlogged": 9}
    counting = replay._Counting(VerdictPartition([scanned(task)[1]]))
    assert replay._untold([*tallies, case], counting) == [
        {"case": "tally", **quota, "bucket": bucket, "principal": name, "untold": times}
        for bucket, name, times in met[1:]
    ]


@pytest.mark.parametrize(
    ("lacks", "judged", "allowed", "says"),
    [
        ({}, 5, False, []),
        ({"missing_batches": 1}, 5, False, [findings.MISSING]),
        ({"dropped_rows": 1}, 5, False, [findings.MISSING]),
        ({"missing_rows": 1}, 5, False, [findings.GAPS]),
        ({"missing_batches": 1, "dropped_rows": 1, "missing_rows": 1}, 5, True, []),
        ({"added_rows": 1, "told_twice": 1}, 5, True, [findings.ADDED, findings.TWICE]),
        ({"missing_batches": 1}, 0, True, [findings.NOTHING]),
    ],
)
def test_findings_over_all(lacks: dict[str, int], judged: int, allowed: bool, says: list[str]):
    allow = Allowed(missing=allowed)
    tally = {"case": "tally", "principal": "a", "verdicts": 7, "judged": judged, "lost": 1}
    principals = tables.principals(ASKS.empty_table(), found(tally), allow)
    counts = dict.fromkeys(LACKING, 0) | lacks
    [row] = tables.over_all(principals, counts, allow, absent=False).to_pylist()
    assert row["not_held"] == [findings.LOST, *says]
    assert {name: row[name] for name in LACKING} == counts


@pytest.mark.parametrize("allowed", [False, True])
def test_absent_node_is_named_over_all(*, allowed: bool):
    allow = Allowed(missing=allowed)
    principals = tables.principals(ASKS.empty_table(), found(), allow)
    [row] = tables.over_all(principals, dict.fromkeys(LACKING, 0), allow, absent=True).to_pylist()
    assert row["not_held"] == ([] if allowed else [findings.ABSENT])


def set_to(limit: float) -> dict[str, Any]:
    return {"producer_byte_rate": {"limit": 1}, "request_rate": {"limit": limit}}


def test_verdicts_by_limits_not_in_force(tmp_path: Path):
    def asked(at_ms: int, limit: float, **row: Any) -> Row:
        said = verdict(limit=float(limit), outcome="throttle", quota="request_rate")
        return {"at_ms": at_ms, "verdicts": [said, verdict(limit=1.0)]} | row

    def lowered(at_ms: int, before: float | None, after: float) -> Row:
        old = None if before is None else json.dumps(set_to(before))
        change = change_of("user=*", old, json.dumps(set_to(after)), 1)
        return {"kind": "quota", "at_ms": at_ms, "order": None, "change": change}

    def factor(after: str) -> Row:
        return {"kind": "factor", "order": None, "change": change_of("throttle_factor", None, after)}

    task = log(
        tmp_path,
        lowered(0, None, 40),
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
        factor("1.0"),
        factor("broken"),
    )
    first, verdicts = scanned(task)
    assert first.factors == {"n": [FactorChange(0, None, 1.0)]}
    times = JudgedPeriod(-math.inf, 17_999, 2_000)
    stale = stale_uses(first.uses.table(), first.changes, first.factors, times)
    named = stale_verdicts(stale, Period(), [verdicts])
    assert set(rows_of(named, "principal", "at_ms", "order", "logged", "exact", "stale")) == {
        ("a", 13_000, 132, "throttle, limit 40 of user=*", "limit 10", 2),
        ("b", 14_000, 133, "throttle, limit 40 of user=*", "limit 10", 1),
        (None, 14_500, 134, "throttle, limit 40 of user=*", "limit 10", 1),
    }
    assert named.num_rows == 3


def changed(log: OracleLog, entity: str, before: Any, after: Any) -> None:
    sides = {"before": json.dumps(before), "after": json.dumps(after)}
    log.add(kind="quota", change={"what": entity, **sides, "who": "x", "version": 2})


def test_audit_finds_node_that_keeps_an_old_limit(tmp_path: Path):
    log = OracleLog(Oracle(SECRET))
    log.run(asks(1, ["a", "b"]), 100, (0, 50))
    addresses = {
        key: {"limit": limit} for key, limit in (("request_rate", 20), ("connection_creation_rate", 3))
    }
    changed(log, "ip=*", addresses, addresses | {"connection_creation_rate": {"limit": 2}})
    log.run(asks(2, ["a", "b"]), 300, (0, 50))
    folder = log.write(tmp_path / "log")
    old = audit(folder)
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
    assert audit(folder, "--grace", "60").held, "within the grace period either limit is right"


def test_audit_finds_missing_rows(tmp_path: Path):
    log = OracleLog(Oracle(SECRET))
    log.run(asks(1, ["a"]), 60, (0, 100))
    change = dict.fromkeys(("what", "before", "after", "who", "version"))
    log.add(kind="dropped", change=change | {"what": "the stream is full", "after": '{"rows": 250}'})
    whole = [
        row | {"node": "<b>", "batch": f"<b>-{1 + at // 20:012d}", "place": at % 20}
        for at, row in enumerate(log.rows)
    ]
    folder = log.write(tmp_path / "log", whole)
    lacking = audit(folder)
    assert (lacking.held, lacking.not_held) == (False, {})
    assert lacking.overall["not_held"] == [findings.MISSING]
    assert (lacking.overall["missing_batches"], lacking.overall["dropped_rows"]) == (0, 250)
    said = terminal.summary(lacking.report, "out", 1)
    assert said.startswith("Not all bounds held:\n  over all: rows are missing from the log\n60 decisions, ")
    assert ", 0 batches missing, 250 rows dropped; the report is out/report.html" in said
    rest = [row for row in whole if row["batch"] != "<b>-000000000002" and row["kind"] != "dropped"]
    log.write(tmp_path / "cut", rest)
    cut = audit(tmp_path / "cut")
    assert findings.MISSING in cut.overall["not_held"]
    assert (cut.overall["missing_batches"], cut.overall["dropped_rows"]) == (1, 0)
    page = (cut.folder / "report.html").read_text(encoding="utf-8")
    assert "Missing from the log" in page
    assert "<td>&lt;b&gt;</td>" in page
    allowed = audit(folder, "--allow-missing")
    assert allowed.held
    assert terminal.summary(allowed.report, "out", 1).startswith("All bounds held: 60 decisions, ")


def test_batch_outside_the_period_is_not_missing(tmp_path: Path):
    """If callers' clocks differ, all rows of a batch between others may be of another hour."""
    log = OracleLog(Oracle(SECRET))
    log.run(asks(1, ["a"]), 60, (0, 10))
    rows = [row | {"batch": f"n-{1 + at // 20:012d}", "place": at % 20} for at, row in enumerate(log.rows)]
    for row in rows[20:40]:
        row["at_ms"] -= 5 * HOUR_MS
    folder = log.write(tmp_path / "log", rows)
    found = audit(folder, "--from", "2026-11-21T10:00:00Z", "--lead-in", "0")
    assert found.overall["missing_batches"] == 0
    for file in folder.glob("*/hour=05/*"):
        file.unlink()
    found = audit(folder, "--from", "2026-11-21T10:00:00Z", "--lead-in", "0")
    assert found.overall["missing_batches"] == 1


def test_change_just_after_the_period_may_apply_within_it(tmp_path: Path):
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
    assert audit(folder, "--to", instant).overall["stale"] == 0
    assert audit(folder, "--to", instant, "--grace", "0.1").overall["stale"] > 0


@pytest.mark.parametrize("is_logged", [True, False])
def test_logged_load_excuses_unlogged_charges(tmp_path: Path, is_logged: bool):
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
    found = audit(log.write(tmp_path / "log"))
    assert found.held == is_logged
    assert found.not_held == ({} if is_logged else {"a": {findings.UNTOLD}})
