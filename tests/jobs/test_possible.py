"""A row that no node can have written is a finding; no value of a log ends an audit without a report."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from app.domain.oracle import Oracle
from tests.jobs.audits import audit
from tests.jobs.backfills import of_log
from tests.jobs.logs import SECRET, OracleLog, Row, asks
from workers.jobs.audit import findings
from workers.jobs.audit.possible import EXAMPLES
from workers.jobs.errors import JobError

NO_NUMBERS = (math.nan, math.inf, -math.inf)


@pytest.fixture(scope="module")
def honest() -> OracleLog:
    made = OracleLog(Oracle(SECRET))
    made.run(asks(3, ["a", "b"]), 120, (0, 1, 5, 20))
    return made


def of(rows: list[Row], algorithm: str) -> Row:
    """The last verdict by an algorithm, of an ask that was charged."""
    return next(
        verdict
        for row in reversed(rows)
        for verdict in row["verdicts"]
        if verdict["algorithm"] == algorithm and row["charged"]
    )


IMPOSSIBLE = pytest.mark.parametrize(
    ("algorithm", "changed"),
    [
        *(("sampled_rate", {"sample_ms": value}) for value in (0, -1)),
        *(("sampled_rate", {"samples": value}) for value in (0, -1, 2**31 - 1)),
        *((kind, {name: value}) for kind in ("sampled_rate", "token_bucket", "producer_ids")
          for name in ("limit", "usage", "observed", "remaining") for value in NO_NUMBERS),
        *(("token_bucket", {"burst": value}) for value in (math.nan, math.inf, -1.0)),
        *((kind, {"limit": -1.0}) for kind in ("sampled_rate", "token_bucket", "producer_ids")),
        *(("producer_ids", {"observed": value}) for value in (-1.0, -1e308, 1e308)),
        *(("producer_ids", {name: 0}) for name in ("window_ms", "interval_ms", "ttl_ms")),
        *(("sampled_rate", {name: "x"}) for name in ("quota", "algorithm", "outcome", "enforcement")),
    ],
    ids=str,
)  # fmt: skip


@IMPOSSIBLE
def test_impossible_verdict_is_a_finding(
    honest: OracleLog, tmp_path: Path, algorithm: str, changed: dict[str, Any]
):
    rows = copy.deepcopy(honest.rows)
    of(rows, algorithm).update(changed)
    found = audit(honest.write(tmp_path / "log", rows))
    assert any(findings.CONTRADICTS in names for names in found.not_held.values()), found.not_held


@IMPOSSIBLE
def test_backfill_refuses_a_log_with_an_impossible_verdict(
    honest: OracleLog, tmp_path: Path, algorithm: str, changed: dict[str, Any]
):
    rows = copy.deepcopy(honest.rows)
    of(rows, algorithm).update(changed)
    with pytest.raises(JobError, match="a row that no node can have written: `quotagate audit` names it"):
        of_log(honest.write(tmp_path / "log", rows))


UNKNOWN_WORDS = pytest.mark.parametrize(
    "changed", [{"mode": "steal"}, {"mode": ""}, {"kind": "decisions"}, {"kind": ""}], ids=str
)


@UNKNOWN_WORDS
def test_unknown_word_of_a_row_is_a_finding(honest: OracleLog, tmp_path: Path, changed: dict[str, str]):
    rows = copy.deepcopy(honest.rows)
    rows[50].update(changed)
    found = audit(honest.write(tmp_path / "log", rows))
    assert found.not_held[rows[50]["principal"]] >= {findings.CONTRADICTS}


@UNKNOWN_WORDS
def test_backfill_refuses_a_log_with_an_unknown_word(
    honest: OracleLog, tmp_path: Path, changed: dict[str, str]
):
    rows = copy.deepcopy(honest.rows)
    rows[50].update(changed)
    with pytest.raises(JobError, match="a row that no node can have written"):
        of_log(honest.write(tmp_path / "log", rows))


def test_forged_verdict_with_a_usage_that_is_no_number_is_found(honest: OracleLog, tmp_path: Path):
    rows = copy.deepcopy(honest.rows)
    for row in rows:
        for verdict in row["verdicts"]:
            if row["decision"] in {"throttle", "reject"} and verdict["algorithm"] != "producer_ids":
                verdict.update(outcome="admit", throttle_ms=0, usage=math.nan)
    assert not audit(honest.write(tmp_path / "log", rows)).held


@pytest.mark.parametrize("observed", [1e7, 1e12, 2.0**62])
def test_large_content_of_a_bucket_ends_soon(honest: OracleLog, tmp_path: Path, observed: float):
    rows = copy.deepcopy(honest.rows)
    of(rows, "producer_ids")["observed"] = observed
    assert not audit(honest.write(tmp_path / "log", rows)).held


@pytest.mark.parametrize("limit", [1e300, 2.0**63])
@pytest.mark.parametrize("algorithm", ["sampled_rate", "token_bucket", "producer_ids"])
def test_any_limit_ends_with_a_report(honest: OracleLog, tmp_path: Path, algorithm: str, limit: float):
    rows = copy.deepcopy(honest.rows)
    of(rows, algorithm).update(limit=limit)
    audit(honest.write(tmp_path / "log", rows))


def test_many_impossible_rows_are_counted_and_some_are_cases(honest: OracleLog, tmp_path: Path):
    rows = copy.deepcopy(honest.rows)
    for row in rows[:50]:
        row["mode"] = "steal"
    found = audit(honest.write(tmp_path / "log", rows))
    assert sum(each["contradicts"] for each in found.principals.values()) == 50
    assert len([case for case in found.cases if "steal" in case["logged"]]) == EXAMPLES
    assert all(each["quota"] for each in found.rows("buckets"))


@pytest.mark.parametrize("number", [-(2**63), 2**63 - 1])
def test_any_number_of_a_sibling_is_counted(honest: OracleLog, tmp_path: Path, number: int):
    rows = copy.deepcopy(honest.rows)
    rows[0]["siblings"] = [
        {"node": name, "number": each, "at_ms": rows[0]["at_ms"]} for name, each in (("n", 1), ("n", number))
    ]
    assert findings.MISSING in audit(honest.write(tmp_path / "log", rows)).overall["not_held"]


def without_value(table: pa.Table, name: str) -> pa.Table:
    """The table, whose column lacks a value in one row."""
    column = table.column(name)
    values = column.to_pylist()
    values[7] = None
    return table.set_column(
        table.schema.get_field_index(name), pa.field(name, column.type), pa.array(values, column.type)
    )


def with_bad_text(table: pa.Table) -> pa.Table:
    texts = [b"\xff" if place == 7 else text.encode() for place, text in enumerate(table["node"].to_pylist())]
    bad = pa.array(texts, pa.binary()).view(pa.string())
    return table.set_column(table.schema.get_field_index("node"), table.schema.field("node"), bad)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda table: without_value(table, "batch"), "column batch: is null in a row"),
        (lambda table: without_value(table, "usage"), "column usage: is null in a row"),
        (lambda table: without_value(table, "throttle_ms"), "column throttle_ms: is null in a row"),
        (with_bad_text, "UTF8"),
    ],
)
def test_file_with_an_invalid_value_is_refused_by_name(
    honest: OracleLog, tmp_path: Path, change: Callable[[pa.Table], pa.Table], says: str
):
    log = honest.write(tmp_path / "log")
    [file] = log.rglob("*.parquet")
    pq.write_table(change(pq.read_table(file, partitioning=None)), file)
    with pytest.raises(JobError, match=f"^{file}: .*{says}"):
        audit(log)
