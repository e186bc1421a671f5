"""Merging and removing lose no row at any interruption, repeat none for readers, and spare foreign files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from structlog.testing import capture_logs

from app.decision_log.stream import StreamEntry
from tests.decision_log.batches import BEGAN_MS, Node, packed, table_of
from tests.decision_log.conftest import known, written
from workers.decision_log import compact
from workers.decision_log.compact import SETTLED_MS, Compactor
from workers.decision_log.flush import Flush
from workers.decision_log.folder import Folder
from workers.decision_log.retention import retain
from workers.decision_log.schema import HOLDS, HOUR_MS, SCHEMA, VERSION, footer, partition

HOUR = partition(BEGAN_MS)
LATER_MS = BEGAN_MS + HOUR_MS + SETTLED_MS


def put(folder: Path, *batches, name: str = "") -> None:
    """Write a file for each batch, or one file for all if a name is given."""
    if name:
        Flush([StreamEntry(b"1-0", packed(batch), 0) for batch in batches], name).write(Folder(folder))
        return
    for batch in batches:
        put(folder, batch, name=batch.id)


def files(folder: Path) -> dict[str, Path]:
    return {file.name: file for file in sorted(folder.rglob("*.parquet"))}


def age(folder: Path, seconds: float) -> None:
    """Make every file older."""
    for file in folder.rglob("*"):
        written_s = file.stat().st_mtime - seconds
        os.utime(file, (written_s, written_s))


def now_ms(folder: Path) -> int:
    """The time right after the files were written."""
    return round(max(file.stat().st_mtime for file in files(folder).values()) * 1000)


def test_small_files_of_a_past_hour_are_merged(folder):
    batches = list(Node().batches(8))
    put(folder, *batches)
    compactor = Compactor(Folder(folder))
    assert compactor.compact(LATER_MS - 1) == 0
    assert len(files(folder)) == 8
    now = now_ms(folder)
    assert compactor.compact(now) == 8
    assert len(files(folder)) == 9  # the 8 small files stay for readers that have listed them already
    assert written(folder) == known(batches)
    assert compactor.compact(now) == 0
    age(folder, 700)
    assert compactor.compact(now) == 0
    assert [file.name.startswith("merged-") for file in files(folder).values()] == [True]
    assert written(folder) == known(batches)
    merged = next(iter(files(folder).values()))
    assert footer(str(merged)).num_row_groups == 1
    assert json.loads(pq.read_schema(merged).metadata[HOLDS]) == [f"{batch.id}.parquet" for batch in batches]


def test_duplicated_batches_occur_once_in_a_merged_file(folder):
    one, two, three = Node().batches(3)
    put(folder, one, two, name="a")
    put(folder, two, three, name="b")
    assert Compactor(Folder(folder), stay_s=-1e9).compact(now_ms(folder)) == 2
    Compactor(Folder(folder), stay_s=-1e9).compact(now_ms(folder))
    (merged,) = files(folder).values()
    assert footer(str(merged)).num_rows == 600
    assert written(folder) == known([one, two, three])


def test_all_rows_of_one_batch_in_several_files_are_kept(folder):
    """Another program may have written them so. Only rows that are certainly duplicates are left out."""
    rows = table_of(Node().batch(300))
    hour = folder / HOUR
    hour.mkdir(parents=True)
    for name, part in {"a": rows.slice(0, 150), "b": rows.slice(100, 150), "c": rows.slice(200, 100)}.items():
        pq.write_table(part, hour / f"{name}.parquet")
    pq.write_table(table_of(Node("n2").batch(90)).take([*range(0, 90, 3)]), hour / "d.parquet")
    pq.write_table(table_of(Node("n2").batch(90)).take([*range(0, 90, 2)]), hour / "e.parquet")
    before = written(folder)
    assert len(before) == 300 + 60
    for _ in range(2):
        Compactor(Folder(folder), stay_s=-1e9).compact(now_ms(folder))
    (merged,) = files(folder).values()
    assert footer(str(merged)).num_rows < 400 + 75
    assert written(folder) == before


def test_late_batches_and_concurrent_merges_are_merged(folder):
    node = Node()
    put(folder, *(batches := list(node.batches(4))))
    first, second = Folder(folder), Folder(folder)
    listed = [file for file in first.rows() if HOUR in file.path]
    compact.merge(first, HOUR, listed)
    compact.merge(second, HOUR, listed[:3])  # by a leader that hung and does not know about the other one
    put(folder, late := node.batch())
    age(folder, 700)
    now = now_ms(folder) + 600_000
    assert Compactor(first).compact(now) == 3  # the two merged ones, and the late one
    assert written(folder) == known([*batches, late])
    age(folder, 1_400)
    Compactor(first).compact(now)
    assert len(files(folder)) == 1
    assert written(folder) == known([*batches, late])


@pytest.mark.parametrize("fails", ["writing", "moving", "removing"])
def test_interrupted_merge_loses_nothing(folder, monkeypatch, fails):
    batches = list(Node().batches(4))
    put(folder, *batches)
    now = now_ms(folder)

    class Killed(BaseException):
        """Simulates the end of the program."""

    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        if fails == "writing":
            patch.setattr(pq.ParquetWriter, "write_table", die)
        elif fails == "moving":
            patch.setattr(Folder, "_sync", die)
        else:
            Compactor(Folder(folder)).compact(now)
            age(folder, 700)
            patch.setattr(Folder, "remove", die)
        with pytest.raises(Killed):
            Compactor(Folder(folder)).compact(now)
        assert written(folder) == known(batches)
    Compactor(Folder(folder)).compact(now)
    age(folder, 700)
    Compactor(Folder(folder)).compact(now)
    assert len(files(folder)) == 1
    assert written(folder) == known(batches)


def test_large_file_is_not_merged(folder):
    batches = list(Node().batches(4))
    put(folder, *batches)
    sizes = [file.stat().st_size for file in files(folder).values()]
    assert Compactor(Folder(folder), large=min(sizes)).compact(now_ms(folder)) == 0
    assert Compactor(Folder(folder), large=max(sizes) + 1).compact(now_ms(folder)) == 4  # two and two
    assert len(files(folder)) == 6


def test_foreign_file_is_logged_once_and_left_alone(folder):
    batches = list(Node().batches(4))
    put(folder, *batches)
    hour = folder / HOUR
    (hour / "corrupt.parquet").write_bytes(b"PAR1 and then nothing of the kind")
    pq.write_table(
        SCHEMA.empty_table().replace_schema_metadata({b"quotagate.schema": b"%d" % (VERSION + 1)}),
        hour / "newer.parquet",
    )
    pq.write_table(pa.table({"a": [1]}), hour / "other.parquet")
    damaged = hour / f"{batches[1].id}.parquet"
    content = bytearray(damaged.read_bytes())
    content[4:2_000] = bytes(1_996)  # its footer is intact, but its pages are damaged
    damaged.write_bytes(content)
    compactor = Compactor(Folder(folder), stay_s=0)
    with capture_logs() as lines:
        for _ in range(4):
            compactor.compact(now_ms(folder) + 1_000)
    assert sorted(line["why"].split(": ")[0].rpartition("/")[2] for line in lines) == sorted(
        ["corrupt.parquet", "newer.parquet", "other.parquet", damaged.name]
    )
    left = set(files(folder))
    assert {"corrupt.parquet", "newer.parquet", "other.parquet", damaged.name} < left
    assert len(left) == 5
    merged = next(iter(left - {"corrupt.parquet", "newer.parquet", "other.parquet", damaged.name}))
    assert footer(str(hour / merged)).num_rows == 600


def test_partial_files_are_removed_once_nobody_can_be_writing_them(folder):
    put(folder, Node().batch())
    half = folder / HOUR / "_1-0-abcd.parquet"
    half.write_bytes(b"PAR1")
    now = now_ms(folder)
    Compactor(Folder(folder)).compact(now)
    assert half.exists()
    age(folder, 700)
    Compactor(Folder(folder)).compact(now)
    assert not half.exists()
    assert len(files(folder)) == 1


def test_hours_are_removed_as_a_whole_once_too_old(folder):
    day = 24 * HOUR_MS
    old, young = Node(), Node("n2", began_ms=BEGAN_MS + HOUR_MS)
    put(folder, *old.batches(2), *(kept := list(young.batches(2))))
    aside = folder / "_unreadable" / "1-0.batch"
    aside.parent.mkdir()
    aside.write_bytes(b"?")
    now = BEGAN_MS + HOUR_MS + day
    assert retain(Folder(folder), now, day) == 0  # it was written just now, as by a replay
    age(folder, now_ms(folder) / 1000 - BEGAN_MS / 1000)
    assert retain(Folder(folder), now - 1, day) == 0
    assert retain(Folder(folder), now, day) == 1
    assert not (folder / HOUR).exists()
    assert written(folder) == known(kept)
    assert retain(Folder(folder), now + 10 * day, day) == 1
    assert [file for file in folder.rglob("*") if file.is_file()] == []
    assert not list(folder.glob("date=*"))
