"""The job `backfill` on Spark: its functions give the same assertions as in a process of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from app.domain.oracle import Oracle
from tests.jobs.backfills import assertions, made
from tests.jobs.logs import SECRET, START_MS, OracleLog, asks
from tests.spark.driver import OnSpark
from workers.jobs.backfill import foreign, logged
from workers.jobs.errors import JobError


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUOTAGATE_HASH_SECRET", SECRET.hex())
    for module in (foreign, logged):
        monkeypatch.setattr(module, "partitions_for", lambda _: 3)


def same(spark: SparkSession, tmp_path: Path, **given: Any) -> int:
    """Hold a run on Spark to one without; return how many assertions there are."""
    alone = made(tmp_path / "alone", **given)
    on_spark = made(tmp_path / "on-spark", driver=OnSpark(spark), **given)
    assert (on_spark.at_ms, on_spark.secret, on_spark.rows) == (alone.at_ms, alone.secret, alone.rows)
    assert assertions(on_spark) == assertions(alone)
    return alone.rows


def test_log_gives_the_same_assertions(spark: SparkSession, tmp_path: Path):
    history = OracleLog(Oracle(SECRET))
    history.run(asks(1, ("a", "b", "c d")), 300, (0, 1, 40, 400, -30))
    history.write(tmp_path / "log", history.rows[::2], "one")
    history.write(tmp_path / "log", history.rows[1::2], "two")
    assert same(spark, tmp_path, log=str(tmp_path / "log")) > 100


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_history_gives_the_same_assertions(spark: SparkSession, tmp_path: Path, kind: str):
    uses = [
        {"principal": f"p{number % 7}", "id": number % 50, "time": START_MS + number} for number in range(300)
    ]
    (tmp_path / "uses").mkdir()
    for part in range(3):
        if kind == "json":
            lines = "".join(json.dumps(use) + "\n" for use in uses[part::3])
            (tmp_path / "uses" / f"{part}.json").write_text(lines)
        else:
            pq.write_table(pa.Table.from_pylist(uses[part::3]), tmp_path / "uses" / f"{part}.parquet")
    assert same(spark, tmp_path, history=str(tmp_path / "uses"), format=kind) > 300


def test_invalid_value_is_refused_by_its_file(spark: SparkSession, tmp_path: Path):
    (tmp_path / "uses.json").write_text('{"principal": "a", "id": 1.5, "time": 1}\n')
    with pytest.raises(JobError, match=r"uses\.json: field id: must be a signed 64-bit integer or a text"):
        made(tmp_path / "out", driver=OnSpark(spark), history=str(tmp_path / "uses.json"))
