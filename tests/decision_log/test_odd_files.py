"""Files of an hour that are almost ours: merged by the names of their columns, or named and left alone."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from structlog.testing import capture_logs

from app.store import decision_log_standing
from tests.decision_log import worker
from tests.decision_log.batches import BEGAN_MS, Node
from tests.decision_log.conftest import eventually, known, leave, written
from tests.decision_log.test_compact import HOUR, files, now_ms, put
from tests.decision_log.test_worker import AT_ONCE, drained
from workers.decision_log import run
from workers.decision_log.compact import HOLDS, Compactor
from workers.decision_log.folder import Folder
from workers.decision_log.read import read
from workers.decision_log.rows import table
from workers.decision_log.schema import HOUR_MS, SCHEMA, BadFile, partition

NEXT_HOUR = partition(BEGAN_MS + HOUR_MS)


def extra(rows: pa.Table) -> pa.Table:
    return rows.append_column("of_others", pa.array(range(rows.num_rows)))


def reordered(rows: pa.Table) -> pa.Table:
    return rows.select(SCHEMA.names[::-1])


def swapped(rows: pa.Table) -> pa.Table:
    """Two columns of one type in each other's place, each under its own name."""
    places = {"batch": "node", "node": "batch"}
    return rows.select([places.get(name, name) for name in SCHEMA.names])


def nullable(rows: pa.Table) -> pa.Table:
    return rows.cast(pa.schema([field.with_nullable(True) for field in SCHEMA], SCHEMA.metadata))


def without_a_batch(rows: pa.Table) -> pa.Table:
    """A null where there must be none."""
    place = SCHEMA.get_field_index("batch")
    return rows.set_column(place, pa.field("batch", pa.string()), pa.nulls(rows.num_rows, pa.string()))


def in_order(rows: pa.Table) -> pa.Table:
    return rows.sort_by([("batch", "ascending"), ("place", "ascending")])


@pytest.mark.parametrize("odd", [extra, reordered, swapped, nullable])
def test_columns_go_together_by_their_names(folder, odd):
    one, two = Node().batches(2)
    put(folder, one)
    Folder(folder).put(HOUR, "odd.parquet", odd(table([two])))
    before = in_order(read(folder))
    for _ in range(2):
        Compactor(Folder(folder), stay_s=-1e9).compact(now_ms(folder))
    (merged,) = files(folder).values()
    assert pq.read_schema(merged).equals(SCHEMA)
    assert in_order(read(folder)).equals(before)
    assert before.equals(in_order(table([one, two])))


def test_a_null_where_there_must_be_none_keeps_one_file_apart_and_no_other(folder):
    node, later = Node(), Node("n2", began_ms=BEGAN_MS + HOUR_MS)
    put(folder, *(batches := [*node.batches(2), *later.batches(2)]))
    Folder(folder).put(HOUR, "a.parquet", without_a_batch(table([node.batch()])))
    with pytest.raises(BadFile, match=r"a\.parquet: cannot be read: .*'batch'.* null"):
        read(folder)
    compactor = Compactor(Folder(folder), stay_s=0)
    with capture_logs() as said:
        for _ in range(3):
            compactor.compact(now_ms(folder) + 1_000)
    assert ["/a.parquet: " in line["why"] for line in said] == [True]
    (folder / HOUR / "a.parquet").unlink()  # it is still there
    assert {file.name[:7] for file in files(folder).values()} == {"merged-"}
    assert written(folder) == known(batches)


@pytest.mark.parametrize("holds", [b"no JSON", b"\xff", b"5", b"[[]]", b'{"a": 1}', b'"a.parquet"'])
def test_a_merged_file_that_says_no_names_is_named_and_left(folder, holds):
    """Nobody knows which files it holds, so none is removed for it, and it is not merged either."""
    node, later = Node(), Node("n2", began_ms=BEGAN_MS + HOUR_MS)
    put(folder, *(batches := [*node.batches(2), *later.batches(2)]))
    odd = table([node.batch()]).replace_schema_metadata({**SCHEMA.metadata, HOLDS: holds})
    Folder(folder).put(HOUR, "merged-odd.parquet", odd)
    compactor = Compactor(Folder(folder), stay_s=-1e9)
    with capture_logs() as said:
        assert compactor.compact(now_ms(folder)) == 4
        compactor.compact(now_ms(folder))
    why = "merged-odd.parquet: metadata quotagate.holds: must be the names of files, as JSON"
    assert [line["why"].partition("/hour=10/")[2] for line in said] == [why]
    (folder / HOUR / "merged-odd.parquet").unlink()
    assert len(files(folder)) == 2
    assert written(folder) == known(batches)


def test_a_column_s_name_that_is_no_text_is_named(folder):
    put(folder, *(batches := list(Node().batches(2))))
    odd = folder / HOUR / "odd.parquet"
    pq.write_table(pa.table({"aaaaaaaa": [1]}), odd, store_schema=False)
    odd.write_bytes(odd.read_bytes().replace(b"aaaaaaaa", b"\xff" * 8))
    with capture_logs() as said:
        assert Compactor(Folder(folder)).compact(now_ms(folder)) == 2
    assert ["/odd.parquet: " in line["why"] for line in said] == [True]
    odd.unlink()
    assert written(folder) == known(batches)


def test_what_goes_wrong_beside_the_writing_never_stops_it(shared, client, folder, monkeypatch):
    def surprise(*_: object) -> int:
        raise RuntimeError("nobody thought of this")

    with monkeypatch.context() as patch:
        patch.setattr(run, "retain", surprise)
        with worker.inside(shared, folder, limits=AT_ONCE, times={"upkeep": 0.05}) as said:
            leave(client, batches := list(Node().batches(3)))
            eventually(lambda: drained(client))
            key = decision_log_standing.KEY
            eventually(lambda: int(client.hget(key, "failures") or 0) > 1)
            assert client.hget(key, "error") == b"unexpected"
            patch.undo()
            eventually(lambda: not client.hget(key, "error"))
    assert written(folder) == known(batches)
    told = [line for line in said if "looked after" in line["event"]]
    assert [line["event"].rpartition("decision log ")[2] for line in told] == [
        "cannot be looked after",
        "are looked after again",
    ]
    assert told[0]["why"] == "RuntimeError: nobody thought of this"


def test_files_that_are_almost_ours_do_not_stop_the_worker(shared, client, folder):
    """Whatever lies in an old hour, what comes in is written, and the other hours are merged."""
    odd = Folder(folder)
    for name, change in {"a": extra, "b": reordered, "c": without_a_batch}.items():
        odd.put(HOUR, f"{name}.parquet", change(table([Node(name).batch()])))
    holding = table([Node("d").batch()]).replace_schema_metadata({**SCHEMA.metadata, HOLDS: b"?"})
    odd.put(HOUR, "merged-d.parquet", holding)
    put(folder, *Node("n2", began_ms=BEGAN_MS + HOUR_MS).batches(2))

    def merged(inside: str) -> set[str]:
        found = [file for file in (folder / inside).glob("merged-*") if file.name != "merged-d.parquet"]
        return {name for file in found for name in json.loads(pq.read_schema(file).metadata[HOLDS])}

    with worker.inside(shared, folder, limits=AT_ONCE, times={"upkeep": 0.1}) as said:
        leave(client, Node("n3", began_ms=BEGAN_MS + 2 * HOUR_MS).batches(3))
        eventually(lambda: drained(client))
        eventually(lambda: len(merged(NEXT_HOUR)) == 2)
        eventually(lambda: merged(HOUR) >= {"a.parquet", "b.parquet"})
    assert not [line for line in said if "cannot be looked after" in line["event"]]
    assert sum(line["event"] == "a file of the decision log is left as it is" for line in said) == 2
