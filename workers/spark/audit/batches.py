"""Checks that the log has each batch as its node wrote it: all its rows, no others, and one version of each.

The faults of one batch are a plain function of a summary of its rows; Spark makes the summaries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema

from workers.decision_log.schema import ADDED, HOUR_MS, IDENTITY, SCHEMA

SHOWN: Final = 20
"""The most batches, and rows in two versions, that the report names; all are counted."""

FEW: Final = 1_000
"""Up to this many batches are read again by name; if there are more, all rows are read."""

EDGE_MS: Final = 60_000
"""The longest time between rows of one batch: near an hour's start, some may be in the hour before."""

AS_WRITTEN: Final = tuple(name for name in SCHEMA.names if name not in ADDED)
"""The columns by which two rows of one identity are compared: a newer writer may repeat a batch with more."""


class BatchSummary(NamedTuple):
    """A summary of a batch's rows.

    Attributes:
        places: how many different places the rows have.
        beyond: how many of these places the batch cannot have, given its size.
        last: the largest place.
        least, most: the batch's size according to its rows, which should agree; None from an older writer.
        from_ms: the time of the first row.
    """

    batch: str
    places: int
    beyond: int
    last: int
    least: int | None
    most: int | None
    from_ms: int


class BatchFault(NamedTuple):
    """The fault of a batch: how many rows are missing, and how many were added."""

    batch: str
    missing: int
    added: int
    from_ms: int


FAULTS: Final = pa.schema(
    [("batch", pa.string()), ("missing", pa.int64()), ("added", pa.int64()), ("from_ms", pa.int64())]
)


def fault_of(summary: BatchSummary) -> BatchFault:
    """The fault of a batch. From an older writer, only rows missing before the last one are found."""
    size = summary.last + 1 if summary.most is None else summary.most
    added = max(summary.beyond, int(summary.most != summary.least))
    missing = max(size - (summary.places - summary.beyond), 0)
    return BatchFault(summary.batch, missing, added, summary.from_ms)


def summaries(rows: DataFrame) -> DataFrame:
    """A summary of each batch, with the other nodes that it names; reads the rows once."""
    return rows.groupBy("batch").agg(
        f.count_distinct("place").alias("places"),
        f.count_if((f.col("place") >= f.col("batch_rows")) | (f.col("place") < 0)).alias("beyond"),
        f.max("place").alias("last"),
        f.min("batch_rows").alias("least"),
        f.max("batch_rows").alias("most"),
        f.min("at_ms").alias("from_ms"),
        f.max("siblings").alias("siblings"),
    )


class BatchFaults(NamedTuple):
    """The numbers of rows missing from batches and of rows added, and the most faulty batches."""

    missing: int
    added: int
    batches: Sequence[BatchFault]


def faults(batches: DataFrame, all_rows: DataFrame | None, begins_ms: int | None) -> BatchFaults:
    """The faults of batches.

    Args:
        batches: their ``summaries``.
        all_rows: all rows of the log, if only a period is audited: a batch may have rows outside of it.
        begins_ms: the first time of a log whose beginning was removed: its first batches may have rows in a
            removed hour. None if the log has its beginning.
    """
    wrong = _faulty(batches)
    if all_rows is not None:
        names = [row.batch for row in wrong.select("batch").limit(FEW + 1).collect()]
        if names:
            some = all_rows if len(names) > FEW else all_rows.where(f.col("batch").isin(names))
            wrong = _faulty(summaries(some.join(wrong.select("batch"), "batch", "left_semi")))
    if begins_ms is not None:
        hour_ms = begins_ms // HOUR_MS * HOUR_MS
        wrong = wrong.where((f.col("from_ms") >= hour_ms + EDGE_MS) | (f.col("added") > 0))
    total = wrong.agg(f.sum("missing"), f.sum("added")).first()
    assert total is not None
    if total[0] is None:
        return BatchFaults(0, 0, ())
    worst = wrong.orderBy(f.desc(f.col("missing") + f.col("added")), "batch").limit(SHOWN).collect()
    return BatchFaults(total[0], total[1], tuple(BatchFault(*row) for row in worst))


def in_two_versions(rows: DataFrame, batches: Sequence[str] | None) -> list[tuple[str, int]]:
    """The identities (batch and place) of rows that differ in content.

    Args:
        batches: the batches to look at, as ``log.repeated_batches`` found them; None for all.
    """
    if batches is not None and not batches:
        return []
    some = rows if batches is None else rows.where(f.col("batch").isin(list(batches)))
    content = f.to_json(f.struct(*(f.col(name) for name in AS_WRITTEN)))
    versions = some.groupBy(*IDENTITY).agg(f.count_distinct(content).alias("versions"))
    found = versions.where(f.col("versions") > 1).orderBy(*IDENTITY).limit(FEW + 1).collect()
    return [(row["batch"], row["place"]) for row in found]


def content_of(row: dict[str, Any]) -> str:
    """The content of a plain Python row, as ``in_two_versions`` compares it."""
    return repr([row[name] for name in AS_WRITTEN])


def _faulty(batches: DataFrame) -> DataFrame:
    columns = batches.select(*BatchSummary._fields)
    return columns.mapInArrow(_fault_batches, from_arrow_schema(FAULTS))


def _fault_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        found = (fault_of(BatchSummary(**row)) for row in batch.to_pylist())
        if wrong := [fault._asdict() for fault in found if fault.missing or fault.added]:
            yield pa.RecordBatch.from_pylist(wrong, FAULTS)
