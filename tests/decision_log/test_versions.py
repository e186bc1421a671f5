"""Logs and batches of older versions can still be read.

Quotagate wrote ``version-1`` in its state of 2026-11-22. It has seventeen changes of quotas, a drill, a
reset, repeated answers, and a store that was paused twice.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from app.decision_log.batch import Row
from app.decision_log.columns import COLUMNS
from tests.decision_log.batches import Node, packed, table_of
from workers.decision_log import schema
from workers.decision_log.compact import Compactor
from workers.decision_log.folder import Folder
from workers.decision_log.read import read
from workers.decision_log.rows import decode, table
from workers.decision_log.schema import (
    ADDED,
    HOUR_MS,
    OLDEST,
    SCHEMA,
    VERDICT,
    VERSION,
    VERSION_KEY,
    BadFileError,
    as_now,
    check,
    partition,
)

HERE = Path(__file__).parent
FIRST, THIRD = HERE / "version-1", HERE / "version-3"
HOUR = 1_795_348_800_000


def test_log_of_the_first_version_is_read():
    rows = read(FIRST).to_pylist()
    kinds = Counter(row["kind"] for row in rows)
    assert kinds == {"decision": 325, "quota": 17, "factor": 3, "late": 2, "reset": 1}
    assert Counter(row["source"] for row in rows if row["kind"] == "decision")["fallback"] == 6
    assert {(row["batch_rows"], row["siblings"]) for row in rows} == {(None, None)}
    for file in FIRST.rglob("*.parquet"):
        schema = pq.read_schema(file)
        assert schema.metadata[VERSION_KEY] == b"1"
        assert set(schema.names) == {column.name for column in COLUMNS if column.since == 1}, (
            "version 1 does not change: a new column has the next VERSION as its since"
        )


def test_log_of_the_second_version_is_read():
    second = HERE / "version-2"
    rows = read(second).to_pylist()
    assert Counter(row["kind"] for row in rows)["decision"] == 200
    assert {verdict["bucket_order"] for row in rows for verdict in row["verdicts"] or ()} == {None}
    for file in second.rglob("date=*/*/*.parquet"):
        schema = pq.read_schema(file)
        assert schema.metadata[VERSION_KEY] == b"2"
        assert set(schema.names) == {column.name for column in COLUMNS if column.since <= 2}


def test_log_of_the_third_version_is_read():
    """It has rows of each kind: asks in all modes, kept answers, a lease and its settlement, changes."""
    rows = read(THIRD).to_pylist()
    kinds = Counter(row["kind"] for row in rows)
    assert kinds == {"decision": 33, "quota": 1, "factor": 1, "lease": 1, "settlement": 1}
    names = ("known_until_ms", "known_resets")
    assert {verdict[name] for row in rows for verdict in row["verdicts"] or () for name in names} == {None}
    for file in THIRD.rglob("*.parquet"):
        schema = pq.read_schema(file)
        assert schema.metadata[VERSION_KEY] == b"3"
        assert set(schema.names) == {column.name for column in COLUMNS if column.since <= 3}


@pytest.mark.parametrize(
    ("batch", "file"),
    [
        ("version-2/n2-000000000001", "version-2/n2-000000000001.parquet"),
        ("version-3/n3-000000000001", "version-3/*/*/*.parquet"),
    ],
)
def test_batch_of_an_older_version_becomes_the_rows_that_its_own_writer_made(batch: str, file: str):
    """The programs of that version wrote both, from the same traffic."""
    packed_then = (HERE / f"{batch}.batch").read_bytes()
    assert msgspec.msgpack.decode(packed_then)[0] == int(batch[len("version-")])
    (made_then,) = HERE.glob(file)
    expected = as_now(pq.read_table(made_then, partitioning=None))
    found = decode(packed_then)
    assert table([found]).to_pylist() == expected.to_pylist()
    assert len(found.rows) == 37


def test_batch_of_the_first_version_becomes_rows_without_later_columns():
    """The fields of that version; arrays of msgpack are only ever longer in later ones."""
    of_now = decode((HERE / "version-3/n3-000000000001.batch").read_bytes())
    version, *head, quotas, rows = msgspec.msgpack.decode(packed(of_now))[:6]
    verdicts = Row.__struct_fields__.index("verdicts")
    for row in rows:
        row[verdicts] = [verdict[:10] for verdict in row[verdicts]]
    packed_then = msgspec.msgpack.encode([1, *head, [quota[:15] for quota in quotas], rows])
    found, expected = (table([batch]).to_pylist() for batch in (decode(packed_then), of_now))
    for row in expected:
        row["siblings"] = None
        for verdict in row["verdicts"]:
            verdict["max_debt"] = None
    assert version == 3
    assert found == expected


def test_old_files_are_merged_with_new_ones(tmp_path: Path):
    folder = Folder(Path(shutil.copytree(FIRST, tmp_path / "log")))
    newer = table_of(Node(began_ms=HOUR).batch(10))
    folder.put(partition(HOUR), "newer.parquet", newer)
    before = read(tmp_path / "log")
    assert Compactor(folder, stay_s=0).compact(HOUR + 2 * HOUR_MS) == 8
    (merged,) = (tmp_path / "log").rglob("merged-*.parquet")
    found = pq.read_table(merged, partitioning=None)
    assert found.schema.metadata[VERSION_KEY] == str(VERSION).encode()
    assert Counter(found["batch_rows"].to_pylist()) == {None: 348, 10: 10}
    assert read(tmp_path / "log").num_rows == before.num_rows == 358


def test_only_older_files_may_lack_later_columns():
    lacking = SCHEMA.remove(SCHEMA.get_field_index("batch_rows"))
    with pytest.raises(BadFileError, match="f: column batch_rows: is missing"):
        check("f", lacking)
    check("f", lacking.with_metadata({VERSION_KEY: str(ADDED["batch_rows"] - 1)}))
    older = lacking.remove(lacking.get_field_index("order")).with_metadata({VERSION_KEY: str(OLDEST)})
    with pytest.raises(BadFileError, match="f: column order: is missing"):
        check("f", older)


def test_field_of_a_struct_may_be_added_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """For example a quota's value that verdicts have from some version on."""
    place = SCHEMA.get_field_index("verdicts")
    wider = SCHEMA.set(
        place, pa.field("verdicts", pa.list_(pa.struct([*VERDICT, pa.field("later", pa.int64())])))
    )
    rows = table_of(Node(began_ms=HOUR).batch(5))
    pq.write_table(rows, tmp_path / "older.parquet")
    monkeypatch.setattr(schema, "SCHEMA", wider)
    monkeypatch.setattr(schema, "VERSION", VERSION + 1)
    with pytest.raises(BadFileError, match="column verdicts: is "):
        schema.footer(str(tmp_path / "older.parquet"))
    monkeypatch.setitem(ADDED, "verdicts.later", VERSION + 1)
    schema.footer(str(tmp_path / "older.parquet"))
    found = schema.as_now(pq.read_table(tmp_path / "older.parquet"))
    assert {verdict["later"] for row in found.to_pylist() for verdict in row["verdicts"] or ()} == {None}
