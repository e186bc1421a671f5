"""Reading the log: only the files of a period, each row once; an invalid file is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from app.domain.oracle import Oracle
from tests.jobs.audits import asked_of
from tests.jobs.logs import SECRET, START_MS, OracleLog, asks
from workers.decision_log import schema
from workers.decision_log.schema import HOLDS, HOUR_MS, OLDEST, SCHEMA, VERSION, VERSION_KEY, with_secrets
from workers.jobs import batches, files
from workers.jobs.errors import JobError, JobUsageError
from workers.jobs.files import Fingerprints, FooterCheck, row_groups
from workers.jobs.period import Period
from workers.jobs.progress import Silent
from workers.jobs.runner import ProcessRunner
from workers.jobs.verdicts import BucketRow, VerdictPartition, partitioned, verdicts_of

COLUMNS = tuple(name for name in SCHEMA.names if name not in {"plain_ids", "siblings", "batch_rows"})

WHOLE = Period()


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


def tasks_of(folder: Path | str, period: Period) -> list[batches.Task]:
    """The tasks that read each row of a period once."""
    groups = row_groups(str(folder), period)
    with ProcessRunner(Silent(), 0) as runner:
        overview = batches.overview(runner, groups, period, period, 50)
        return batches.each_once(groups, period, batches.copies(runner, groups, overview, 50))


def read(folder: Path | str, period: Period = WHOLE, columns: Sequence[str] = COLUMNS) -> list[Any]:
    return [
        row
        for task in tasks_of(folder, period)
        for rows in task.each(columns)
        for row in rows.table.to_pylist()
    ]


def by_bucket(tasks: Iterable[batches.Task], partitions: int) -> list[list[BucketRow]]:
    """The rows of each bucket, as the jobs replay them."""
    pieces: list[list[pa.Table]] = [[] for _ in range(partitions)]
    for task in tasks:
        for rows in task.each(COLUMNS):
            for piece, table in zip(pieces, partitioned(verdicts_of(rows), partitions), strict=True):
                piece.append(table)
    return [list(bucket.rows()) for piece in pieces for bucket in VerdictPartition(piece)]


def test_period_is_read_from_its_own_files_only(folder: Path):
    file_of(folder, 0).write_bytes(b"this hour is not looked at")
    half = START_MS + HOUR_MS + 20_000
    times = [row["at_ms"] for row in read(folder, Period(half, START_MS + 2 * HOUR_MS + 1))]
    assert min(times) >= half
    assert max(times) == START_MS + 2 * HOUR_MS
    assert len(times) < 61


def test_repeated_rows_count_once(folder: Path, logged: OracleLog):
    logged.write(folder, logged.rows[30:90], "again")
    assert sum(task.rows for task in row_groups(str(folder), Period())) == 240
    identities = [(row["batch"], row["place"]) for row in read(folder)]
    assert len(identities) == len(set(identities)) == 180


def test_whole_log_that_is_there_twice_counts_once(folder: Path, logged: OracleLog):
    logged.write(folder, name="again")
    assert len(read(folder)) == 180


def test_sources_of_a_merged_file_are_not_read_while_they_stay(folder: Path, logged: OracleLog):
    """A merged file may be the source of a larger one; files that name each other are all read."""
    file = file_of(folder, 0)
    table = pq.read_table(file, partitioning=None)
    for name, holds in (("merged-1", ["part"]), ("merged-2", ["merged-1", "gone"])):
        said = json.dumps([f"{each}.parquet" for each in holds])
        merged = table.replace_schema_metadata({**table.schema.metadata, HOLDS: said})
        pq.write_table(merged, file.with_name(f"{name}.parquet"))
    paths = [path for task in row_groups(str(folder), WHOLE) for path, _ in task.files]
    assert [path for path in paths if "hour=10" in path] == [str(file.with_name("merged-2.parquet"))]
    assert len(read(folder)) == len(logged.rows)
    circular = table.replace_schema_metadata({**table.schema.metadata, HOLDS: '["merged-2.parquet"]'})
    pq.write_table(circular, file.with_name("merged-1.parquet"))
    other = table.replace_schema_metadata({**table.schema.metadata, HOLDS: '["merged-1.parquet"]'})
    pq.write_table(other, file.with_name("merged-2.parquet"))
    assert len(read(folder)) == len(logged.rows)


@pytest.mark.parametrize("partitions", [1, 3])
def test_rows_by_bucket_equal_the_rows_of_the_log(good: Path, logged: OracleLog, partitions: int):
    found = by_bucket(tasks_of(good, Period()), partitions)
    expected = [list(rows) for _, rows in groupby(asked_of(logged.rows), attrgetter("key"))]
    assert sorted(found, key=lambda bucket: bucket[0].key) == expected
    assert len(expected) > 20


def test_large_file_is_read_in_several_tasks(
    good: Path, logged: OracleLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows = [row for row in logged.rows if row["at_ms"] < START_MS + HOUR_MS]
    folder = tmp_path / "date=2026-11-21/hour=10"
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), folder / "part.parquet", row_group_size=7)
    monkeypatch.setattr(files, "FEWEST_ROWS", 20)
    tasks = row_groups(str(tmp_path), Period())
    assert [task.rows for task in tasks] == [21, 21, 18]
    assert [group for task in tasks for _, groups in task.files for group in groups] == list(range(9))
    whole = read(good, Period(to_ms=START_MS + HOUR_MS))
    assert [dict(row) for row in read(tmp_path)] == whole


def files_of(folder: Path, check: FooterCheck | None = None) -> int:
    """How many files the tasks of a log read."""
    return sum(len(task.files) for task in row_groups(str(folder), Period(), check))


def test_file_without_rows_has_no_task(folder: Path):
    pq.write_table(SCHEMA.empty_table(), file_of(folder, 1))
    assert files_of(folder) == 2


def test_column_that_an_older_file_lacks_is_null(folder: Path):
    file = file_of(folder, 1)
    newest = pq.read_table(file, partitioning=None)
    older = newest.drop_columns(["batch_rows", "siblings"])
    pq.write_table(older.replace_schema_metadata({VERSION_KEY: str(OLDEST)}), file)
    rows = [rows for task in tasks_of(folder, Period()) for rows in task.each(("at_ms", "siblings"))]
    assert [each.column("siblings").null_count for each in rows] == [60, 60, 60]


def test_empty_period_is_refused(good: Path):
    with pytest.raises(JobError, match=r"no row in the period; the log has hours 2026-11-21 10 to 2026"):
        row_groups(str(good), Period.of("2026-11-22T00:00:00Z", None))


def test_folder_without_a_log_is_refused(tmp_path: Path):
    with pytest.raises(JobError, match="has no decision log"):
        row_groups(str(tmp_path), Period())
    with pytest.raises(JobError, match="nowhere: has no decision log"):
        row_groups(str(tmp_path / "nowhere"), Period())
    with pytest.raises(JobError, match="nowhere://"):
        row_groups("nowhere://bucket/log", Period())


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
def test_file_with_wrong_columns_is_named(folder: Path, change, field: str):
    file = file_of(folder, 1)
    pq.write_table(change(pq.read_table(file, partitioning=None)), file)
    with pytest.raises(JobError, match=field) as refused:
        row_groups(str(folder), Period())
    assert str(refused.value).startswith(str(file))


def test_time_outside_the_hour_of_its_folder_is_named(folder: Path, logged: OracleLog):
    """A period is read from the files of its hours, so it would miss such a row silently."""
    file = file_of(folder, 1)
    row = next(row for row in logged.rows if row["at_ms"] >= START_MS + HOUR_MS)
    stray = START_MS + 3 * HOUR_MS
    rows = pa.Table.from_pylist([row, row | {"at_ms": stray}], schema=SCHEMA)
    pq.write_table(rows, file)
    with pytest.raises(JobError) as refused:
        row_groups(str(folder), Period(START_MS + HOUR_MS, START_MS + 2 * HOUR_MS))
    assert (
        str(refused.value) == f"{file}: column at_ms: has {stray}, which belongs in date=2026-11-21/hour=13"
    )


@pytest.mark.parametrize("name", ["a[b] c%20#d", "x{y}z*", "back\\slash?"])
def test_folder_name_is_not_taken_as_a_pattern(good: Path, tmp_path: Path, name: str):
    folder = shutil.copytree(good, tmp_path / name)
    assert len(read(folder)) == 180


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://me:secret@host/log", r"ftp://\.\.\.: must be a path, or begin with one of file://, "),
        ("s3://[me:secret@host/log", r"s3://\.\.\.: is not a valid URL; "),
        ("s3://me:secret/@host/log", r"s3://\.\.\.: "),
    ],
)
def test_refused_url_does_not_show_its_secret(url: str, says: str):
    with pytest.raises(JobError, match=f"^{says}") as refused:
        row_groups(url, Period())
    assert "secret" not in str(refused.value)


def test_truncated_file_is_named(folder: Path):
    file = file_of(folder, 1)
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(JobError, match=f"{file}: cannot be read as Parquet"):
        row_groups(str(folder), Period())


def test_file_being_written_is_ignored(folder: Path):
    (folder / "date=2026-11-21/hour=10/_next.parquet").write_bytes(b"PAR1 half of")
    assert len(read(folder)) == 180


def test_corrupt_file_is_named(folder: Path):
    file = file_of(folder, 1)
    data = bytearray(file.read_bytes())
    data[4 : len(data) // 2] = bytes(len(data) // 2 - 4)
    file.write_bytes(data)
    with pytest.raises(JobError) as failed:
        read(folder)
    said = str(failed.value)
    assert said.startswith(f"{file}: "), said
    assert len(said.splitlines()) == 1


def test_file_that_is_removed_meanwhile_is_named(folder: Path):
    tasks = tasks_of(folder, Period())
    file_of(folder, 1).unlink()
    with pytest.raises(JobError, match=f"^{file_of(folder, 1)}: was merged or removed meanwhile"):
        [list(task.each(COLUMNS)) for task in tasks]


def test_files_that_vanish_while_they_are_listed_are_listed_again(
    folder: Path, logged: OracleLog, monkeypatch: pytest.MonkeyPatch
):
    """The writer merges files of an hour: a listing may name those that are gone when they are read."""
    vanishing = [logged.write(folder, logged.rows[:60], name) for name in ("one", "two")]
    real = schema.footer

    def footer(file: str, filesystem: Any) -> pq.FileMetaData:
        for name in ("one", "two"):
            file_of(folder, 0).with_name(f"{name}.parquet").unlink(missing_ok=True)
        return real(file, filesystem)

    assert vanishing
    monkeypatch.setattr(files, "footer", footer)
    assert files_of(folder) == 3


def hashed_with(file: Path, *fingerprints: str) -> None:
    """Write a file again as a writer that used these secrets does."""
    table = pq.read_table(file, partitioning=None)
    pq.write_table(table.cast(with_secrets(table.schema, fingerprints)), file)


def test_files_of_one_secret_and_of_older_writers_pass(folder: Path):
    hashed_with(file_of(folder, 1), "a" * 64)
    hashed_with(file_of(folder, 2), "a" * 64)
    secret = Fingerprints(None)
    assert files_of(folder, secret.check) == 3
    assert secret.known == "a" * 64


@pytest.mark.parametrize(
    ("known", "owner"), [("a" * 64, "this deployment"), (None, "{first}")], ids=["deployment", "file"]
)
def test_file_of_another_secret_is_named(folder: Path, known: str | None, owner: str):
    first, other = file_of(folder, 0), file_of(folder, 2)
    hashed_with(first, "a" * 64)
    hashed_with(other, "b" * 64)
    with pytest.raises(JobError) as refused:
        row_groups(str(folder), Period(), Fingerprints(known).check)
    said = str(refused.value)
    assert said.startswith(f"{other}: metadata quotagate.secrets: ")
    assert f"another secret (bbbbbbbbbbbb) than that of {owner.format(first=first)} (aaaaaaaaaaaa)" in said


def test_file_of_two_secrets_is_refused(folder: Path):
    hashed_with(file_of(folder, 0), "a" * 64, "b" * 64)
    with pytest.raises(JobError, match="another secret"):
        row_groups(str(folder), Period(), Fingerprints(None).check)


@pytest.mark.parametrize(
    ("from_", "to", "says"),
    [
        ("yesterday", None, "--from: 'yesterday' must be an instant"),
        (None, "2026-13-01", "--to: "),
        ("0001-01-01", None, "--from: .* in the years 1970 to 2999"),
        (None, "9999-12-31T23:59:59+00:00", "--to: .* in the years 1970 to 2999"),
        ("2026-11-21T11:00:00Z", "2026-11-21T12:00:00+01:00", "is not after"),
    ],
)
def test_invalid_periods_are_wrong_use(from_: str | None, to: str | None, says: str):
    with pytest.raises(JobUsageError, match=says):
        Period.of(from_, to)


def test_period_is_widened_where_it_has_ends():
    assert Period(9_000_000, 9_500_000).widened(5_400_000, 500) == Period(3_600_000, 9_500_500)
    assert Period(None, 5).widened(5_400_000) == Period(None, 5)
    assert Period(5, None).widened(5, 5) == Period(0, None)


def test_instant_without_offset_is_utc():
    assert Period.of("2026-11-21T10:00:00", "2026-11-21T12:00:00.5+01:00") == Period(
        START_MS, START_MS + HOUR_MS + 500
    )
