"""The verdicts of a log whose limit is not the one that stood (``limits`` has the rule)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema

from workers.spark.audit.limits import Change, Factor, Times, Use, suspects

SUSPECTS: Final = pa.schema(
    [
        ("quota", pa.string()),
        ("entity", pa.string()),
        ("node", pa.string()),
        ("limit", pa.float64()),
        ("from_ms", pa.int64()),
        ("to_ms", pa.int64()),
        ("exact", pa.string()),
    ]
)
"""The columns of ``suspected``."""

Factors = Mapping[str, Sequence[Factor]]
"""What throttle factors each node applied."""


def factors(rows: DataFrame) -> Factors:
    """The throttle factors that rows tell of; there are few."""
    found: dict[str, list[Factor]] = {}
    told = rows.where(f.col("kind") == "factor").select("node", "at_ms", "change.before", "change.after")
    for node, at_ms, before, after in told.collect():
        try:
            factor = Factor(
                at_ms, None if before is None else float(json.loads(before)), float(json.loads(after))
            )
        except (TypeError, ValueError):
            continue
        found.setdefault(node, []).append(factor)
    return found


def suspected(rows: DataFrame, changes: DataFrame, applied: Factors, times: Times) -> DataFrame:
    """Which limits nodes used in verdicts of ``rows`` that did not stand, and when they did not.

    Args:
        changes: rows among which those of changed quotas are.
    """
    told = (
        changes.where(f.col("kind") == "quota")
        .groupBy(f.col("change.what").alias("entity"))
        .agg(
            f.collect_list(f.struct("at_ms", "change.version", "change.before", "change.after")).alias(
                "changes"
            )
        )
    )
    used = (
        _verdicts(rows, "quota", "entity", "limit")
        .groupBy("quota", "entity", "node", "limit")
        .agg(
            f.count("*").alias("verdicts"), f.min("at_ms").alias("first_ms"), f.max("at_ms").alias("last_ms")
        )
        .groupBy("quota", "entity")
        .agg(f.collect_list(f.struct(*Use._fields)).alias("uses"))
    )
    judge = _judging(applied, times)
    return used.join(told, "entity", "left").mapInArrow(judge, from_arrow_schema(SUSPECTS))


def _judging(
    applied: Factors, times: Times
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def judge(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            found = []
            for row in batch.to_pylist():
                uses = [Use(**use) for use in row["uses"]]
                changes = [Change(**change) for change in row["changes"] or ()]
                where = {"quota": row["quota"], "entity": row["entity"]}
                found += [
                    where | each._asdict() for each in suspects(row["quota"], uses, changes, applied, times)
                ]
            yield pa.RecordBatch.from_pylist(found, SUSPECTS)

    return judge


def stale(rows: DataFrame, suspected: DataFrame) -> DataFrame:
    """The verdicts of ``rows`` whose limit did not stand, as rows of what is found: an example and a count.

    There is one for each principal, bucket and limit.
    """
    verdicts = _verdicts(rows, "quota", "entity", "limit", "bucket", "outcome").alias("v")
    named = [f.col(f"v.{name}") == f.col(f"s.{name}") for name in ("quota", "entity", "node", "limit")]
    then = f.col("v.at_ms").between(f.col("s.from_ms"), f.col("s.to_ms"))
    example = f.struct("v.at_ms", "v.order", "v.outcome", "v.entity", "s.exact")
    wrong = (
        verdicts.join(suspected.alias("s"), [*named, then])
        .groupBy("v.principal", "v.quota", "v.bucket", "v.limit")
        .agg(f.min(example).alias("example"), f.count("*").alias("stale"))
    )
    said = f.concat(
        "example.outcome", f.lit(", limit "), _number(f.col("limit")), f.lit(" of "), f.col("example.entity")
    )
    return wrong.select(
        f.lit("stale").alias("case"),
        "principal",
        "quota",
        "bucket",
        "example.at_ms",
        "example.order",
        f.col("stale").cast("double").alias("amount"),
        said.alias("logged"),
        "example.exact",
        "stale",
    )


def _number(column: Column) -> Column:
    """A number as it is read: without a fraction if it has none."""
    whole = (column == f.floor(column)) & (column < 2**53)
    return f.when(whole, f.floor(column).cast("string")).otherwise(column.cast("string"))


def _verdicts(rows: DataFrame, *fields: str) -> DataFrame:
    """Each verdict that the store gave: some of its fields, and of its row who asked, where and when.

    A late one is left out: its limit is that of when it was asked, and its time that of the store in the end.
    """
    decided = (
        (f.col("kind") == "decision")
        & f.col("order").isNotNull()
        & (f.col("source") == "store")
        & ~f.col("replayed")
    )
    arrays = rows.where(decided).select(
        "node", "principal", "at_ms", "order", *(f.col(f"verdicts.{name}").alias(name) for name in fields)
    )
    zipped = arrays.select(
        "node", "principal", "at_ms", "order", f.explode(f.arrays_zip(*fields)).alias("one")
    )
    return zipped.select("node", "principal", "at_ms", "order", *(f"one.{name}" for name in fields))
