"""The decision log by bucket: one row for each verdict, in the store's order; and conditions on log rows."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import repeat
from operator import attrgetter
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from app.decision_log import columns
from app.domain.decision import BYTE_RATES
from app.domain.quota import PRODUCER_IDS_RATE, Quota

DIGEST_BYTES: Final = 8
_LARGE: Final = 4_096

ORDERS_PER_MS: Final = 128 * 1_000
"""The order of a call is the store's time in microseconds, or later, times 128 (docs/decisions, 0033)."""

Orders = dict[tuple[str, str], list[int]]
"""Places in the store's order, ascending, by bucket name and quota key."""


class BucketRow(NamedTuple):
    """A row of ``by_bucket``: one verdict, and the fields of the ask that its bucket needs.

    Attributes:
        key: identifies the bucket; it changes when a change of the quota starts an empty bucket.
        is_refused: the ask was refused, by this quota or another: nothing was charged.
        byte_delay_ms: the largest delay that a byte rate gave to the same ask.
        ids: the ask's producer ids as signed integers; None for other quotas.
        how: ``alone`` if the node decided from known ids, and ``renewal`` if it wrote known ids again;
            ``lease`` if the usage is held, and ``settlement`` if it was spent of a lease; ``undone`` if the
            charge was taken back later, and ``undo`` if this row takes one back; else empty.
        lease, lease_ms: the name of that lease, and how long it lasts.
    """

    key: str
    how: str
    order: int
    at_ms: int
    principal: str | None
    mode: str
    recheck: bool
    is_refused: bool
    byte_delay_ms: int
    lease: str | None
    lease_ms: int | None
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
    bucket_order: int | None

    @property
    def is_charged(self) -> bool:
        """Whether the usage was charged."""
        return self.mode in {"admit", "record"} and not self.is_refused

    def as_quota(self) -> Quota:
        """The quota as it applied to this ask."""
        return _quota(_quota_values(self))


def digests_of(ids: Sequence[int] | None) -> tuple[bytes, ...]:
    """The digests that the log holds as signed integers."""
    return tuple(each.to_bytes(DIGEST_BYTES, "big", signed=True) for each in ids or ())


QUOTA_COLUMNS: Final = tuple(name for name in columns.QUOTA if name not in {"entity", "bucket"})
_quota_values = attrgetter(*QUOTA_COLUMNS)
VERDICT_COLUMNS: Final = tuple(column.name for column in columns.VERDICT)
_ASK_COLUMNS: Final = tuple(
    name for name in BucketRow._fields if name not in {*VERDICT_COLUMNS, "key", "ids", "how"}
)


@lru_cache(_LARGE)
def _quota(values: tuple[Any, ...]) -> Quota:
    return columns.as_quota(dict(zip(QUOTA_COLUMNS, values, strict=True)))


def by_bucket(rows: DataFrame) -> DataFrame:
    """The verdicts that the store gave, grouped by bucket and in the store's order.

    Rows of kind ``ids`` (charges of asks that are not logged, and ids refreshed for asks that a node refused
    itself), ``renewal``, ``late``, ``lease``, ``settlement``, ``undone`` and ``undo`` are included. So are
    verdicts that a node gave from known ids, placed by their time. Answers repeated to a retry are left out.
    """
    by_store = (f.col("source") == "store") | (f.col("failure") == "store_full")
    # In several slots of a cluster each verdict has its own place. A verdict without a place was not given by
    # the store, comes from a ``look``, or has a row of its own because its charge was taken back.
    own_places = f.exists("verdicts", lambda one: one["bucket_order"].isNotNull())
    decided = f.col("order").isNotNull() & (by_store | own_places) & ~f.col("replayed")
    is_leased = f.col("kind").isin("lease", "settlement")
    is_kind = f.col("kind").isin("decision", "late", "ids", "renewal", "undone", "undo") | is_leased
    written = is_kind & decided
    without_room = (f.col("kind") == "lease") & (f.col("source") == "fallback")
    verdict = f.col("verdict")
    exploded = rows.where(written | answered_alone()).select(
        "kind",
        # without the store: after everything that the node can have known at that time
        f.coalesce("order", (f.col("at_ms") + 1) * ORDERS_PER_MS - 1).alias("order"),
        "at_ms",
        "principal",
        f.coalesce("mode", f.lit("admit")).alias("mode"),
        "recheck",
        (f.coalesce(f.col("decision").isin("throttle", "reject"), f.lit(False)) | without_room).alias(
            "is_refused"
        ),
        _byte_delay().alias("byte_delay_ms"),
        f.when(is_leased, f.col("change.what")).alias("lease"),
        f.when(is_leased, f.from_json("change.after", "lease_ms long")["lease_ms"]).alias("lease_ms"),
        f.col("ids").alias("all_ids"),
        own_places.alias("in_part"),
        f.explode("verdicts").alias("verdict"),
    )
    exploded = exploded.where(~f.col("in_part") | verdict["bucket_order"].isNotNull())
    exploded = exploded.withColumn("order", f.coalesce(verdict["bucket_order"], "order"))
    is_alone = (
        f.col("kind").isin("decision", "late")
        & (verdict["algorithm"] == "producer_ids")
        & verdict["observed"].isNull()
        & ~verdict["reason"].eqNullSafe("store_full")
    )
    named = ("renewal", "lease", "settlement", "undone", "undo")
    of_kind = f.when(f.col("kind").isin(*named), f.col("kind"))
    how = of_kind.when(is_alone, "alone").otherwise("").alias("how")
    flat = exploded.select(
        how,
        bucket_key(**{name: verdict[name] for name in KEY_COLUMNS}).alias("key"),
        *_ASK_COLUMNS,
        f.when(verdict["algorithm"] == "producer_ids", f.col("all_ids")).alias("ids"),
        *(verdict[name].alias(name) for name in VERDICT_COLUMNS),
    )
    # A full store neither decided nor charged the verdicts that it had no room for.
    given = flat.where(~f.col("reason").eqNullSafe("store_full"))
    return given.repartition("key").sortWithinPartitions("key", "order")


def bucket_events(rows: DataFrame) -> tuple[Orders, Orders]:
    """The resets of buckets, and the backfills loaded into them; there are few of both."""
    resets: Orders = {}
    loads: Orders = {}
    is_reset = f.col("kind") == "reset"
    change = f.when(is_reset, f.col("change.before")).otherwise(f.col("change.after"))
    quotas = f.explode(f.from_json(change, "quotas array<string>")["quotas"])
    events = rows.where(f.col("kind").isin("reset", "load") & f.col("order").isNotNull())
    events = events.select(is_reset, f.col("change.what"), quotas, "order").distinct()
    for of_reset, bucket, quota, order in events.collect():
        insort((resets if of_reset else loads).setdefault((bucket, quota), []), order)
    return resets, loads


def answered_alone() -> Column:
    """Whether a node decided a row from known producer ids, without asking the store at all.

    The throttle factor also decides asks without the store, but it is no quota of ids.
    """
    by = f.col("limited_by")["quota"]
    only = (f.size("verdicts") == 1) & (f.col("verdicts")[0]["algorithm"] == "producer_ids")
    return (
        (f.col("kind") == "decision")
        & (f.col("source") == "local")
        & only
        & (by.isNull() | (by == PRODUCER_IDS_RATE))
    )


KEY_COLUMNS: Final = ("quota", "bucket", "algorithm", "samples", "sample_ms", "scope", "epoch")


def bucket_key(**fields: Column) -> Column:
    """The key of a bucket: quota key, bucket name, and every field whose change resets the bucket.

    ``Quota.identity`` lists these fields: for producer ids they do not include the samples.
    """
    counts_ids = fields["algorithm"] == "producer_ids"
    parts = [
        f.when(counts_ids, f.lit(0)).otherwise(column) if name in {"samples", "sample_ms"} else column
        for name, column in fields.items()
    ]
    return f.concat_ws("\t", *(part.cast("string") for part in parts))


def bucket_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[BucketRow]:
    """The rows of ``by_bucket`` from Arrow batches; a column that was not selected is None."""
    for batch in batches:
        names = set(batch.schema.names)
        values = [batch.column(n).to_pylist() if n in names else repeat(None) for n in BucketRow._fields]
        yield from map(BucketRow._make, zip(*values, strict=False))


def from_store() -> Column:
    """Whether a row is a decision of the store, or its repetition to a retry."""
    return (f.col("kind") == "decision") & (f.col("source") == "store")


def without_store() -> Column:
    """Whether a row is a decision without the store; the failed call may still have charged buckets."""
    unanswered = f.col("order").isNull()  # a full store answers with its charges
    return (f.col("kind") == "decision") & (f.col("source") == "fallback") & unanswered


def charges_apart() -> Column:
    """Whether a row has only the charges of an ask that is not logged, as QUOTAGATE_LOG=denied writes."""
    return (f.col("kind") == "ids") & f.exists("verdicts", lambda one: f.size(one["charged_ids"]) > 0)


def charging_mode() -> Column:
    """Whether a row's mode charges."""
    return f.col("mode").isin("admit", "record")


def _byte_delay() -> Column:
    """The largest delay of the byte rates among a row's verdicts: KIP-124 measures requests after it."""
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
