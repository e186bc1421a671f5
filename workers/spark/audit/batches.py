"""Whether each batch is in the log as its node left it: all its rows, no others, and none in two versions.

What is wrong with one batch is a plain function of what is seen of it; Spark gathers that.
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
"""Batches, and rows in two versions, that the report names; all are counted."""

FEW: Final = 1_000
"""So many batches are looked for by name; of more all are looked at again."""

EDGE_MS: Final = 60_000
"""Rows of one batch are at most so far apart, so that a batch may have lost some with the hour before."""

AS_WRITTEN: Final = tuple(name for name in SCHEMA.names if name not in ADDED)
"""What two rows of one identity are compared by: a newer writer may leave a batch anew, with more columns."""


class Seen(NamedTuple):
    """What is there of one batch.

    Attributes:
        places: how many there are, each once.
        beyond: how many of them the batch cannot have had, by the number of its rows.
        last: the largest place.
        least, most: how many rows it has, by its own rows, which should agree; None of an older writer.
        from_ms: the time of its first row.
    """

    batch: str
    places: int
    beyond: int
    last: int
    least: int | None
    most: int | None
    from_ms: int


class Lacks(NamedTuple):
    """What is wrong with a batch: rows that are missing, rows that it did not have."""

    batch: str
    missing: int
    added: int
    from_ms: int


LACKS: Final = pa.schema(
    [("batch", pa.string()), ("missing", pa.int64()), ("added", pa.int64()), ("from_ms", pa.int64())]
)


def lacks(seen: Seen) -> Lacks:
    """What is wrong with a batch; of an older writer's only what is missing between its rows is known."""
    says = seen.last + 1 if seen.most is None else seen.most
    added = max(seen.beyond, int(seen.most != seen.least))
    return Lacks(seen.batch, max(says - (seen.places - seen.beyond), 0), added, seen.from_ms)


def lacking(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For ``mapInArrow`` over ``seen``: the batches with which something is wrong."""
    for batch in batches:
        columns = (batch.column(name).to_pylist() for name in Seen._fields)
        found = [lacks(Seen(*each)) for each in zip(*columns, strict=True)]
        wrong = [each._asdict() for each in found if each.missing or each.added]
        if wrong:
            yield pa.RecordBatch.from_pylist(wrong, LACKS)


def seen(rows: DataFrame) -> DataFrame:
    """What is there of each batch, and what it says of other nodes: the rows are read for it once."""
    return rows.groupBy("batch").agg(
        f.count_distinct("place").alias("places"),
        f.count_if((f.col("place") >= f.col("batch_rows")) | (f.col("place") < 0)).alias("beyond"),
        f.max("place").alias("last"),
        f.min("batch_rows").alias("least"),
        f.max("batch_rows").alias("most"),
        f.min("at_ms").alias("from_ms"),
        f.max("siblings").alias("siblings"),
    )


class Inside(NamedTuple):
    """What is wrong inside of batches: rows missing, rows added, and the batches of which most are."""

    missing: int
    added: int
    batches: Sequence[Lacks]


def inside(there: DataFrame, everywhere: DataFrame | None, begins_ms: int | None) -> Inside:
    """What is wrong inside the batches that ``seen`` saw.

    Args:
        everywhere: all rows that there are, if only those of a period are looked at.
        begins_ms: the first time of a log whose beginning was removed, and with it rows of batches whose
            others are there; None if it has its beginning.
    """
    wrong = _wrong(there)
    if everywhere is not None:
        names = [row.batch for row in wrong.select("batch").limit(FEW + 1).collect()]
        if names:
            among = everywhere if len(names) > FEW else everywhere.where(f.col("batch").isin(names))
            wrong = _wrong(seen(among.join(wrong.select("batch"), "batch", "left_semi")))
    if begins_ms is not None:
        hour_ms = begins_ms // HOUR_MS * HOUR_MS
        wrong = wrong.where((f.col("from_ms") >= hour_ms + EDGE_MS) | (f.col("added") > 0))
    total = wrong.agg(f.sum("missing"), f.sum("added")).first()
    assert total is not None
    if total[0] is None:
        return Inside(0, 0, ())
    worst = wrong.orderBy(f.desc(f.col("missing") + f.col("added")), "batch").limit(SHOWN).collect()
    return Inside(total[0], total[1], tuple(Lacks(*row) for row in worst))


def twice(rows: DataFrame, batches: Sequence[str] | None) -> list[tuple[str, int]]:
    """The identities, batch and place, under which rows stand that are not the same.

    Args:
        batches: that stand twice, as ``log.standing_twice`` found; None if those are too many to name.
    """
    if batches is not None and not batches:
        return []
    among = rows if batches is None else rows.where(f.col("batch").isin(list(batches)))
    content = f.to_json(f.struct(*(f.col(name) for name in AS_WRITTEN)))
    versions = among.groupBy(*IDENTITY).agg(f.count_distinct(content).alias("versions"))
    found = versions.where(f.col("versions") > 1).orderBy(*IDENTITY).limit(FEW + 1).collect()
    return [(row["batch"], row["place"]) for row in found]


def content_of(row: dict[str, Any]) -> str:
    """What ``twice`` compares, of a row in plain Python."""
    return repr([row[name] for name in AS_WRITTEN])


def _wrong(there: DataFrame) -> DataFrame:
    return there.select(*Seen._fields).mapInArrow(lacking, from_arrow_schema(LACKS))
