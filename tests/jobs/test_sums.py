"""Tables add up to the sums, minima and maxima that a dictionary gives, however often they are added up."""

from __future__ import annotations

from collections import defaultdict

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.jobs import sums
from workers.jobs.sums import Sums

SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("place", pa.int64()),
        ("asks", pa.int64()),
        ("first_ms", pa.int64()),
        ("last_ms", pa.int64()),
    ]
)
VALUES = {"asks": "sum", "first_ms": "min", "last_ms": "max"}
Row = tuple[str | None, int | None, int, int, int]
small = st.integers(-3, 3)
rows = st.tuples(st.sampled_from(["a", "b", "", None]), st.none() | st.integers(0, 1), small, small, small)


@pytest.mark.parametrize("spare", [0, 5, 100])
@given(st.lists(st.lists(rows, max_size=8), max_size=8))
def test_rows_with_equal_keys_become_one(spare: int, tables: list[list[Row]]):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sums, "SPARE_ROWS", spare)
        found = Sums(SCHEMA, VALUES)
        for table in tables:
            some = [dict(zip(SCHEMA.names, row, strict=True)) for row in table]
            found.add(pa.Table.from_pylist(some, SCHEMA))
    by_key = defaultdict(list)
    for table in tables:
        for name, place, *numbers in table:
            by_key[name, place].append(numbers)
    expected = {
        key: (sum(asks), min(first), max(last))
        for key, (asks, first, last) in ((key, zip(*some, strict=True)) for key, some in by_key.items())
    }
    for _ in range(2):  # a sum that was asked for can be asked for again
        table_ = found.table()
        said = [tuple(row.values()) for row in table_.to_pylist()]
        assert {row[:2]: row[2:] for row in said} == expected
        assert len(said) == len(expected)
        assert table_.schema == SCHEMA


def test_columns_may_come_in_any_order_and_as_words():
    found = Sums(SCHEMA, VALUES)
    names = pa.array(["a", "a"]).dictionary_encode()
    numbers = {name: [1, 2] for name in ("last_ms", "first_ms", "asks")}
    found.add(pa.table({**numbers, "place": [0, 0], "name": names}))
    assert found.table().to_pylist() == [{"name": "a", "place": 0, "asks": 3, "first_ms": 1, "last_ms": 2}]
