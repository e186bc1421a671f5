"""Reading the log: only the files of a period, each row once; an invalid file is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from app.domain.oracle import Oracle
from tests.spark.audits import asked_of
from tests.spark.logs import SECRET, START_MS, OracleLog, asks
from workers.decision_log.schema import HOUR_MS, OLDEST, SCHEMA, VERSION, VERSION_KEY
from workers.spark import log
from workers.spark.buckets import bucket_rows, by_bucket
from workers.spark.errors import JobError, JobUsageError, explain
from workers.spark.log import Period


@pytest.fixture(scope="module")
def logged() -> OracleLog:
    made = OracleLog(Oracle(SECRET))
    for hour in range(3):
        made.now_ms = START_MS + hour * HOUR_MS
        made.run(asks(hour, ("a", "b")), 60, (0, 10, 1_000), hour)
    return made


@pytest.fixture(scope="module")
def good(logged: OracleLog, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return logged.write(tmp_path_factory.mktemp("good") / "log")


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "log"))


def file_of(folder: Path, hour: int) -> Path:
    return folder / f"date=2026-11-21/hour={10 + hour}/part.parquet"


def test_period_is_read_from_its_own_files_only(spark: SparkSession, folder: Path):
    file_of(folder, 0).write_bytes(b"this hour is not looked at")
    half = START_MS + HOUR_MS + 20_000
    rows = log.read(spark, str(folder), Period(half, START_MS + 2 * HOUR_MS + 1)).collect()
    times = [row["at_ms"] for row in rows]
    assert min(times) >= half
    assert max(times) == START_MS + 2 * HOUR_MS
    assert len(rows) < 61


def test_repeated_rows_count_once(spark: SparkSession, folder: Path, logged: OracleLog):
    logged.write(folder, logged.rows[30:90], "again")
    assert log.read_all(spark, str(folder), Period()).count() == 240
    rows = log.read(spark, str(folder), Period()).select("batch", "place").collect()
    assert len(rows) == len(set(rows)) == 180


def test_many_repeated_batches(
    spark: SparkSession, folder: Path, logged: OracleLog, monkeypatch: pytest.MonkeyPatch
):
    logged.write(folder, name="again")
    monkeypatch.setattr(log, "MANY_BATCHES", 0)
    assert log.read(spark, str(folder), Period()).count() == 180


def test_rows_by_bucket_equal_the_rows_of_the_log(spark: SparkSession, good: Path, logged: OracleLog):
    rows = log.read(spark, str(good), Period())
    found = list(bucket_rows(by_bucket(rows).toArrow().to_batches()))
    assert sorted(found, key=lambda one: (one.key, one.order)) == asked_of(logged.rows)
    keys = [one.key for one in found]
    begun = [key for place, key in enumerate(keys) if place == 0 or keys[place - 1] != key]
    assert len(begun) == len(set(begun)), "the rows of a bucket are together"
    orders: dict[str, list[int]] = {}
    for one in found:
        orders.setdefault(one.key, []).append(one.order)
    assert all(order == sorted(order) for order in orders.values())


def test_empty_period_is_refused(spark: SparkSession, good: Path):
    with pytest.raises(
        JobError, match=r"no row in the period from 2026-11-22 .*the log has hours 2026-11-21 10 to 2026"
    ):
        log.read(spark, str(good), Period.of("2026-11-22T00:00:00Z", None))


def test_folder_without_a_log_is_refused(spark: SparkSession, tmp_path: Path):
    with pytest.raises(JobError, match="has no decision log"):
        log.read(spark, str(tmp_path), Period())
    with pytest.raises(JobError, match="nowhere: cannot be listed"):
        log.read(spark, str(tmp_path / "nowhere"), Period())
    with pytest.raises(JobError, match="nowhere://"):
        log.read(spark, "nowhere://bucket/log", Period())


def without(table: pa.Table, column: str) -> pa.Table:
    return table.drop_columns([column])


def narrower_verdicts(table: pa.Table) -> pa.Table:
    verdict = SCHEMA.field("verdicts").type.value_type
    fields = [verdict.field(place) for place in range(verdict.num_fields)]
    type_ = pa.list_(pa.struct([field for field in fields if field.name != "charged_ids"]))
    place = table.schema.get_field_index("verdicts")
    return table.set_column(place, pa.field("verdicts", type_), pa.nulls(table.num_rows, type_))


def of_version(table: pa.Table, version: int | None) -> pa.Table:
    return table.replace_schema_metadata(None if version is None else {VERSION_KEY: str(version)})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda table: without(table, "order"), "column order: is missing"),
        (lambda table: without(table, "verdicts"), "column verdicts: is missing"),
        (narrower_verdicts, "column verdicts: "),
        (lambda table: of_version(table, VERSION + 1), "metadata quotagate.schema: .*newer"),
        (lambda table: of_version(table, OLDEST - 1), "metadata quotagate.schema: .*older"),
        (lambda table: of_version(table, None), "metadata quotagate.schema: "),
    ],
    ids=["column", "verdicts", "field of a struct", "newer", "older", "no version"],
)
def test_file_with_wrong_columns_is_named(spark: SparkSession, folder: Path, change, field: str):
    file = file_of(folder, 1)
    pq.write_table(change(pq.read_table(file, partitioning=None)), file)
    with pytest.raises(JobError, match=field) as refused:
        log.read(spark, str(folder), Period())
    assert str(refused.value).startswith(str(file))


def test_time_outside_the_hour_of_its_folder_is_named(spark: SparkSession, folder: Path, logged: OracleLog):
    """A period is read from the files of its hours, so it would miss such a row silently."""
    file = file_of(folder, 1)
    row = next(row for row in logged.rows if row["at_ms"] >= START_MS + HOUR_MS)
    stray = START_MS + 3 * HOUR_MS
    rows = pa.Table.from_pylist([row, row | {"at_ms": stray}], schema=SCHEMA)
    pq.write_table(rows, file)
    with pytest.raises(JobError) as refused:
        log.read(spark, str(folder), Period(START_MS + HOUR_MS, START_MS + 2 * HOUR_MS))
    assert (
        str(refused.value) == f"{file}: column at_ms: has {stray}, which belongs in date=2026-11-21/hour=13"
    )


@pytest.mark.parametrize("name", ["a[b] c%20#d", "x{y}z*", "back\\slash?"])
def test_folder_name_is_not_taken_as_a_pattern(spark: SparkSession, good: Path, tmp_path: Path, name: str):
    folder = shutil.copytree(good, tmp_path / name)
    assert log.read(spark, str(folder), Period()).count() == 180


@pytest.mark.parametrize(
    ("url", "listed", "spark_s"),
    [
        ("s3://bucket/log?region=eu", "bucket/log/a[1].parquet", r"s3a://bucket/log/a\[1\].parquet"),
        ("hdfs://namenode:8020/log", "/log/a.parquet", "hdfs://namenode:8020/log/a.parquet"),
        *(
            (url, "box/log/a.parquet", "abfss://box@acc.dfs.core.windows.net/log/a.parquet")
            for url in (
                "abfss://box@acc.dfs.core.windows.net/log",
                "abfss://box:key@acc.dfs.core.windows.net/log",
                "abfss://acc.blob.core.windows.net/box/log",
                "abfss://acc:key@box/log",
            )
        ),
    ],
)
def test_listed_file_gets_its_hadoop_url(url: str, listed: str, spark_s: str):
    assert log._spark_path(url, listed) == spark_s


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://me:secret@host/log", r"ftp://\.\.\.: must be a path, or begin with one of file://, "),
        ("s3://[me:secret@host/log", r"s3://\.\.\.: is not a valid URL; "),
        ("s3://me:secret/@host/log", r"s3://\.\.\.: "),
    ],
)
def test_refused_url_does_not_show_its_secret(spark: SparkSession, url: str, says: str):
    with pytest.raises(JobError, match=f"^{says}") as refused:
        log.read(spark, url, Period())
    assert "secret" not in str(refused.value)


def test_azure_url_without_account_is_refused():
    with pytest.raises(JobError, match=r"abfs://\.\.\.: must be CONTAINER@ACCOUNT"):
        log._spark_path("abfs://box/log", "box/log/a.parquet")


def test_truncated_file_is_named(spark: SparkSession, folder: Path):
    file = file_of(folder, 1)
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(JobError, match=f"{file}: cannot be read as Parquet"):
        log.read(spark, str(folder), Period())


def test_file_being_written_is_ignored(spark: SparkSession, folder: Path):
    (folder / "date=2026-11-21/hour=10/_next.parquet").write_bytes(b"PAR1 half of")
    assert log.read(spark, str(folder), Period()).count() == 180


def test_corrupt_file_is_named(spark: SparkSession, folder: Path):
    file = file_of(folder, 1)
    data = bytearray(file.read_bytes())
    data[4 : len(data) // 2] = bytes(len(data) // 2 - 4)
    file.write_bytes(data)
    with pytest.raises(Exception, match="FAILED_READ_FILE") as failed:
        log.read(spark, str(folder), Period()).toArrow()
    said = explain(str(failed.value))
    assert said.startswith(f"{file}: "), said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("from_", "to", "says"),
    [
        ("yesterday", None, "--from: 'yesterday' must be an instant"),
        (None, "2026-13-01", "--to: "),
        ("2026-11-21T11:00:00Z", "2026-11-21T12:00:00+01:00", "is not after"),
    ],
)
def test_invalid_periods_are_wrong_use(from_: str | None, to: str | None, says: str):
    with pytest.raises(JobUsageError, match=says):
        Period.of(from_, to)


def test_lead_in_begins_earlier():
    assert Period(9_000_000, 9_500_000).with_lead_in(1.5) == Period(3_600_000, 9_500_000)
    assert Period(None, 5).with_lead_in(1.5) == Period(None, 5)


def test_instant_without_offset_is_utc():
    assert Period.of("2026-11-21T10:00:00", "2026-11-21T12:00:00.5+01:00") == Period(
        START_MS, START_MS + HOUR_MS + 500
    )
