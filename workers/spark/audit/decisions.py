"""Whether an ask's verdicts make the decision that was given, by the domain's own rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from app.domain.decision import Verdict, combine
from workers.spark.audit.found import spelled

TAKEN: Final = (
    "quota",
    "entity",
    "bucket",
    "limit",
    "enforcement",
    "shadow",
    "outcome",
    "throttle_ms",
    "reason",
)
"""What a decision is made of, for each verdict."""

_MANY: Final = 65_536


def to_combine(rows: DataFrame) -> DataFrame:
    """The asks whose decision is not plain: where every quota admitted, there is nothing to combine.

    A plain ask that was not admitted is among them.
    """
    is_plain = (f.col("decision") == "admit") & f.forall("verdicts", lambda one: one["outcome"] == "admit")
    decided = (
        f.col("kind").isin("decision", "late")
        & f.col("order").isNotNull()
        & ~f.col("replayed")
        & (f.col("source") == "store")
    )
    verdicts = f.transform("verdicts", lambda one: f.struct(*(one[name].alias(name) for name in TAKEN)))
    return rows.where(decided & ~is_plain).select(
        "principal",
        "at_ms",
        "order",
        "decision",
        "throttle_ms",
        f.col("limited_by.quota").alias("by_quota"),
        f.col("limited_by.bucket").alias("by_bucket"),
        f.col("limited_by.entity").alias("by_entity"),
        f.col("limited_by.reason").alias("by_reason"),
        verdicts.alias("verdicts"),
    )


def combining(*, sequential: bool) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """For ``mapInArrow`` over ``to_combine``: the asks whose decision does not follow, as rows of cases."""

    def combine_all(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            wrong = [case for row in batch.to_pylist() if (case := _wrong(row, sequential=sequential))]
            if wrong:
                yield pa.RecordBatch.from_pylist(wrong, SCHEMA)

    return combine_all


SCHEMA: Final = pa.schema(
    [
        ("case", pa.string()),
        ("principal", pa.string()),
        ("at_ms", pa.int64()),
        ("order", pa.int64()),
        ("logged", pa.string()),
        ("exact", pa.string()),
        ("differs", pa.int64()),
    ]
)


def _wrong(row: dict[str, Any], *, sequential: bool) -> dict[str, Any] | None:
    verdicts = tuple(tuple(one[name] for name in TAKEN) for one in row["verdicts"] or ())
    outcome, throttle_ms, by = _combined(verdicts, sequential=sequential)
    exact = _words(outcome, throttle_ms, *(by or (None, None, None, None)))
    by_whom = (row["by_quota"], row["by_bucket"], row["by_entity"], row["by_reason"])
    logged = _words(row["decision"], row["throttle_ms"], *by_whom)
    if exact == logged:
        return None
    taken = {name: row[name] for name in ("principal", "at_ms", "order")}
    return {**taken, "case": "differs", "logged": logged, "exact": exact, "differs": 1}


@lru_cache(_MANY)
def _combined(
    verdicts: tuple[tuple[Any, ...], ...], *, sequential: bool
) -> tuple[str, int, tuple[str | None, ...] | None]:
    said = [
        Verdict(quota, entity, bucket, limit, enforcement, shadow, outcome, throttle_ms, reason=reason)
        for quota, entity, bucket, limit, enforcement, shadow, outcome, throttle_ms, reason in verdicts
    ]
    decided, throttle_ms, by = combine(said, sequential=sequential)
    return decided, throttle_ms, (by.quota, by.bucket, by.entity, by.reason) if by else None


def _words(
    decision: str,
    throttle_ms: int,
    quota: str | None,
    bucket: str | None,
    entity: str | None,
    reason: str | None,
) -> str:
    by = f" by {quota} of {bucket}" if quota else ""
    entity = f", set on {entity}" if entity else ""
    return f"the decision: {spelled(decision, throttle_ms, reason)}{by}{entity}"
