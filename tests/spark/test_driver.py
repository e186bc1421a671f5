"""Spark runs the functions of one machine: the same findings, errors of one line, the user's settings."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import expr

from app.domain.oracle import Oracle
from tests.jobs.logs import SECRET, OracleLog, asks
from tests.jobs.tampering import KINDS, traffic
from tests.spark.driver import OnSpark
from tests.spark.java import quick_start
from workers.jobs import command
from workers.jobs.__main__ import Processes
from workers.jobs.audit import report
from workers.jobs.command import Driver
from workers.jobs.errors import JobUsageError
from workers.spark import frames

TABLES = ("principals", "buckets", "cases", "overall")


@pytest.fixture(scope="module")
def tampered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One log with every kind of tampering, each in traffic of its own."""
    names = [f"t{number:02d}" for number in range(len(KINDS))]
    made, parts = traffic([*names, "honest"])
    for name, kind in zip(names, KINDS, strict=True):
        whose = kind.of or name
        parts[whose] = kind.does(parts[whose])
    log = tmp_path_factory.mktemp("tampered") / "log"
    rows = [row for part in parts.values() for row in part]
    for file in range(3):
        made.write(log, rows[file::3], f"part-{file}")
    return log


@pytest.fixture(autouse=True)
def partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "ROWS_OF_A_PARTITION", 3_000)


def audited(driver: Driver, log: Path, out: Path, *more: str) -> int:
    return command.main(driver, ["audit", "--log", str(log), "--out", str(out), *more])


def hold_to_each_other(one: Path, other: Path) -> None:
    """Hold two reports to each other."""
    for table in TABLES:
        assert pq.read_table(one / table).equals(pq.read_table(other / table)), table
    assert (one / "report.html").read_text() == (other / "report.html").read_text()
    assert (one / "summary.json").read_text() == (other / "summary.json").read_text()


def test_both_drivers_find_the_same_in_a_log_with_every_kind_of_tampering(
    spark: SparkSession, tampered: Path, tmp_path: Path
):
    assert audited(Processes(), tampered, tmp_path / "alone") == 1
    assert audited(OnSpark(spark), tampered, tmp_path / "spark") == 1
    hold_to_each_other(tmp_path / "alone", tmp_path / "spark")


KEPT = (
    "a refusal is taken out",
    "a batch is taken out",
    "a bucket is logged with less content",
    "another quota is blamed",
)
"""Kinds of tampering after which a state goes on."""


@pytest.mark.parametrize("seed", range(3))
def test_either_driver_goes_on_from_the_state_of_the_other(
    seed: int, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(report, "SETTLED_MS", 2_000)
    dice = random.Random(seed)
    made, parts = traffic([*KEPT, "honest"])
    for kind in KINDS:
        if kind.name in KEPT:
            parts[kind.name] = kind.does(parts[kind.name])
    rows = sorted((row for mine in parts.values() for row in mine), key=lambda row: row["at_ms"])
    cuts = [0, *sorted(dice.randrange(100, len(rows)) for _ in range(seed + 1)), len(rows)]
    drivers: list[Driver] = [Processes(), OnSpark(spark)]
    for number, (begin, end) in enumerate(pairwise(cuts)):
        made.write(tmp_path / "log", rows[begin:end], f"part-{number}")
        given = ("--state", str(tmp_path / "state"), "--overwrite")
        assert audited(drivers[(number + seed) % 2], tmp_path / "log", tmp_path / "out", *given) == 1
    assert audited(Processes(), tmp_path / "log", tmp_path / "whole") == 1
    assert (tmp_path / "out/summary.json").read_text() == (tmp_path / "whole/summary.json").read_text()
    for table in TABLES:
        mine, theirs = (pq.read_table(tmp_path / name / table) for name in ("out", "whole"))
        assert mine.equals(theirs), table


@pytest.fixture
def frame(spark: SparkSession, tampered: Path) -> DataFrame:
    """The log as a table: each row group is read by Spark, with its types."""
    return spark.read.option("recursiveFileLookup", "true").parquet(str(tampered))


def test_data_frame_gives_the_findings_of_its_files(frame: DataFrame, tampered: Path, tmp_path: Path):
    """A kind that repeats rows is in the log: the first copy counts, which needs one order of reading."""
    assert frame.rdd.getNumPartitions() > 1
    assert frames.run(frame, ["audit", "--out", str(tmp_path / "frame")]) == 1
    assert audited(Processes(), tampered, tmp_path / "alone") == 1
    for table in ("principals", "buckets", "overall"):
        mine, theirs = (pq.read_table(tmp_path / name / table) for name in ("frame", "alone"))
        assert mine.equals(theirs), table


def test_data_frame_without_a_column_is_refused(frame: DataFrame, tmp_path: Path):
    with pytest.raises(JobUsageError, match="the data frame: lacks the columns order, verdicts"):
        frames.run(frame.drop("order", "verdicts"), ["audit", "--out", str(tmp_path / "out")])


def test_data_frame_has_no_state(frame: DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert (
        frames.run(frame, ["audit", "--out", str(tmp_path / "out"), "--state", str(tmp_path / "state")]) == 2
    )
    assert capsys.readouterr().err.startswith("quotagate: --state: a state covers files of the log")


@pytest.mark.parametrize(
    ("name", "changed", "says"),
    [
        ("at_ms", "timestamp_millis(at_ms)", "column at_ms: is timestamp.*, must be int64"),
        ("place", "string(place)", "column place: is string, must be int32"),
        (
            "verdicts",
            "transform(verdicts, each -> named_struct('quota', each.bucket_order))",
            "column verdicts.quota: is int64, must be string",
        ),
    ],
)
def test_data_frame_with_another_type_is_refused_by_column(
    frame: DataFrame, tmp_path: Path, name: str, changed: str, says: str
):
    with pytest.raises(JobUsageError, match=f"^the data frame: {says}$"):
        frames.run(frame.withColumn(name, expr(changed)), ["audit", "--out", str(tmp_path / "out")])


def test_empty_data_frame_is_refused(frame: DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert frames.run(frame.limit(0), ["audit", "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == "quotagate: the data frame: has no rows\n"


def test_damaged_file_is_named_in_one_line(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    made = OracleLog(Oracle(SECRET))
    made.run(asks(1, ["a", "b"]), 50, (0, 10))
    made.write(tmp_path / "log")
    [file] = (tmp_path / "log").rglob("*.parquet")
    data = bytearray(file.read_bytes())
    data[4 : len(data) // 2] = bytes(len(data) // 2 - 4)
    file.write_bytes(data)
    assert audited(OnSpark(spark), tmp_path / "log", tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert said.startswith(f"quotagate: {file}: ")
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("defaults", "given", "shown"),
    [
        ("", {}, {"spark.ui.enabled": "false", "spark.driver.memory": "2g"}),
        (
            "# ours\nspark.ui.enabled = true\nspark.driver.memory 600m\nspark.app.note: a b\n",
            {"spark.app.other": "x=y"},
            {
                "spark.ui.enabled": "true",
                "spark.driver.memory": "600m",
                "spark.app.note": "a b",
                "spark.app.other": "x=y",
            },
        ),
        ("spark.ui.enabled true", {"spark.ui.enabled": "false"}, {"spark.ui.enabled": "false"}),
    ],
)
def test_settings_of_the_user_win(
    defaults: str, given: dict[str, str], shown: dict[str, str], tmp_path: Path
):
    """In a program of its own, as the settings of Java hold from its start."""
    (tmp_path / "spark-defaults.conf").write_text(defaults)
    options = [part for name, value in given.items() for part in ("--conf", f"{name}={value}")]
    found = subprocess.run(
        [sys.executable, "-m", "tests.spark.settings", *options, f"--java={quick_start()}"],
        env={**os.environ, "SPARK_CONF_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    settings = json.loads(found.stdout)
    assert {name: settings.get(name) for name in shown} == shown
    assert (settings["url of the UI"] is not None) == (shown["spark.ui.enabled"] == "true")
