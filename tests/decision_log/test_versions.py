"""A log of an older version can still be read. Quotagate wrote ``version-1`` in its state of 2026-11-22.

It has seventeen changes of quotas, a drill, a reset, repeated answers, and a store that was paused twice.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from app.decision_log.columns import COLUMNS
from tests.decision_log.batches import Node
from workers.decision_log import schema
from workers.decision_log.compact import Compactor
from workers.decision_log.folder import Folder
from workers.decision_log.read import read
from workers.decision_log.rows import table
from workers.decision_log.schema import (
    ADDED,
    HOUR_MS,
    OLDEST,
    SCHEMA,
    VERDICT,
    VERSION,
    VERSION_KEY,
    BadFileError,
    check,
    partition,
)

FIRST = Path(__file__).parent / "version-1"
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
    second = Path(__file__).parent / "version-2"
    rows = read(second).to_pylist()
    assert Counter(row["kind"] for row in rows)["decision"] == 200
    assert {verdict["bucket_order"] for row in rows for verdict in row["verdicts"] or ()} == {None}
    for file in second.rglob("*.parquet"):
        schema = pq.read_schema(file)
        assert schema.metadata[VERSION_KEY] == b"2"
        assert set(schema.names) == {column.name for column in COLUMNS if column.since <= 2}


def test_old_files_are_merged_with_new_ones(tmp_path: Path):
    folder = Folder(Path(shutil.copytree(FIRST, tmp_path / "log")))
    newer = table([Node(began_ms=HOUR).batch(10)])
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
    rows = table([Node(began_ms=HOUR).batch(5)])
    pq.write_table(rows, tmp_path / "older.parquet")
    monkeypatch.setattr(schema, "SCHEMA", wider)
    monkeypatch.setattr(schema, "VERSION", VERSION + 1)
    with pytest.raises(BadFileError, match="column verdicts: is "):
        schema.footer(str(tmp_path / "older.parquet"))
    monkeypatch.setitem(ADDED, "verdicts.later", VERSION + 1)
    schema.footer(str(tmp_path / "older.parquet"))
    found = schema.as_now(pq.read_table(tmp_path / "older.parquet"))
    assert {verdict["later"] for row in found.to_pylist() for verdict in row["verdicts"] or ()} == {None}
