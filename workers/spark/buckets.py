"""The log seen by bucket: one row for each verdict, in the order in which the store decided them."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import repeat
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from app.domain.decision import BYTE_RATES
from app.domain.quota import Layers, Quota

_LARGE: Final = 4_096

Places = dict[tuple[str, str], list[int]]
"""Places in the store's order, ascending, by a bucket's name and the quota."""


class Asked(NamedTuple):
    """One verdict, and of its ask what concerns the bucket; the fields are the columns of ``by_bucket``.

    Attributes:
        key: names the bucket: what a change of starts an empty one is part of it.
        is_refused: the whole ask was, by whatever quota: nothing was charged.
        byte_delay_ms: the larger delay that a byte rate gave the same ask.
        ids: of producer ids the ask's, as signed integers.
    """

    key: str
    order: int
    at_ms: int
    principal: str | None
    mode: str
    recheck: bool
    is_refused: bool
    byte_delay_ms: int
    ids: list[int] | None
    quota: str
    bucket: str
    entity: str
    limit: float
    algorithm: str
    enforcement: str
    shadow: bool
    scope: str
    samples: int
    sample_ms: int
    burst: float
    window_ms: int
    interval_ms: int
    ttl_ms: int
    epoch: int
    max_debt: float | None
    usage: float
    outcome: str
    throttle_ms: int
    observed: float | None
    remaining: float | None
    reason: str | None
    correction: int
    charged_ids: list[int] | None
    refreshed_ids: list[int] | None

    def as_quota(self) -> Quota:
        """The quota as it applied to this ask."""
        said: tuple[Any, ...] = self[_FIRST_OF_QUOTA:_PAST_QUOTA]
        return _quota(self.quota, *said)


_IDS: Final = Asked._fields.index("ids")
VERDICT_COLUMNS: Final = Asked._fields[_IDS + 1 :]
"""What is taken of a verdict as it stands there."""
_FIRST_OF_QUOTA: Final = Asked._fields.index("limit")
_PAST_QUOTA: Final = Asked._fields.index("usage")


@lru_cache(_LARGE)
def _quota(*said: Any) -> Quota:
    (
        key,
        limit,
        algorithm,
        enforcement,
        shadow,
        scope,
        samples,
        sample_ms,
        burst,
        window,
        interval,
        ttl,
        epoch,
        max_debt,
    ) = said
    return Quota(
        key,
        limit,
        algorithm,
        enforcement,
        shadow=shadow,
        scope=scope,
        samples=samples,
        sample_ms=sample_ms,
        burst=burst,
        window_ms=window,
        layers=Layers(interval, ttl),
        epoch=epoch,
        max_debt=math.inf if max_debt is None else max_debt,
    )


def by_bucket(rows: DataFrame, partitions: int | None = None) -> DataFrame:
    """Each verdict that the store gave, a bucket's together and in order; answers given again are left out.

    Rows of kind ``ids`` are there too: what was charged by asks that are not logged themselves, and what was
    refreshed for asks that were refused without the store. So are those of kind ``late``: the store decided.
    """
    by_store = (f.col("source") == "store") | (f.col("failure") == "store_full")
    decided = f.col("order").isNotNull() & by_store & ~f.col("replayed")
    verdict = f.col("verdict")
    exploded = rows.where(f.col("kind").isin("decision", "late", "ids") & decided).select(
        "order",
        "at_ms",
        "principal",
        f.coalesce("mode", f.lit("admit")).alias("mode"),
        "recheck",
        f.coalesce(f.col("decision").isin("throttle", "reject"), f.lit(False)).alias("is_refused"),
        _byte_delay().alias("byte_delay_ms"),
        f.col("ids").alias("all_ids"),
        f.explode("verdicts").alias("verdict"),
    )
    counts_ids = verdict["algorithm"] == "producer_ids"
    columns: dict[str, Column] = {
        **{name: f.col(name) for name in Asked._fields[1:_IDS]},
        "ids": f.when(counts_ids, f.col("all_ids")),
        **{name: verdict[name] for name in VERDICT_COLUMNS},
    }
    key = bucket_key(**{name: verdict[name] for name in KEY_COLUMNS})
    flat = exploded.select(key.alias("key"), *(columns[name].alias(name) for name in Asked._fields[1:]))
    # what a full store had no room for was not decided by it, and nothing was charged
    given = flat.where(~f.col("reason").eqNullSafe("store_full"))
    spread = given.repartition(partitions, "key") if partitions else given.repartition("key")
    return spread.sortWithinPartitions("key", "order")


def resets(rows: DataFrame) -> DataFrame:
    """When which bucket was emptied on purpose: its name, the quota, and the place in the store's order."""
    return _happened(rows, "reset", "change.before")


def loads(rows: DataFrame) -> DataFrame:
    """When something was put into which bucket that the log does not tell of, as ``resets`` has it."""
    return _happened(rows, "load", "change.after")


def places(happened: DataFrame) -> Places:
    """What `resets` or `loads` found; administrators do so rarely."""
    found: Places = {}
    for bucket, quota, order in happened.distinct().collect():
        insort(found.setdefault((bucket, quota), []), order)
    return found


def _happened(rows: DataFrame, kind: str, column: str) -> DataFrame:
    quotas = f.from_json(column, "quotas array<string>")["quotas"]
    these = rows.where((f.col("kind") == kind) & f.col("order").isNotNull())
    return these.select(f.col("change.what").alias("bucket"), f.explode(quotas).alias("quota"), "order")


KEY_COLUMNS: Final = ("quota", "bucket", "algorithm", "samples", "sample_ms", "scope", "epoch")


def bucket_key(**columns: Column) -> Column:
    """The name of one bucket: the quota's key, the bucket's own name, and what a change of empties it.

    ``Quota.identity`` says what that is: of producer ids samples are no part.
    """
    counts_ids = columns["algorithm"] == "producer_ids"
    parts = [
        f.when(counts_ids, f.lit(0)).otherwise(column) if name in {"samples", "sample_ms"} else column
        for name, column in columns.items()
    ]
    return f.concat_ws("\t", *(part.cast("string") for part in parts))


def asked(batches: Iterable[pa.RecordBatch]) -> Iterator[Asked]:
    """The rows of ``by_bucket``, as they stream through a program; a column that was not taken is None."""
    for batch in batches:
        names = set(batch.schema.names)
        columns = [batch.column(n).to_pylist() if n in names else repeat(None) for n in Asked._fields]
        yield from map(Asked._make, zip(*columns, strict=False))


def _byte_delay() -> Column:
    """The larger delay of the byte rates among a row's verdicts: KIP-124 measures requests after it."""
    return f.coalesce(
        f.array_max(
            f.transform(
                "verdicts",
                lambda one: f.when(
                    one["quota"].isin(*BYTE_RATES)
                    & (one["outcome"] == "delay")
                    & ~one["shadow"]
                    & ~one["reason"].eqNullSafe("store_full"),
                    one["throttle_ms"],
                ).otherwise(f.lit(0)),
            )
        ),
        f.lit(0),
    )
