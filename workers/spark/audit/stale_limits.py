"""Finds the verdicts of a log whose limit was not in force; ``limits`` has the rule."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema

from workers.spark.audit.limits import FactorChange, JudgedPeriod, LimitChange, LimitUse, stale_limits
from workers.spark.buckets import from_store

STALE_USES: Final = pa.schema(
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
"""The columns of ``stale_uses``."""

Factors = Mapping[str, Sequence[FactorChange]]
"""The throttle factors that each node applied."""


def factors(rows: DataFrame) -> Factors:
    """The throttle factors in the log; there are few."""
    found: dict[str, list[FactorChange]] = {}
    logged = rows.where(f.col("kind") == "factor").select("node", "at_ms", "change.before", "change.after")
    for node, at_ms, before, after in logged.collect():
        with suppress(TypeError, ValueError):
            old = None if before is None else float(json.loads(before))
            change = FactorChange(at_ms, old, float(json.loads(after)))
            found.setdefault(node, []).append(change)
    return found


def stale_uses(rows: DataFrame, changes: DataFrame, applied: Factors, times: JudgedPeriod) -> DataFrame:
    """The limits that nodes used in verdicts of ``rows`` while they were not in force, with the times.

    Args:
        changes: rows that include the changes of quotas.
    """
    change = f.struct("at_ms", "change.version", "change.before", "change.after")
    changed = (
        changes.where(f.col("kind") == "quota")
        .groupBy(f.col("change.what").alias("entity"))
        .agg(f.collect_list(change).alias("changes"))
    )
    first_ms, last_ms = f.min("at_ms").alias("first_ms"), f.max("at_ms").alias("last_ms")
    used = (
        _verdicts(rows, "quota", "entity", "limit")
        .groupBy("quota", "entity", "node", "limit")
        .agg(f.count("*").alias("verdicts"), first_ms, last_ms)
        .groupBy("quota", "entity")
        .agg(f.collect_list(f.struct(*LimitUse._fields)).alias("uses"))
    )

    def check(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            found = []
            for row in batch.to_pylist():
                uses = [LimitUse(**use) for use in row["uses"]]
                limit_changes = [LimitChange(**change) for change in row["changes"] or ()]
                where = {"quota": row["quota"], "entity": row["entity"]}
                stale = stale_limits(row["quota"], uses, limit_changes, applied, times)
                found += [where | each._asdict() for each in stale]
            yield pa.RecordBatch.from_pylist(found, STALE_USES)

    return used.join(changed, "entity", "left").mapInArrow(check, from_arrow_schema(STALE_USES))


def stale_verdicts(rows: DataFrame, uses: DataFrame) -> DataFrame:
    """The verdicts of ``rows`` that ``stale_uses`` covers, as findings: counts, each with an example.

    There is one row for each principal, bucket and limit.
    """
    verdicts = _verdicts(rows, "quota", "entity", "limit", "bucket", "outcome").alias("v")
    same = [f.col(f"v.{name}") == f.col(f"s.{name}") for name in ("quota", "entity", "node", "limit")]
    then = f.col("v.at_ms").between(f.col("s.from_ms"), f.col("s.to_ms"))
    example = f.struct("v.at_ms", "v.order", "v.outcome", "v.entity", "s.exact")
    wrong = (
        verdicts.join(uses.alias("s"), [*same, then])
        .groupBy("v.principal", "v.quota", "v.bucket", "v.limit")
        .agg(f.min(example).alias("example"), f.count("*").alias("stale"))
    )
    logged = f.concat(
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
        logged.alias("logged"),
        "example.exact",
        "stale",
    )


def _number(column: Column) -> Column:
    """A number as text, without a fraction if it is whole."""
    whole = (column == f.floor(column)) & (column < 2**53)
    return f.when(whole, f.floor(column).cast("string")).otherwise(column.cast("string"))


def _verdicts(rows: DataFrame, *fields: str) -> DataFrame:
    """Some fields of each verdict that the store gave, with the node, principal, time and order of its row.

    Late verdicts are left out: their limit is from the time of the ask, their time from the store's answer.
    """
    of_row = ("node", "principal", "at_ms", "order")
    decided = from_store() & f.col("order").isNotNull() & ~f.col("replayed")
    arrays = (f.col(f"verdicts.{name}").alias(name) for name in fields)
    zipped = rows.where(decided).select(*of_row, *arrays)
    exploded = zipped.select(*of_row, f.explode(f.arrays_zip(*fields)).alias("one"))
    return exploded.select(*of_row, *(f"one.{name}" for name in fields))
