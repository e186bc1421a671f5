"""The whole audit: it agrees with the oracle's decisions, and finds and names each planted fault."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from app.domain.ask import Ask
from app.domain.decision import OUTCOMES
from app.domain.oracle import Oracle
from app.node import reports
from tests.jobs import faults
from tests.jobs.audits import AuditResult, audit
from tests.jobs.logs import SECRET, START_MS, OracleLog, Row, asks
from workers.jobs import runner
from workers.jobs.audit import findings, report, terminal
from workers.jobs.console import IN_CONSOLE
from workers.jobs.period import format_instant

QUICK = (0, 1, 5, 20, 50, -3)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[OracleLog, AuditResult]:
    """A log in which some principals' buckets have a fault each."""
    faulty = {
        "forgetful": faults.forgetful,
        "gullible": faults.gullible,
        "lenient": faults.lenient,
        "impatient": faults.impatient,
        "double": faults.double,
        "grasping": faults.grasping,
    }
    log = OracleLog(faults.FaultyOracle(SECRET, faulty))
    log.run(asks(3, ["good", *faulty, "fine"]), 3_000, QUICK)
    return log, audit(log.write(tmp_path_factory.mktemp("planted") / "log"))


def test_audit_finds_every_fault_and_names_its_principal(planted: tuple[OracleLog, AuditResult]):
    _, found = planted
    assert not found.held
    assert set(found.not_held) == {"forgetful", "gullible", "lenient", "impatient", "double", "grasping"}
    assert found.not_held["forgetful"] == {findings.LOST}
    assert findings.FALSELY_SEEN in found.not_held["gullible"]
    assert {findings.OVER, findings.DIFFERS} <= found.not_held["lenient"]
    assert found.not_held["impatient"] == {findings.DIFFERS}
    assert found.not_held["double"] == found.not_held["grasping"] == {findings.UNTOLD}


def test_audit_counts_each_forgotten_charge(planted: tuple[OracleLog, AuditResult]):
    log, found = planted
    forgotten = sum(
        bucket.forgotten
        for bucket in log.oracle.buckets.values()
        if isinstance(bucket, faults.ForgetfulRate | faults.ForgetfulTokens | faults.ForgetfulIds)
    )
    assert forgotten > 20
    assert found.principals["forgetful"]["lost"] == forgotten
    assert found.principals["forgetful"]["differs"] == 0, "each is judged by what the store had left"


def test_audit_names_each_falsely_seen_id(planted: tuple[OracleLog, AuditResult]):
    log, found = planted
    named = {
        case["digest"]
        for case in found.cases
        if case["case"] == "falsely_seen" and case["principal"] == "gullible"
    }
    admitted = {
        each
        for row in log.rows
        if row["principal"] == "gullible" and row["ids"] and row["charged"] and row["mode"] == "admit"
        for verdict in row["verdicts"]
        if verdict["charged_ids"] is not None
        for each in set(row["ids"]) - set(verdict["charged_ids"])
    }
    charged = {
        each for row in log.rows for verdict in row["verdicts"] for each in verdict["charged_ids"] or ()
    }
    strangers = admitted - charged
    assert len(strangers) > 3
    assert strangers <= named


def test_report_shows_wait_that_is_one_millisecond_too_short(planted: tuple[OracleLog, AuditResult]):
    _, found = planted
    cases = [case for case in found.cases if case["case"] == "differs" and case["principal"] == "impatient"]
    assert cases
    for case in cases:
        waits = [
            int(text.replace(",", "")) for text in re.findall(r"([\d,]+) ms", case["logged"] + case["exact"])
        ]
        assert waits[1] - waits[0] == 1


def test_several_processes_and_partitions_find_the_same(
    planted: tuple[OracleLog, AuditResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    log, expected = planted
    for place in range(4):
        log.write(tmp_path / "log", log.rows[place::4], f"part-{place}")
    monkeypatch.setattr(runner, "FEW_ROWS", 0)
    monkeypatch.setattr(report, "ROWS_OF_A_PARTITION", 1_000)
    found = audit(tmp_path / "log", "--processes", "2")
    for table in ("overall", "principals", "buckets"):
        assert rows_of(found, table) == rows_of(expected, table)
    assert found.rows("cases") == expected.rows("cases")


def rows_of(found: AuditResult, table: str) -> list[str]:
    """The rows of a table in some order; sums of fractions depend on their order in the last digits."""
    rows = [
        {name: round(each, 6) if isinstance(each, float) else each for name, each in row.items()}
        for row in found.rows(table)
    ]
    return sorted(map(repr, rows))


def test_page_is_self_contained_and_names_the_failed_principals(planted: tuple[OracleLog, AuditResult]):
    _, found = planted
    page = (found.folder / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page
    assert "<script" not in page
    assert not re.search(r"https?://|\burl\(|@import|<link|\bsrc=", page)
    assert "prefers-color-scheme: dark" in page
    assert page.count("<svg") == 3
    for name in (
        "forgetful",
        "gullible",
        "lenient",
        "impatient",
        "double",
        "grasping",
        findings.LOST,
        findings.OVER,
    ):
        assert name in page
    files = {str(file.relative_to(found.folder)) for file in found.folder.rglob("*") if file.is_file()}
    tables_ = {f"{name}/part-0.parquet" for name in ("principals", "buckets", "cases", "overall")}
    assert files == {"report.html", "summary.json", "report.json", "tables.json", *tables_}


def test_console_reads_the_report(planted: tuple[OracleLog, AuditResult]):
    log, found = planted
    summary = json.loads((found.folder / "summary.json").read_text(encoding="utf-8"))
    read = reports.read_report(found.folder.parent, found.folder.name)
    assert (read.kind, json.loads(bytes(read.summary))) == ("audit", summary)
    assert read.log == str(found.folder.with_name("log"))
    times = [row["at_ms"] for row in log.rows]
    assert (read.from_ms, read.to_ms) == (min(times), max(times))
    by_name = {table.name: table for table in read.tables}
    seen = by_name["decisions_over_time"]
    assert seen.columns[:2] == ["at_ms", "admit"]
    counts = [int(cell or 0) for row in seen.rows for cell in row[1:5]]
    assert sum(counts) == summary["decisions"]
    failed = {each["principal"]: "; ".join(each["findings"]) for each in summary["findings"][1:]}
    assert {row[0]: row[1] for row in by_name["failed"].rows} == failed != {}
    assert by_name["cases"].count == len(found.cases) > len(by_name["cases"].rows) == IN_CONSOLE


def test_page_escapes_names(tmp_path: Path):
    log = OracleLog(Oracle(SECRET))
    log.run(asks(1, ['<b onclick="x">', "a\x1b[31m"]), 60, (0, 100))
    found = audit(log.write(tmp_path / "log"))
    page = (found.folder / "report.html").read_text(encoding="utf-8")
    assert "<b onclick" not in page
    assert "&lt;b onclick=&quot;x&quot;&gt;" in page
    assert found.held


def test_correct_decisions_hold(tmp_path: Path):
    log = OracleLog(Oracle(SECRET))
    log.run(asks(1, ["a", "b", "c"]), 2_000, (*QUICK, 1_000, -400, -70_000, 80_000))
    log.order += 128
    mine = {key[0] for key in log.oracle.buckets if key[1] == "user=a"}
    change = {"what": "user=a", "before": json.dumps({"quotas": sorted(mine)}), "who": "x"}
    log.add(kind="reset", order=log.order, change={**change, "after": None, "version": None})
    log.order += 128
    log.oracle.buckets = {key: bucket for key, bucket in log.oracle.buckets.items() if key[1] != "user=a"}
    log.run(asks(2, ["a", "b", "c"]), 1_000, QUICK)
    last = log.rows[-1]
    kept = next(row for row in reversed(log.rows) if row["charged"] and row["verdicts"])
    where: Row = {name: last[name] for name in ("node", "batch", "at_ms", "order") if name in last}
    log.rows += [
        {**kept, **where, "replayed": True, "verdicts": [], "place": last["place"] + 1},
        {**last, "order": None, "source": "fallback", "failure": "timeout", "place": last["place"] + 2},
    ]
    found = audit(log.write(tmp_path / "log"))
    assert found.held, (found.not_held, terminal.summary(found.report, "report", 1.0))
    assert not found.cases
    total = found.overall
    asked = [row for row in log.rows if row["kind"] == "decision"]
    assert total["asks"] == len(asked) == 3_002
    for outcome in OUTCOMES:
        assert total[outcome] == sum(row["decision"] == outcome for row in asked)
    assert (total["fallback"], total["replayed"]) == (1, 1)
    assert total["corrections"] == sum(
        verdict["correction"] > 0 for row in asked if row["order"] for verdict in row["verdicts"]
    )
    assert total["corrections"] > 20
    for name in ("a", "b", "c"):
        charged = [
            each
            for row in asked
            if row["principal"] == name and row["order"] and not row["replayed"]
            for verdict in row["verdicts"]
            for each in verdict["charged_ids"] or ()
        ]
        assert found.principals[name]["charged_ids"] == len(charged)


def test_older_is_needed_for_log_begun_while_store_was_in_use(tmp_path: Path):
    log = OracleLog(Oracle(SECRET))
    ask = Ask({}, tuple(range(30)), "a", detail=True)
    log.ask(ask)
    log.rows.clear()
    log.batch = 0
    log.now_ms += 60_000
    log.ask(ask)
    folder = log.write(tmp_path / "log")
    found = audit(folder)
    assert found.not_held == {"a": {findings.FALSELY_SEEN, findings.UNLIKELY}}
    assert "add --older" in terminal.summary(found.report, "report", 1.0)
    assert audit(folder, "--older").held


def test_only_the_period_is_judged_and_its_lead_in_is_replayed(tmp_path: Path):
    log = OracleLog(faults.FaultyOracle(SECRET, {"bad": faults.impatient}))
    log.run(asks(1, ["bad"]), 300, (0, 50))
    log.now_ms = START_MS + 200_000
    log.oracle.buckets.clear()
    from_ms = log.now_ms
    log.oracle.faults.clear()  # type: ignore[attr-defined]
    log.run(asks(2, ["bad"]), 300, (0, 50))
    folder = log.write(tmp_path / "log")
    instant = format_instant(from_ms).replace(" UTC", "+00:00")
    after = audit(folder, "--from", instant)
    assert after.held
    assert after.overall["asks"] == 300
    assert after.overall["unjudged"] == 0, "the buckets had rested"
    before = audit(folder, "--to", instant)
    assert set(before.not_held) == {"bad"}
    assert before.overall["asks"] == 300


def test_period_in_which_every_ask_was_refused(tmp_path: Path):
    log = OracleLog(Oracle(SECRET))
    for limits in log.quotas.values():
        limits.update({entity: replace(quota, limit=0, burst=0) for entity, quota in limits.items()})
    for _ in range(30):
        log.now_ms += 50
        log.ask(Ask({"mutations": 1, "fetch_bytes": 10}, None, "a", "etl", detail=True))
    assert {row["decision"] for row in log.rows} == {"reject"}
    found = audit(log.write(tmp_path / "log"))
    assert found.held
    assert found.overall["judged"] == 60


def test_summary_names_every_failed_principal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The page shows some of them."""
    monkeypatch.setattr(report, "IN_PAGE", 2)
    names = [f"p{number}" for number in range(5)]
    log = OracleLog(faults.FaultyOracle(SECRET, dict.fromkeys(names, faults.impatient)))
    log.run(asks(3, names), 600, (0, 1))
    found = audit(log.write(tmp_path / "log"))
    assert len(found.report["failed"]) == 2
    summary = json.loads((found.folder / "summary.json").read_text())
    assert {each.get("principal") for each in summary["findings"]} >= set(names) & found.not_held.keys()
    assert len(found.not_held) > 2
