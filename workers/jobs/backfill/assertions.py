"""Assertions, the content that every bucket should have at a moment: as Arrow tables, and as a folder.

They follow from the decision log, or from a foreign history. The manifest is written last, and marks the
folder as complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, NamedTuple, Protocol
from uuid import uuid4

import pyarrow as pa

from app.domain.assertion import COLUMNS, MANIFEST, VERSION, Assertion
from workers.jobs.folder import OutputFolder
from workers.jobs.runner import Runner

TABLE: Final = "assertions"
FILE: Final = f"{TABLE}/part-0.parquet"
SUMMARY: Final = "summary.json"
ROWS_AT_ONCE: Final = 8_192
ROWS_OF_A_PARTITION: Final = 500_000
"""About so many verdicts or uses are sorted at a time by each process."""

TYPES: Final = {"string": pa.string(), "bigint": pa.int64(), "double": pa.float64()}
SCHEMA: Final = pa.schema(
    [pa.field(name, TYPES[type_], nullable=nullable) for name, (type_, nullable) in COLUMNS.items()]
)
ORDER: Final = [(name, "ascending") for name in ("bucket", "quota", "identity", "kind", "at_ms")]


class Asserted(NamedTuple):
    """The assertions of a partition as ``SCHEMA``, and how many buckets they are about."""

    table: pa.Table
    buckets: int


class States(NamedTuple):
    """The content of buckets.

    Attributes:
        at_ms: the moment.
        rates: whether it includes rates and token buckets.
        parts: the assertions, by partition.
    """

    at_ms: int
    rates: bool
    parts: Iterator[Asserted]


class Source(Protocol):
    """A log or a history."""

    def states(self, runner: Runner, at_ms: int | None, max_ids: int) -> States:
        """The content of buckets at ``at_ms``; if it is None, at the time of the last row."""


class Written(NamedTuple):
    """The result of a run: the number of assertions, their moment, and whether they include rates."""

    assertions: int
    at_ms: int
    rates: bool


def write_assertions(
    runner: Runner, source: Source, at_ms: int | None, max_ids: int, secret: str | None, folder: OutputFolder
) -> Written:
    """Write the assertions, a summary, and the manifest.

    Args:
        at_ms: the moment; None is the time of the last row.
        secret: the fingerprint of the secret that ids are hashed with; None if it is not known.

    Raises:
        JobError: a file or a row is invalid, or the folder cannot be written.
    """
    states = source.states(runner, at_ms, max_ids)
    rows = buckets = ids = 0

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal rows, buckets, ids
        for part in states.parts:
            rows += part.table.num_rows
            buckets += part.buckets
            ids += part.table.num_rows - part.table.column("digest").null_count
            yield from part.table.to_batches()

    folder.table(TABLE, batches(), SCHEMA)
    summary = {"buckets": buckets, "ids": ids, "as_of_ms": states.at_ms}
    folder.text(SUMMARY, json.dumps(summary, indent=1))
    manifest = {
        "version": VERSION,
        "name": uuid4().hex,
        "at_ms": states.at_ms,
        "secret": secret,
        "files": [{"name": FILE, "rows": rows}],
    }
    folder.text(MANIFEST, json.dumps(manifest, indent=1))
    return Written(rows, states.at_ms, states.rates)


def asserted(assertions: Iterable[Assertion]) -> Asserted:
    """Assertions as a table in the order that they have in files."""
    each = iter(assertions)
    buckets: set[tuple[str, str]] = set()
    batches = []
    while some := list(islice(each, ROWS_AT_ONCE)):
        buckets.update((one.quota, one.bucket) for one in some)
        columns = zip(SCHEMA.types, zip(*some, strict=True), strict=True)
        batches.append(pa.record_batch([pa.array(column, type_) for type_, column in columns], schema=SCHEMA))
    return Asserted(pa.Table.from_batches(batches, SCHEMA).sort_by(ORDER), len(buckets))


def partitions_for(rows: int) -> int:
    """How many partitions a number of verdicts or uses should have."""
    return max(1, rows // ROWS_OF_A_PARTITION)
