"""The whole audit: it agrees with what the oracle decided, and finds and names what was done wrong."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from app.domain.ask import Ask
from app.domain.decision import OUTCOMES
from app.domain.oracle import Oracle
from tests.spark import faults
from tests.spark.audits import Audited, audit
from tests.spark.logs import SECRET, START_MS, Logged, Row, asks
from workers.spark.audit import held, terminal
from workers.spark.log import spelled

QUICK = (0, 1, 5, 20, 50, -3)


@pytest.fixture(scope="module")
def planted(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Logged, Audited]:
    """A log in which some principals' buckets have a fault each."""
    faulty = {
        "forgetful": faults.forgetful,
        "gullible": faults.gullible,
        "lenient": faults.lenient,
        "impatient": faults.impatient,
        "double": faults.double,
        "grasping": faults.grasping,
    }
    log = Logged(faults.Faulty(SECRET, faulty))
    log.run(asks(3, ["good", *faulty, "fine"]), 5_000, QUICK)
    return log, audit(spark, log.write(tmp_path_factory.mktemp("planted") / "log"))


def test_every_fault_is_found_and_its_principal_named(planted: tuple[Logged, Audited]):
    _, found = planted
    assert not found.held
    assert set(found.not_held) == {"forgetful", "gullible", "lenient", "impatient", "double", "grasping"}
    assert found.not_held["forgetful"] == {held.LOST}
    assert held.FALSELY_SEEN in found.not_held["gullible"]
    assert {held.OVER, held.DIFFERS} <= found.not_held["lenient"]
    assert found.not_held["impatient"] == {held.DIFFERS}
    assert found.not_held["double"] == found.not_held["grasping"] == {held.UNTOLD}


def test_each_forgotten_charge_is_counted(planted: tuple[Logged, Audited]):
    log, found = planted
    forgotten = sum(
        bucket.forgotten
        for bucket in log.oracle.buckets.values()
        if isinstance(bucket, faults.ForgetfulRate | faults.ForgetfulTokens | faults.ForgetfulIds)
    )
    assert forgotten > 20
    assert found.principals["forgetful"]["lost"] == forgotten
    assert found.principals["forgetful"]["differs"] == 0, "each is judged by what the store had left"


def test_each_id_falsely_taken_as_seen_is_named(planted: tuple[Logged, Audited]):
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


def test_a_wait_that_is_a_millisecond_too_short_is_shown(planted: tuple[Logged, Audited]):
    _, found = planted
    cases = [case for case in found.cases if case["case"] == "differs" and case["principal"] == "impatient"]
    assert cases
    for case in cases:
        waits = [
            int(text.replace(",", "")) for text in re.findall(r"([\d,]+) ms", case["logged"] + case["exact"])
        ]
        assert waits[1] - waits[0] == 1


def test_the_page_needs_nothing_else_and_says_who(planted: tuple[Logged, Audited]):
    _, found = planted
    page = (found.folder / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page
    assert "<script" not in page
    assert not re.search(r"https?://|\burl\(|@import|<link|\bsrc=", page)
    assert "prefers-color-scheme: dark" in page
    assert page.count("<svg") == 3
    for name in ("forgetful", "gullible", "lenient", "impatient", "double", "grasping", held.LOST, held.OVER):
        assert name in page
    assert not list(found.folder.rglob("*.crc"))


def test_names_do_not_become_markup(spark: SparkSession, tmp_path: Path):
    log = Logged(Oracle(SECRET))
    log.run(asks(1, ['<b onclick="x">', "a\x1b[31m"]), 60, (0, 100))
    found = audit(spark, log.write(tmp_path / "log"))
    page = (found.folder / "report.html").read_text(encoding="utf-8")
    assert "<b onclick" not in page
    assert "&lt;b onclick=&quot;x&quot;&gt;" in page
    assert found.held


def test_what_was_decided_right_is_held(spark: SparkSession, tmp_path: Path):
    log = Logged(Oracle(SECRET))
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
    found = audit(spark, log.write(tmp_path / "log"))
    assert found.held, (found.not_held, terminal.said(found.report, "report", 1.0))
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


def test_a_log_that_was_switched_on_over_a_store_in_use(spark: SparkSession, tmp_path: Path):
    log = Logged(Oracle(SECRET))
    ask = Ask({}, tuple(range(30)), "a", detail=True)
    log.ask(ask)
    log.rows.clear()
    log.batch = 0
    log.now_ms += 60_000
    log.ask(ask)
    folder = log.write(tmp_path / "log")
    found = audit(spark, folder)
    assert found.not_held == {"a": {held.FALSELY_SEEN, held.UNLIKELY}}
    assert "say --older" in terminal.said(found.report, "report", 1.0)
    assert audit(spark, folder, "--older").held


def test_only_the_period_is_judged_and_what_leads_to_it_is_known(spark: SparkSession, tmp_path: Path):
    log = Logged(faults.Faulty(SECRET, {"bad": faults.impatient}))
    log.run(asks(1, ["bad"]), 300, (0, 50))
    log.now_ms = START_MS + 200_000
    log.oracle.buckets.clear()
    from_ms = log.now_ms
    log.oracle.faults.clear()  # type: ignore[attr-defined]
    log.run(asks(2, ["bad"]), 300, (0, 50))
    folder = log.write(tmp_path / "log")
    instant = spelled(from_ms).replace(" UTC", "+00:00")
    after = audit(spark, folder, "--from", instant)
    assert after.held
    assert after.overall["asks"] == 300
    assert after.overall["unjudged"] == 0, "the buckets had rested"
    before = audit(spark, folder, "--to", instant)
    assert set(before.not_held) == {"bad"}
    assert before.overall["asks"] == 300


def test_a_period_in_which_all_was_refused(spark: SparkSession, tmp_path: Path):
    log = Logged(Oracle(SECRET))
    for limits in log.quotas.values():
        limits.update({entity: replace(quota, limit=0, burst=0) for entity, quota in limits.items()})
    for _ in range(30):
        log.now_ms += 50
        log.ask(Ask({"mutations": 1, "fetch_bytes": 10}, None, "a", "etl", detail=True))
    assert {row["decision"] for row in log.rows} == {"reject"}
    found = audit(spark, log.write(tmp_path / "log"))
    assert found.held
    assert found.overall["judged"] == 60
