"""The audit of two nodes under traffic, the rebuild of a lost store, and a script that forgets charges."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
import redis

from tests.logged import LIMIT, Logged, logged_id, two_nodes, workers
from tests.spark.java import quick_jobs
from workers.generate.traffic import Traffic

pytestmark = pytest.mark.timeout(900)

TRAFFIC = Traffic(seed=11, events=4_000)
OUTCOMES = ("admit", "delay", "throttle", "reject")
Ids = dict[str, set[int]]


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[Logged]:
    with two_nodes(tmp_path / "log") as found, workers(found):
        yield found


def test_decisions_are_audited_and_a_lost_store_is_rebuilt(logged, tmp_path):
    totals = logged.drive(TRAFFIC, tmp_path / "truth")
    logged.until_written(TRAFFIC.events)

    report = tmp_path / "report"
    quick = quick_jobs()
    audit = logged.run("spark", "audit", "--out", str(report), environment=quick)
    print(audit.stdout)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert "All bounds held" in audit.stdout
    falsely_seen = named_as_seen(report)
    agrees(report, totals, charged_in(tmp_path / "truth"), falsely_seen)

    charged = {name: ids - falsely_seen[name] for name, ids in charged_in(tmp_path / "truth").items()}
    known = remembered(logged, charged)
    assert known == {name: len(ids) for name, ids in charged.items()}
    with redis.Redis.from_url(logged.nodes[0].store_url) as store:
        store.flushall()
    assert remembered(logged, charged) == dict.fromkeys(charged, 0), "the store is empty"

    backfill = logged.run("spark", "backfill", "--out", str(tmp_path / "assertions"), environment=quick)
    assert backfill.returncode == 0, backfill.stdout + backfill.stderr
    load = logged.run("backfill", "load", str(tmp_path / "assertions"))
    assert load.returncode == 0, load.stdout + load.stderr
    print(backfill.stdout + load.stdout)
    assert remembered(logged, charged) == known, "each id in use is known again, and was charged once"

    logged.drive(TRAFFIC, tmp_path / "again")
    rows = logged.until_written(2 * TRAFFIC.events)[TRAFFIC.events :]
    twice = {name: ids & charged.get(name, set()) for name, ids in charged_by(rows).items()}
    assert not any(twice.values()), "the same traffic again charges none of them"
    full = {name for name, ids in charged.items() if len(ids) == LIMIT}
    assert full, "some principals had reached the limit"
    assert not full & {name for name, ids in charged_by(rows).items() if ids}, "and are still at it"


def test_script_that_sometimes_forgets_a_charge_fails_the_audit(tmp_path):
    with two_nodes(tmp_path / "log", program="tests.forgetful") as logged, workers(logged):
        logged.drive(TRAFFIC, tmp_path / "truth")
        logged.until_written(TRAFFIC.events)
        charged = charged_in(tmp_path / "truth")
        held = remembered(logged, charged)
        quick = quick_jobs()
        audit = logged.run("spark", "audit", "--out", str(tmp_path / "report"), environment=quick)
    print(audit.stdout)
    wronged = {name for name, ids in charged.items() if held[name] < len(ids)}
    assert len(wronged) > 5, "the script forgot charges"
    assert audit.returncode == 1, audit.stdout + audit.stderr
    assert "Not all bounds held" in audit.stdout
    table = ds.dataset(tmp_path / "report" / "principals").to_table().to_pylist()
    named = {row["principal"] for row in table if row["not_held"]}
    assert named == wronged
    assert sum(name in audit.stdout for name in named) >= min(len(named), 10), "the terminal shows them"


def agrees(report: Path, totals: dict[str, Any], charged: Ids, falsely_seen: Ids) -> None:
    """Check that the audit's counts equal the truth, except for ids falsely taken as seen."""
    table = ds.dataset(report / "principals").to_table().to_pylist()
    by_name = {row["principal"]: row for row in table}
    truth = {None: totals["connections"], **totals["principals"]}
    assert by_name.keys() == truth.keys()
    for name, wanted in truth.items():
        found = by_name[name]
        assert {each: found[each] for each in ("asks", *OUTCOMES)} == {
            each: wanted[each] for each in ("asks", *OUTCOMES)
        }
        assert found["not_held"] == []
    for name, ids in charged.items():
        assert by_name[name]["charged_ids"] == len(ids - falsely_seen[name]), name
        assert by_name[name]["falsely_seen"] == len(falsely_seen[name]), name
    (overall,) = ds.dataset(report / "overall").to_table().to_pylist()
    assert overall["asks"] == totals["overall"]["asks"] == TRAFFIC.events
    assert overall["judged"] == overall["verdicts"] > TRAFFIC.events, "nothing was left out"
    assert (overall["fallback"], overall["unordered"], overall["lost"]) == (0, 0, 0)
    missed = sum(len(ids) for ids in falsely_seen.values())
    assert overall["charged_ids"] == totals["overall"]["charged"] - missed
    assert (report / "report.html").stat().st_size > 10_000


def charged_in(truth: Path) -> Ids:
    """The ids, as digests, that exact sets would have charged."""
    found: Ids = defaultdict(set)
    for use in ds.dataset(truth / "uses-0.parquet").to_table().to_pylist():
        if use["charged"]:
            found[use["principal"]].add(logged_id(use["principal"], use["id"]))
    return found


def charged_by(rows: list[dict[str, Any]]) -> Ids:
    """The charged ids according to the log; fails if one was charged twice."""
    found: Counter[tuple[str, int]] = Counter()
    for row in rows:
        for verdict in row["verdicts"]:
            found.update((row["principal"], each) for each in verdict["charged_ids"] or ())
    assert max(found.values(), default=1) == 1
    ids: Ids = defaultdict(set)
    for name, each in found:
        ids[name].add(each)
    return ids


def named_as_seen(report: Path) -> Ids:
    """The new ids that were taken as seen, according to the audit."""
    cases = ds.dataset(report / "cases").to_table().to_pylist()
    found: Ids = defaultdict(set)
    for case in cases:
        if case["case"] == "falsely_seen":
            found[case["principal"]].add(case["digest"])
    return found


def remembered(logged: Logged, charged: Ids) -> dict[str, int]:
    """The number of ids the store has charged to each principal in the window, which it also remembers."""
    found = {}
    for name in charged:
        asked = {"bucket": f"user={name}", "quota": "producer_ids_rate"}
        (shown,) = logged.nodes[1].http.get("/v1/buckets", params=asked).json()["buckets"]
        found[name] = shown["charged_ids"]
    return found
