"""The digest of a row depends on every value in it, and on nothing else."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from app.domain.oracle import Oracle
from tests.jobs.logs import SECRET, OracleLog, Row, asks
from workers.decision_log.schema import ADDED, SCHEMA
from workers.jobs.audit.row_digests import row_digests
from workers.jobs.files import row_groups
from workers.jobs.period import Period

KEY = b"0123456789abcdef"


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    log = OracleLog(Oracle(SECRET))
    log.run(asks(1, ["a", "b"]), 60, (0, 10, 200))
    for number, row in enumerate(log.rows):
        row["siblings"] = [{"node": "n", "number": number, "at_ms": 5}] if number % 20 == 0 else None
    return log.rows


def digests(rows: list[Row], schema: pa.Schema = SCHEMA, key: bytes = KEY) -> list[int]:
    found: list[int] = row_digests(pa.Table.from_pylist(rows, schema=schema), key).tolist()
    return found


def test_digest_does_not_depend_on_the_place_or_the_encoding(rows: list[Row], tmp_path: Path):
    log = OracleLog(Oracle(SECRET))
    dice = random.Random(1)
    shuffled = dice.sample(rows, len(rows))
    log.write(tmp_path / "log", shuffled)
    [part] = row_groups(str(tmp_path / "log"), Period())
    [read] = part.tables(SCHEMA.names)
    assert row_digests(read, KEY).tolist() == digests(shuffled)
    assert sorted(digests(shuffled)) == sorted(digests(rows))
    assert row_digests(read.slice(7, 20), KEY).tolist() == digests(shuffled)[7:27]


def test_null_is_as_good_as_a_column_that_an_older_file_lacks(rows: list[Row]):
    added = {name for name in ADDED if "." not in name}
    older = pa.schema([field for field in SCHEMA if field.name not in added])
    without = [row | dict.fromkeys(added) for row in rows]
    assert digests(without) == digests(without, older)
    assert digests(without) != digests(rows)


def test_other_key_gives_other_digests(rows: list[Row]):
    assert not set(digests(rows)) & set(digests(rows, key=b"another key"))


def changed(value: Any) -> Iterator[Any]:
    """Values that differ in one place."""
    match value:
        case None:
            return
        case bool():
            yield not value
        case int() | float():
            yield value + 1
        case str():
            yield value + "x"
        case dict():
            for name, inner in value.items():
                yield from (value | {name: other} for other in changed(inner))
        case list():
            if value:
                yield value[1:]
            if value[::-1] != value:
                yield value[::-1]
            for place, inner in enumerate(value):
                yield from ([*value[:place], other, *value[place + 1 :]] for other in changed(inner))


def test_every_value_counts(rows: list[Row]):
    most = max(rows, key=lambda row: len(row["verdicts"]) + bool(row["limited_by"]))
    full = copy.deepcopy(most) | {"siblings": [{"node": "n", "number": 1, "at_ms": 5}], "failure": "budget"}
    full |= {"change": {"what": "a", "before": "{}", "after": "{}", "who": "b", "version": 1}, "ids": [1, 2]}
    others = [full | {name: other} for name, value in full.items() for other in changed(value)]
    others += [full | {name: None} for name in ("ids", "client_id", "failure") if full[name] is not None]
    assert len(others) > 100
    found = digests([full, *others])
    assert len(set(found)) == len(found)
    assert digests([full | {"ids": []}]) != digests([full | {"ids": None}])
