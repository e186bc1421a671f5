"""Each kind of tampering with a log is found and named; an honest log gives no finding.

The rules find most kinds without Spark; one test runs the job over all of them.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from tests.spark.audits import AuditResult, audit, judge
from tests.spark.logs import Row
from tests.spark.tampering import KINDS, Kind, Rows, traffic
from workers.decision_log.schema import SCHEMA
from workers.spark.audit import findings
from workers.spark.audit.batches import BatchSummary, content_of, fault_of
from workers.spark.audit.contradictions import contradictions, decision_rows, wrong_decision
from workers.spark.audit.judge import AuditRules

NAMES = tuple(f"t{number:02d}" for number in range(len(KINDS)))


@pytest.fixture(scope="module")
def one() -> Rows:
    """The rows of one honest traffic."""
    return traffic(["one"])[1]["one"]


def look(rows: Rows) -> dict[str, Any]:
    """The findings of the rules, without Spark: by name, each with an example."""
    found: dict[str, Any] = {}
    contents: dict[tuple[str, int], set[str]] = {}
    each_once: dict[tuple[str, int], Row] = {}
    for row in rows:
        contents.setdefault((row["batch"], row["place"]), set()).add(content_of(row))
        each_once.setdefault((row["batch"], row["place"]), row)
    if twice := [which for which, all_ in contents.items() if len(all_) > 1]:
        found[findings.TWICE] = twice
    batches: dict[str, Rows] = {}
    for row in each_once.values():
        batches.setdefault(row["batch"], []).append(row)
    for name, batch in batches.items():
        wrong = fault_of(summary_of(name, batch))
        found |= {findings.GAPS: wrong} if wrong.missing else {}
        found |= {findings.ADDED: wrong} if wrong.added else {}
    table = pa.Table.from_pylist(list(each_once.values()), schema=SCHEMA)
    for decided in decision_rows(table.to_batches()):
        for each in contradictions(decided):
            found[findings.CLOCK if each.field == "clock" else findings.CONTRADICTS] = each
        if difference := wrong_decision(decided, sequential=False):
            found.setdefault(findings.DIFFERS, difference)
    return found | of_buckets(list(each_once.values()))


def summary_of(name: str, batch: Rows) -> BatchSummary:
    says = [row["batch_rows"] for row in batch]
    beyond = sum(row["place"] >= row["batch_rows"] for row in batch)
    places = [row["place"] for row in batch]
    return BatchSummary(
        name, len(places), beyond, max(places), min(says), max(says), min(row["at_ms"] for row in batch)
    )


def of_buckets(rows: Rows) -> dict[str, Any]:
    """The findings of the judges of the buckets, except those that asks without the store may have caused."""
    resets: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if row["kind"] == "reset":
            for quota in json.loads(row["change"]["before"])["quotas"]:
                resets.setdefault((row["change"]["what"], quota), []).append(row["order"])
    said = judge(rows, AuditRules(resets=resets))
    may: Counter[tuple[str, str]] = Counter()
    named = set()
    for row in rows:
        is_late = row["kind"] == "late"
        if is_late or row["source"] == "fallback":
            may.update({(v["quota"], v["bucket"]): -1 if is_late else 1 for v in row["verdicts"]})
            named |= {(row["principal"], each) for each in row["ids"] or ()}
    unlogged: Counter[tuple[str, str]] = Counter()
    for (quota, bucket, _), tally in said.tallies.items():
        unlogged[quota, bucket] += tally["unlogged"]
    cases: dict[str, Any] = {
        name: [case for case in said.cases if case["case"] == kind]
        for name, kind in (
            (findings.DIFFERS, "differs"),
            (findings.LOST, "lost"),
            (findings.ALTERED, "altered"),
        )
    }
    cases[findings.SAME_ORDER] = [case for case in said.cases if case["case"] == "same_order"]
    cases[findings.UNTOLD] = [which for which, times in unlogged.items() if times > may[which]]
    strangers: Counter[int] = Counter()
    among = {}
    for case in said.cases:
        if case["case"] == "falsely_seen" and (case["principal"], case["digest"]) not in named:
            strangers[case["order"]] += int(case["amount"])
            among[case["order"]] = case["among"]
    cases[findings.UNLIKELY] = [
        order for order, times in strangers.items() if findings.unlikely(times, among[order], len(rows))
    ]
    return {name: what for name, what in cases.items() if what}


def test_honest_log_has_no_findings(one: Rows):
    kinds = Counter((row["kind"], row["source"], row["mode"], row["replayed"]) for row in one)
    for wanted in (
        ("late", "store", "admit", False),
        ("decision", "fallback", "admit", False),
        ("decision", "local", "admit", False),
        ("decision", "store", "record", False),
        ("decision", "store", "peek", False),
        ("decision", "store", "refund", False),
        ("decision", "store", "admit", True),
        ("reset", None, None, False),
        ("factor", None, None, False),
    ):
        assert kinds[wanted], wanted
    assert not look(one)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.by_spark], ids=lambda kind: kind.name)
def test_rules_find_tampering_by_its_name(one: Rows, kind: Kind):
    found = look(kind.does(copy.deepcopy(one)))
    assert kind.named in found, found


def test_document_lists_every_kind_of_tampering():
    text = (Path(__file__).parents[2] / "docs/pipeline.md").read_text(encoding="utf-8")
    table = [f"| {kind.name} | {kind.named}{' *' if kind.by_spark else ''} |" for kind in KINDS]
    assert "\n".join(table) in text
    assert len(KINDS) == 36, "which the README says too"


@pytest.fixture(scope="module")
def tampered(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> AuditResult:
    """One log in which each traffic was tampered with in a way of its own, and one was not."""
    made, parts = traffic([*NAMES, "honest"])
    for name, kind in zip(NAMES, KINDS, strict=True):
        whose = kind.of or name
        parts[whose] = kind.does(parts[whose])
    rows = [row for part in parts.values() for row in part]
    return audit(spark, made.write(tmp_path_factory.mktemp("tampered") / "log", rows))


@pytest.mark.parametrize(
    ("name", "kind"), list(zip(NAMES, KINDS, strict=True)), ids=[kind.name for kind in KINDS]
)
def test_job_finds_tampering_where_it_was_done(tampered: AuditResult, name: str, kind: Kind):
    report = tampered.report
    where = "last" if kind.of else name
    if kind.named == findings.GAPS:
        assert any(batch.batch.startswith(where) and batch.missing for batch in report["inside"])
    elif kind.named == findings.ADDED:
        assert any(batch.batch.startswith(where) and batch.added for batch in report["inside"])
    elif kind.named == findings.TWICE:
        assert any(batch.startswith(where) for batch, _ in report["twice"])
    elif kind.named == findings.ABSENT:
        assert report["absent"] == (f"{where}-2",)
    elif kind.named == findings.MISSING:
        assert any(node.node.startswith(where) for node in report["lacking"])
    else:
        mine = {
            what
            for who, names in tampered.not_held.items()
            if (who or "").startswith((where, "some"))
            for what in names
        }
        assert kind.named in mine, tampered.not_held
        return
    assert kind.named in tampered.overall["not_held"]


def test_job_finds_nothing_in_untouched_traffic(tampered: AuditResult):
    assert not any((who or "").startswith("honest") for who in tampered.not_held)
    report = tampered.report
    named = [batch.batch for batch in report["inside"]] + [node.node for node in report["lacking"]]
    assert not any(each.startswith("honest") for each in [*named, *report["absent"]])


def test_job_passes_an_honest_log(spark: SparkSession, tmp_path: Path):
    made, parts = traffic(["one", "two"])
    found = audit(spark, made.write(tmp_path / "log", [row for part in parts.values() for row in part]))
    assert found.held, (found.not_held, found.overall["not_held"], found.cases)
