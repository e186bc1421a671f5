"""Files that differ slightly from ours are merged by column name, or logged and left alone."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from structlog.testing import capture_logs

from app.decision_log import status
from tests.decision_log import worker
from tests.decision_log.batches import BEGAN_MS, Node, table_of
from tests.decision_log.conftest import eventually, known, leave, written
from tests.decision_log.test_compact import HOUR, files, now_ms, put
from tests.decision_log.test_worker import AT_ONCE, drained
from workers.decision_log import run
from workers.decision_log.compact import Compactor
from workers.decision_log.folder import Folder
from workers.decision_log.read import read
from workers.decision_log.schema import HOLDS, HOUR_MS, SCHEMA, BadFileError, partition

NEXT_HOUR = partition(BEGAN_MS + HOUR_MS)


def extra(rows: pa.Table) -> pa.Table:
    return rows.append_column("of_others", pa.array(range(rows.num_rows)))


def reordered(rows: pa.Table) -> pa.Table:
    return rows.select(SCHEMA.names[::-1])


def swapped(rows: pa.Table) -> pa.Table:
    """Swap two columns of one type, with their names."""
    places = {"batch": "node", "node": "batch"}
    return rows.select([places.get(name, name) for name in SCHEMA.names])


def nullable(rows: pa.Table) -> pa.Table:
    return rows.cast(pa.schema([field.with_nullable(True) for field in SCHEMA], SCHEMA.metadata))


def without_a_batch(rows: pa.Table) -> pa.Table:
    """A null in a column that must not have one."""
    place = SCHEMA.get_field_index("batch")
    return rows.set_column(place, pa.field("batch", pa.string()), pa.nulls(rows.num_rows, pa.string()))


def in_order(rows: pa.Table) -> pa.Table:
    return rows.sort_by([("batch", "ascending"), ("place", "ascending")])


@pytest.mark.parametrize("odd", [extra, reordered, swapped, nullable])
def test_columns_are_merged_by_name(folder, odd):
    one, two = Node().batches(2)
    put(folder, one)
    Folder(folder).put(HOUR, "odd.parquet", odd(table_of(two)))
    before = in_order(read(folder))
    for _ in range(2):
        Compactor(Folder(folder), stay_s=-1e9).compact(now_ms(folder))
    (merged,) = files(folder).values()
    assert pq.read_schema(merged).equals(SCHEMA)
    assert in_order(read(folder)).equals(before)
    assert before.equals(in_order(table_of(one, two)))


def test_forbidden_null_excludes_only_its_own_file_from_the_merge(folder):
    node, later = Node(), Node("n2", began_ms=BEGAN_MS + HOUR_MS)
    put(folder, *(batches := [*node.batches(2), *later.batches(2)]))
    Folder(folder).put(HOUR, "a.parquet", without_a_batch(table_of(node.batch())))
    with pytest.raises(BadFileError, match=r"a\.parquet: cannot be read: .*'batch'.* null"):
        read(folder)
    compactor = Compactor(Folder(folder), stay_s=0)
    with capture_logs() as lines:
        for _ in range(3):
            compactor.compact(now_ms(folder) + 1_000)
    assert ["/a.parquet: " in line["why"] for line in lines] == [True]
    (folder / HOUR / "a.parquet").unlink()  # it still exists
    assert {file.name[:7] for file in files(folder).values()} == {"merged-"}
    assert written(folder) == known(batches)


@pytest.mark.parametrize("holds", [b"no JSON", b"\xff", b"5", b"[[]]", b'{"a": 1}', b'"a.parquet"'])
def test_merged_file_without_names_is_logged_and_left_alone(folder, holds):
    """The files it was merged from are unknown, so none of them is removed, and it is not merged again."""
    node, later = Node(), Node("n2", began_ms=BEGAN_MS + HOUR_MS)
    put(folder, *(batches := [*node.batches(2), *later.batches(2)]))
    odd = table_of(node.batch()).replace_schema_metadata({**SCHEMA.metadata, HOLDS: holds})
    Folder(folder).put(HOUR, "merged-odd.parquet", odd)
    compactor = Compactor(Folder(folder), stay_s=-1e9)
    with capture_logs() as lines:
        assert compactor.compact(now_ms(folder)) == 4
        compactor.compact(now_ms(folder))
    why = "merged-odd.parquet: metadata quotagate.holds: must be the names of files, as JSON"
    assert [line["why"].partition("/hour=10/")[2] for line in lines] == [why]
    (folder / HOUR / "merged-odd.parquet").unlink()
    assert len(files(folder)) == 2
    assert written(folder) == known(batches)


def test_column_name_that_is_not_text_is_reported(folder):
    put(folder, *(batches := list(Node().batches(2))))
    odd = folder / HOUR / "odd.parquet"
    pq.write_table(pa.table({"aaaaaaaa": [1]}), odd, store_schema=False)
    odd.write_bytes(odd.read_bytes().replace(b"aaaaaaaa", b"\xff" * 8))
    with capture_logs() as lines:
        assert Compactor(Folder(folder)).compact(now_ms(folder)) == 2
    assert ["/odd.parquet: " in line["why"] for line in lines] == [True]
    odd.unlink()
    assert written(folder) == known(batches)


def test_failed_upkeep_never_stops_the_writing(shared, client, folder, monkeypatch):
    def surprise(*_: object) -> int:
        raise RuntimeError("nobody thought of this")

    with monkeypatch.context() as patch:
        patch.setattr(run, "retain", surprise)
        with worker.inside(shared, folder, limits=AT_ONCE, times={"upkeep": 0.05}) as lines:
            leave(client, batches := list(Node().batches(3)))
            eventually(lambda: drained(client))
            key = status.STATUS_KEY
            eventually(lambda: int(client.hget(key, "failures") or 0) > 1)
            assert client.hget(key, "error") == b"unexpected"
            patch.undo()
            eventually(lambda: not client.hget(key, "error"))
    assert written(folder) == known(batches)
    upkeep = [line for line in lines if "looked after" in line["event"]]
    assert [line["event"].rpartition("decision log ")[2] for line in upkeep] == [
        "cannot be looked after",
        "are looked after again",
    ]
    assert upkeep[0]["why"] == "RuntimeError: nobody thought of this"


def test_odd_files_do_not_stop_the_worker(shared, client, folder):
    """New batches are written and other hours are merged, whatever files an old hour has."""
    odd = Folder(folder)
    for name, change in {"a": extra, "b": reordered, "c": without_a_batch}.items():
        odd.put(HOUR, f"{name}.parquet", change(table_of(Node(name).batch())))
    holding = table_of(Node("d").batch()).replace_schema_metadata({**SCHEMA.metadata, HOLDS: b"?"})
    odd.put(HOUR, "merged-d.parquet", holding)
    put(folder, *Node("n2", began_ms=BEGAN_MS + HOUR_MS).batches(2))

    def merged(inside: str) -> set[str]:
        found = [file for file in (folder / inside).glob("merged-*") if file.name != "merged-d.parquet"]
        return {name for file in found for name in json.loads(pq.read_schema(file).metadata[HOLDS])}

    with worker.inside(shared, folder, limits=AT_ONCE, times={"upkeep": 0.1}) as lines:
        leave(client, Node("n3", began_ms=BEGAN_MS + 2 * HOUR_MS).batches(3))
        eventually(lambda: drained(client))
        eventually(lambda: len(merged(NEXT_HOUR)) == 2)
        eventually(lambda: merged(HOUR) >= {"a.parquet", "b.parquet"})
    assert not [line for line in lines if "cannot be looked after" in line["event"]]
    assert sum(line["event"] == "a file of the decision log is left as it is" for line in lines) == 2
