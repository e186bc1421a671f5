"""Assertions as data frames: from the decision log, and from a foreign history."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema

from app.domain.assertion import COLUMNS, Assertion
from app.domain.quota import Layers
from workers.spark import foreign
from workers.spark.buckets import Places, asked, by_bucket, places, resets
from workers.spark.standing import Standing, standing_of

ROWS_AT_ONCE: Final = 8_192
TYPES: Final = {"string": pa.string(), "bigint": pa.int64(), "double": pa.float64()}
SCHEMA: Final = pa.schema(
    [pa.field(name, TYPES[type_], nullable=nullable) for name, (type_, nullable) in COLUMNS.items()]
)

TAKEN: Final = (
    "key",
    "order",
    "at_ms",
    "mode",
    "is_refused",
    "quota",
    "bucket",
    "limit",
    "algorithm",
    "scope",
    "samples",
    "sample_ms",
    "burst",
    "window_ms",
    "interval_ms",
    "ttl_ms",
    "epoch",
    "max_debt",
    "usage",
    "charged_ids",
    "refreshed_ids",
)
"""What of ``by_bucket`` says how a bucket stands; the rest is for who judges it."""


def from_log(rows: DataFrame, at_ms: int, max_ids: int, *, rates: bool) -> DataFrame:
    """What buckets hold at a moment that no row is after; rates only of a log with every decision."""
    wrote = (f.size("charged_ids") > 0) | (f.size("refreshed_ids") > 0)
    is_rate = f.col("algorithm") != "producer_ids"
    taken = by_bucket(rows).where(f.coalesce(wrote, f.lit(False)) | (is_rate & f.lit(rates)))
    stand = _standing(at_ms, max_ids, places(resets(rows)))
    return taken.select(*TAKEN).mapInArrow(stand, from_arrow_schema(SCHEMA))


def from_history(
    uses: DataFrame, at_ms: int, window_ms: int, layers: Layers, max_ids: int, secret: bytes
) -> DataFrame:
    """What the filters and windows of principals should hold by a foreign history."""
    stand = foreign.standing(at_ms, window_ms, layers, max_ids, secret)

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return in_batches(stand(batches))

    return foreign.by_principal(uses).mapInArrow(run, from_arrow_schema(SCHEMA))


def is_whole(rows: DataFrame) -> bool:
    """Whether a log holds every decision: of asks that were admitted ``denied`` keeps only their ids."""
    admitted = (f.col("kind") == "decision") & (f.col("decision") == "admit") & (f.col("source") == "store")
    charges = f.exists("verdicts", lambda one: f.size(one["charged_ids"]) > 0)
    about = rows.agg(
        f.count_if(admitted).alias("admitted"), f.count_if((f.col("kind") == "ids") & charges).alias("apart")
    ).first()
    assert about is not None
    return bool(about["admitted"]) and not about["apart"]


def in_batches(assertions: Iterator[Assertion]) -> Iterator[pa.RecordBatch]:
    """Assertions as Arrow."""
    while some := list(islice(assertions, ROWS_AT_ONCE)):
        yield pa.record_batch([list(column) for column in zip(*some, strict=True)], schema=SCHEMA)


def _standing(
    at_ms: int, max_ids: int, emptied: Places
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def stand(batches: Iterable[pa.RecordBatch]) -> Iterator[Assertion]:
        key: str | None = None
        bucket: Standing | None = None
        ahead: list[int] = []
        for row in asked(batches):
            if row.key != key:
                if bucket is not None and not ahead:
                    yield from bucket.assertions(at_ms)
                key, bucket = row.key, standing_of(row, max_ids)
                ahead = list(emptied.get((row.bucket, row.quota), ()))
            while ahead and ahead[0] < row.order:
                ahead.pop(0)
                bucket = standing_of(row, max_ids)
            assert bucket is not None
            bucket.take(row)
        if bucket is not None and not ahead:  # else it was emptied after all that happened to it
            yield from bucket.assertions(at_ms)

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return in_batches(stand(batches))

    return run
