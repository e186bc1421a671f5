"""Reading the log: each row once, one period, and unreadable files are refused by name and field."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from app.storage_location import InvalidLocationError
from tests.decision_log.batches import BEGAN_MS, Node
from tests.decision_log.conftest import known, written
from tests.decision_log.test_compact import HOUR, put
from workers.decision_log.folder import Folder
from workers.decision_log.read import read
from workers.decision_log.schema import HOUR_MS, SCHEMA, VERSION, BadFileError


def test_missing_log_reads_as_an_empty_table(folder):
    assert read(folder).equals(SCHEMA.empty_table())


def test_duplicated_rows_are_read_once_and_partial_files_are_skipped(folder):
    one, two, three = Node().batches(3)
    put(folder, one, two, name="a")
    put(folder, two, three, name="b")
    (folder / HOUR / "_c.parquet").write_bytes(b"PAR1")
    (folder / HOUR / ".d.parquet").write_bytes(b"PAR1")
    (folder / HOUR / "e.parquet.tmp").write_bytes(b"PAR1")
    (folder / "_unreadable").mkdir()
    assert written(folder) == known([one, two, three])
    assert read(folder).schema.equals(SCHEMA)


def test_period_is_read_without_the_hours_around_it(folder):
    put(folder, *Node(began_ms=BEGAN_MS + HOUR_MS - 300).batches(3), name="a")
    rows = read(f"file://{folder}", since_ms=BEGAN_MS + HOUR_MS - 99, until_ms=BEGAN_MS + HOUR_MS + 1)
    assert sorted(rows["at_ms"].to_pylist()) == [*range(BEGAN_MS + HOUR_MS - 99, BEGAN_MS + HOUR_MS + 1)]
    (folder / HOUR / "corrupt.parquet").write_bytes(b"no Parquet")
    assert read(folder, since_ms=BEGAN_MS + HOUR_MS).num_rows == 301
    assert read(folder, until_ms=BEGAN_MS).num_rows == 0


@pytest.mark.parametrize(
    ("table", "why"),
    [
        (SCHEMA.empty_table().drop_columns(["ids"]), "column ids: is missing"),
        (SCHEMA.empty_table().replace_schema_metadata({}), "metadata quotagate.schema: must be the version"),
        (
            SCHEMA.empty_table().replace_schema_metadata({b"quotagate.schema": b"%d" % (VERSION + 1)}),
            f"metadata quotagate.schema: {VERSION + 1} is newer than {VERSION}; read it with a newer ",
        ),
        (
            SCHEMA.empty_table().replace_schema_metadata({b"quotagate.schema": b"0"}),
            "metadata quotagate.schema: 0 is older than 1",
        ),
        (
            SCHEMA.empty_table().drop_columns(["place"]).append_column("place", pa.array([], pa.string())),
            "column place: is string, must be int32",
        ),
    ],
)
def test_file_with_other_columns_is_refused(folder, table, why):
    put(folder, Node().batch())
    pq.write_table(table, folder / HOUR / "odd.parquet")
    with pytest.raises(BadFileError, match=rf"odd\.parquet: {why}"):
        read(folder)


def test_truncated_file_is_refused(folder):
    put(folder, Node().batch(), name="whole")
    whole = (folder / HOUR / "whole.parquet").read_bytes()
    (folder / HOUR / "cut.parquet").write_bytes(whole[:-100])
    with pytest.raises(BadFileError, match=r"cut\.parquet: cannot be read as Parquet: "):
        read(folder)


def test_file_with_damaged_pages_is_refused(folder):
    put(folder, Node().batch(), name="damaged")
    damaged = folder / HOUR / "damaged.parquet"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:4] + bytes(2_000) + content[2_004:])
    with pytest.raises(BadFileError, match=r"damaged\.parquet: cannot be read: "):
        read(folder)


@pytest.mark.parametrize("url", ["ftp://host/log", "redis://here", "abfs://x/y"])
def test_url_that_no_filesystem_accepts_is_refused(url):
    with pytest.raises(InvalidLocationError):
        Folder(url).check()


def test_password_in_a_url_is_not_revealed():
    folder = Folder("s3://key:secret@bucket/log?region=eu-west-1&endpoint_override=127.0.0.1:9")
    assert folder.name == "s3://bucket/log"
    folder.check()
    assert folder.root == "bucket/log"
