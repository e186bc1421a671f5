"""Columns of verdicts: distinct combinations, values as Python's, and partitions by bucket."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.oracle import Oracle
from tests.jobs.audits import asked_of
from tests.jobs.logs import SECRET, OracleLog, asks
from tests.jobs.test_tables import verdict
from workers.decision_log.schema import SCHEMA as LOG
from workers.jobs import verdicts
from workers.jobs.verdicts import (
    QUOTA_COLUMNS,
    ROWS_OF_A_CHUNK,
    SCHEMA,
    LogRows,
    VerdictPartition,
    among,
    distinct,
    flags,
    integers,
    partitioned,
    quotas_of,
    values,
    verdicts_of,
)

NUMBERS = st.integers(-3, 3) | st.sampled_from([2**63 - 1, -(2**63)])
TYPES = {
    "int64": (pa.int64(), NUMBERS),
    "int32": (pa.int32(), st.integers(-3, 3)),
    "int8": (pa.int8(), st.integers(-3, 3)),
    "float64": (pa.float64(), st.sampled_from([0.0, -0.5, 1e300, float("inf")])),
    "bool": (pa.bool_(), st.booleans()),
    "text": (pa.string(), st.sampled_from(["", "a", "é", "a\x00"])),
    "words": (pa.dictionary(pa.int32(), pa.string()), st.sampled_from(["", "a", "é"])),
    "list": (pa.list_(pa.int64()), st.lists(NUMBERS, max_size=3)),
}
PLACES = """
import sys, pyarrow as pa
from workers.jobs.verdicts import partitioned
table = pa.ipc.open_stream(sys.stdin.buffer).read_all()
print([part.column("order").to_pylist() for part in partitioned(table, 5)])
"""


def log_of(rows: list[dict[str, Any]]) -> LogRows:
    """Rows as they are read from files: texts are dictionaries."""
    table = pa.Table.from_pylist(rows, LOG)
    for place, field in enumerate(LOG):
        if pa.types.is_string(field.type):
            table = table.set_column(place, field.name, table.column(place).dictionary_encode())
    return LogRows(table)


@pytest.fixture(scope="module")
def log() -> OracleLog:
    made = OracleLog(Oracle(SECRET))
    made.run(asks(1, ("a", "b", "c")), 300, (0, 10, 1_000))
    return made


@given(
    st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=50),
    st.integers(1, 3),
)
def test_distinct_combinations_are_those_of_a_dictionary(rows: list[tuple[int, ...]], width: int):
    some = [row[:width] for row in rows]
    first, which = distinct([np.array(column, np.int64) for column in zip(*some, strict=True)])
    places: dict[tuple[int, ...], int] = {}
    for place, row in enumerate(some):
        places.setdefault(row, place)
    assert first.tolist() == list(places.values())
    assert [some[first[each]] for each in which] == some


def test_combinations_with_equal_hashes_are_not_one(monkeypatch: pytest.MonkeyPatch):
    """The second number undoes what the first one made of the hash, with the factors of the first try."""
    randoms = [np.random.default_rng(1), np.random.default_rng(2)]
    factors = np.random.default_rng(1).integers(2**64, size=2, dtype=np.uint64) | np.uint64(1)
    mixed = np.array([0, 1], np.uint64) * factors[0]
    mixed ^= mixed >> verdicts._SHIFT
    tries = []

    class Planted:
        def integers(self, *args: Any, **more: Any) -> Any:
            tries.append(args)
            return randoms[min(len(tries), len(randoms)) - 1].integers(*args, **more)

    monkeypatch.setattr(np.random, "default_rng", Planted)
    found, which = distinct([np.array([0, 1], np.int64), mixed.view(np.int64)])
    assert len(tries) == 2, "the first try has a collision, and is repeated"
    assert (found.tolist(), which.tolist()) == ([0, 1], [0, 1])


def test_no_rows_have_no_combinations():
    first, which = distinct([np.array([], np.int64), np.array([], np.int64)])
    assert (len(first), len(which)) == (0, 0)


@pytest.mark.parametrize("name", TYPES)
@given(chosen=st.data())
def test_values_are_those_of_arrow(name: str, chosen: st.DataObject):
    type_, some = TYPES[name]
    given_ = chosen.draw(st.lists(st.none() | some, max_size=12))
    begin = chosen.draw(st.integers(0, len(given_)))
    column = pa.array(given_, type_).slice(begin, chosen.draw(st.integers(0, 12)))
    found = values(column)
    assert found == column.to_pylist()
    assert [type(each) for each in found] == [type(each) for each in column.to_pylist()]


@given(chosen=st.data())
def test_numbers_flags_and_words_of_slices_with_nulls(chosen: st.DataObject):
    def drawn(type_: pa.DataType, some: st.SearchStrategy[Any]) -> pa.Array:
        given_ = chosen.draw(st.lists(st.none() | some, max_size=12))
        return pa.array(given_, type_).slice(chosen.draw(st.integers(0, len(given_))))

    numbers = drawn(pa.int64(), NUMBERS)
    assert integers(numbers, -7).tolist() == [-7 if each is None else each for each in numbers.to_pylist()]
    truths = drawn(pa.bool_(), st.booleans())
    assert flags(truths).tolist() == [bool(each) for each in truths.to_pylist()]
    words = drawn(*TYPES["words"])
    assert among(words, "a", "b").tolist() == [each in {"a", "b"} for each in words.to_pylist()]
    assert not among(pa.nulls(3), "a").any()


@pytest.mark.parametrize("partitions", [1, 2, 7, 100])
def test_partitions_have_each_row_once_and_buckets_whole(log: OracleLog, partitions: int):
    table = verdicts_of(log_of(log.rows))
    parts = partitioned(table, partitions)
    assert len(parts) == partitions
    homes = defaultdict(set)
    for number, part in enumerate(parts):
        quotas = quotas_of(part.column("applied").combine_chunks())
        for place in integers(part.column("applied").combine_chunks().indices).tolist():
            homes[quotas[place]["quota"], quotas[place]["bucket"]].add(number)
    assert all(len(numbers) == 1 for numbers in homes.values())
    assert len(homes) > 20
    assert len({number for [number] in homes.values()}) > (partitions > 1)

    def shown(some: pa.Table) -> list[str]:
        return [repr(row) for row in some.to_pylist()]

    assert sorted(row for part in parts for row in shown(part)) == sorted(shown(table))


def test_partitions_are_the_same_in_another_process(log: OracleLog):
    table = verdicts_of(log_of(log.rows))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    said = subprocess.run(
        [sys.executable, "-c", PLACES], input=sink.getvalue().to_pybytes(), capture_output=True, check=True
    )
    mine = [part.column("order").to_pylist() for part in partitioned(table, 5)]
    assert said.stdout.decode().strip() == repr(mine)
    assert all(mine)


def test_pieces_of_a_bucket_are_its_rows(log: OracleLog, monkeypatch: pytest.MonkeyPatch):
    """However many rows are in memory at a time, and from however many tasks they come."""
    assert ROWS_OF_A_CHUNK > 7
    monkeypatch.setattr(verdicts, "ROWS_OF_A_CHUNK", 7)
    halves = [verdicts_of(log_of(log.rows[place::2])) for place in (0, 1)]
    buckets = list(VerdictPartition(halves))
    rows = sorted((row for bucket in buckets for row in bucket.rows()), key=lambda row: (row.key, row.order))
    assert rows == asked_of(log.rows)
    for bucket in buckets:
        mine = list(bucket.rows())
        pieces = list(bucket.pieces(("order", "applied")))
        assert sum(len(piece["order"]) for piece in pieces) == len(mine) == bucket.end - bucket.begin
        assert [order for piece in pieces for order in piece["order"]] == [row.order for row in mine]
        quotas = [bucket.partition.quotas[place] for piece in pieces for place in piece["applied"]]
        assert quotas == [row.as_quota() for row in mine]
        assert {(row.quota, row.bucket, row.key) for row in mine} == {
            (bucket.quota, bucket.bucket, bucket.key)
        }


def test_no_rows_have_no_buckets():
    assert list(VerdictPartition([])) == []
    assert verdicts_of(log_of([])).schema == SCHEMA
    assert [part.num_rows for part in partitioned(verdicts_of(log_of([])), 3)] == [0, 0, 0]


def test_packed_quota_keeps_every_field():
    rows: list[dict[str, Any]] = [
        {"kind": "decision", "source": "store", "order": 128 + place, "verdicts": [said], "mode": "admit"}
        for place, said in enumerate(
            [
                verdict(limit=1.5, max_debt=None, burst=3.0),
                verdict(limit=1.5, max_debt=0.0, burst=3.0),
                verdict(limit=-0.0, epoch=2**62),
                verdict(limit=0.0, epoch=2**62),
                verdict(limit=float("inf"), bucket="user=é"),
            ]
        )
    ]
    whole = [{**dict.fromkeys(LOG.names), "usage": {}, "at_ms": 0, "replayed": False, **row} for row in rows]
    applied = verdicts_of(log_of(whole)).column("applied").combine_chunks()
    quotas = quotas_of(applied)
    found = [quotas[place] for place in integers(applied.indices).tolist()]
    for row, quota in zip(rows, found, strict=True):
        [said] = row["verdicts"]
        names = (*QUOTA_COLUMNS, "entity", "bucket")
        assert repr({name: quota[name] for name in names}) == repr({name: said[name] for name in names})
