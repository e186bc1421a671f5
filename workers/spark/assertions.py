"""Assertions, computed with Spark: the content that every bucket should have at a moment.

They follow from the decision log, or from a foreign history. The job writes them as Parquet, and finally a
manifest, which marks the folder as complete.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, groupby, islice
from typing import Final, NamedTuple
from uuid import uuid4

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema

from app.domain.assertion import COLUMNS, MANIFEST, VERSION, Assertion
from app.domain.digest import fingerprint
from app.domain.quota import Layers
from app.redaction import url_without_secrets
from workers.spark import foreign, log
from workers.spark.backfill import deployment_secret, layers_of
from workers.spark.bucket_state import bucket_state_of
from workers.spark.buckets import (
    QUOTA_COLUMNS,
    BucketRow,
    Orders,
    bucket_events,
    bucket_rows,
    by_bucket,
    charges_apart,
    from_store,
)
from workers.spark.errors import JobError
from workers.spark.folder import OutputFolder
from workers.spark.log import Fingerprints, Period

TABLE: Final = "assertions"
ROWS_AT_ONCE: Final = 8_192
TYPES: Final = {"string": pa.string(), "bigint": pa.int64(), "double": pa.float64()}
SCHEMA: Final = pa.schema(
    [pa.field(name, TYPES[type_], nullable=nullable) for name, (type_, nullable) in COLUMNS.items()]
)

STATE_COLUMNS: Final = (
    "key",
    "order",
    "at_ms",
    "mode",
    "is_refused",
    "bucket",
    "usage",
    "charged_ids",
    "refreshed_ids",
    *(name for name in QUOTA_COLUMNS if name not in {"enforcement", "shadow"}),
)
"""The columns of ``by_bucket`` that determine a bucket's state."""


class Written(NamedTuple):
    """The result of a run: the number of assertions, their moment, and whether they include rates."""

    assertions: int
    at_ms: int
    rates: bool


def write_assertions(
    spark: SparkSession,
    arguments: argparse.Namespace,
    at_ms: int | None,
    from_ms: int | None,
    folder: OutputFolder,
) -> Written:
    """Write the assertions and their manifest.

    Args:
        at_ms: the moment; None is the time of the last row.
    """
    secret = deployment_secret()
    known = fingerprint(secret) if secret else None
    period = Period(from_ms, None if at_ms is None else at_ms + 1)
    rates = True
    if arguments.history:
        uses = _read_history(spark, arguments, period, secret)
        at_ms = _last_ms(uses, f.max("at_ms")) if at_ms is None else at_ms
        layers = layers_of(arguments.layers, arguments.window_ms)
        rows = from_history(uses, at_ms, arguments.window_ms, layers, arguments.max_ids, secret)
    else:
        fingerprints = Fingerprints(known)
        logged = log.read(spark, arguments.log, period, fingerprints.check)
        if at_ms is None:
            # The store's time, if the store decided anything: a node's clock may be ahead.
            by_store = f.max(f.when(f.col("order").isNotNull(), f.col("at_ms")))
            at_ms = _last_ms(logged, f.coalesce(by_store, f.max("at_ms")))
        rates, known = is_whole(logged), fingerprints.known
        rows = from_log(logged, at_ms, arguments.max_ids, rates=rates)
    folder.table(TABLE, rows)
    counts = spark.read.parquet(folder.inside(TABLE)).groupBy(f.input_file_name().alias("file")).count()
    files = sorted((row["file"].rsplit("/", 1)[1], row["count"]) for row in counts.collect())
    manifest = {
        "version": VERSION,
        "name": uuid4().hex,
        "at_ms": at_ms,
        "secret": known,
        "files": [{"name": f"{TABLE}/{name}", "rows": count} for name, count in files],
    }
    folder.text(MANIFEST, json.dumps(manifest, indent=1))
    return Written(sum(count for _, count in files), at_ms, rates)


def _read_history(
    spark: SparkSession, arguments: argparse.Namespace, period: Period, secret: bytes
) -> DataFrame:
    if not secret:
        raise JobError(
            "ids are hashed with the deployment's secret: set QUOTAGATE_HASH_SECRET, or migrate first"
        )
    url, kind = arguments.history, arguments.format
    if kind is None:
        kind = "json" if url.removesuffix(".gz").endswith((".json", ".jsonl", ".ndjson")) else "parquet"
    columns = foreign.HistoryColumns(arguments.principal_column, arguments.id_column, arguments.time_column)
    uses = foreign.read(spark, url, kind, columns, period)
    if uses.isEmpty():
        raise JobError(f"{url_without_secrets(url)}: no row in the period {period}")
    return uses


def _last_ms(rows: DataFrame, time: Column) -> int:
    last = rows.agg(time).first()
    assert last is not None
    return int(last[0])


def from_log(rows: DataFrame, at_ms: int, max_ids: int, *, rates: bool) -> DataFrame:
    """The content of buckets at a moment after all rows; ``rates`` only for a log that has every decision."""
    wrote_ids = (f.size("charged_ids") > 0) | (f.size("refreshed_ids") > 0)
    is_rate = f.col("algorithm") != "producer_ids"
    writes = by_bucket(rows).where(f.coalesce(wrote_ids, f.lit(False)) | (is_rate & f.lit(rates)))
    resets, _ = bucket_events(rows)

    def replay(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return to_arrow(_replayed(bucket_rows(batches), at_ms, max_ids, resets))

    return writes.select(*STATE_COLUMNS).mapInArrow(replay, from_arrow_schema(SCHEMA))


def from_history(
    uses: DataFrame, at_ms: int, window_ms: int, layers: Layers, max_ids: int, secret: bytes
) -> DataFrame:
    """The content that producer-id buckets should have at a moment, from a foreign history."""
    replay = foreign.replaying(at_ms, window_ms, layers, max_ids, secret)

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return to_arrow(replay(batches))

    return foreign.by_principal(uses).mapInArrow(run, from_arrow_schema(SCHEMA))


def is_whole(rows: DataFrame) -> bool:
    """Whether a log has every decision. QUOTAGATE_LOG=denied keeps only the ids of admitted asks."""
    counts = rows.agg(
        f.count_if(from_store() & (f.col("decision") == "admit")), f.count_if(charges_apart())
    ).first()
    assert counts is not None
    return bool(counts[0]) and not counts[1]


def to_arrow(assertions: Iterator[Assertion]) -> Iterator[pa.RecordBatch]:
    """Assertions as Arrow batches."""
    while some := list(islice(assertions, ROWS_AT_ONCE)):
        yield pa.record_batch([list(column) for column in zip(*some, strict=True)], schema=SCHEMA)


def _replayed(rows: Iterator[BucketRow], at_ms: int, max_ids: int, resets: Orders) -> Iterator[Assertion]:
    for _, group in groupby(rows, key=lambda row: row.key):
        first = next(group)
        state = bucket_state_of(first, max_ids)
        ahead = deque(resets.get((first.bucket, first.quota), ()))
        for row in chain((first,), group):
            while ahead and ahead[0] < row.order:
                ahead.popleft()
                state = bucket_state_of(row, max_ids)
            if row.mode != "peek":
                state.apply(row)
        if not ahead:  # else the last event of the bucket was a reset
            yield from state.assertions(at_ms)
