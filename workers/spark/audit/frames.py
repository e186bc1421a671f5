"""The audit's tables, each made from others: of rows, of what was found, of principals, over all of them."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import BooleanType

from app.domain.decision import OUTCOMES
from workers.spark.audit import held
from workers.spark.audit.found import COUNTS

ASK_COUNTS: Final = ("asks", *OUTCOMES, "fallback", "unordered", "replayed")
"""What is counted of asks: all, by decision, answered without the store, of unknown order, given again."""

LATE_MS: Final = 60_000
"""So much later than it was asked a call may have been made, at the very most."""

SUMS: Final = (*ASK_COUNTS, *COUNTS, "lost_units")


def asks(rows: DataFrame) -> DataFrame:
    """The asks of each principal, counted."""
    decided = rows.where(f.col("kind") == "decision")
    return decided.groupBy("principal").agg(
        f.count("*").alias("asks"),
        *(f.count_if(f.col("decision") == outcome).alias(outcome) for outcome in OUTCOMES),
        f.count_if(f.col("source") == "fallback").alias("fallback"),
        f.count_if(f.col("order").isNull()).alias("unordered"),
        f.count_if(f.col("replayed")).alias("replayed"),
    )


def over_time(rows: DataFrame, slice_ms: int) -> DataFrame:
    """The asks of each slice of time, by decision, in order."""
    decided = rows.where(f.col("kind") == "decision")
    begins = f.floor(f.col("at_ms") / slice_ms) * slice_ms
    return (
        decided.groupBy(begins.alias("from_ms"))
        .agg(
            *(f.count_if(f.col("decision") == outcome).alias(outcome) for outcome in OUTCOMES),
            f.count_if(f.col("source") == "fallback").alias("fallback"),
        )
        .orderBy("from_ms")
    )


def principals(asked: DataFrame, found: DataFrame) -> DataFrame:
    """Everything about each principal, one row each; null is the asks that named none."""
    counted = found.groupBy("principal").agg(
        *(f.sum(name).alias(name) for name in (*COUNTS, "lost_units")), *_worst()
    )
    joined = asked.alias("a").join(
        counted.alias("c"), f.col("a.principal").eqNullSafe(f.col("c.principal")), "full_outer"
    )
    return joined.select(
        f.coalesce("a.principal", "c.principal").alias("principal"),
        *(f.coalesce(f.col(name), f.lit(0)).alias(name) for name in SUMS),
        "worst",
        "bound",
    )


def named_before(found: DataFrame, rows: DataFrame) -> DataFrame:
    """The cases of new ids taken as seen that an ask had named which was answered without the store.

    Its call may have charged them all the same, a layer's life ago at most: longer ago than a bucket shows.
    """
    unanswered = f.col("order").isNull()
    without_store = (f.col("kind") == "decision") & (f.col("source") == "fallback") & unanswered
    lives_ms = f.array_max("verdicts.ttl_ms")
    named = rows.where(without_store & f.col("mode").isin("admit", "record")).select(
        f.col("principal").alias("by"),
        f.explode("ids").alias("named"),
        f.col("at_ms").alias("named_ms"),
        (f.col("at_ms") + lives_ms + LATE_MS).alias("over_ms"),
    )
    strangers = found.where((f.col("case") == "falsely_seen") & f.col("digest").isNotNull())
    same = f.col("principal").eqNullSafe(f.col("by")) & (f.col("digest") == f.col("named"))
    then = f.col("at_ms").between(f.col("named_ms"), f.col("over_ms"))
    return strangers.join(named, same & then, "left_semi")


def taken_back(told: DataFrame) -> DataFrame:
    """Rows of what is found, with counts below 0, for what ``named_before`` found."""
    counted = told.groupBy("quota", "bucket", "principal").agg((-f.count("*")).alias("falsely_seen"))
    return counted.select(f.lit("tally").alias("case"), "*")


def unlikely(found: DataFrame, told: DataFrame, asks: int) -> DataFrame:
    """The asks of whose new ids so many were taken as seen that chance does not explain it, by principal.

    Args:
        told: cases that another ask explains.
        asks: how many were decided.
    """
    improbable = f.udf(held.unlikely, BooleanType(), useArrow=False)
    which = ["quota", "bucket", "order", "digest"]
    strangers = found.where(f.col("case") == "falsely_seen")
    left = strangers.join(told.select(*which), which, "left_anti")
    of_ask = left.groupBy("quota", "bucket", "principal", "order").agg(
        f.sum("amount").cast("long").alias("taken"), f.max("among").alias("among")
    )
    broken = of_ask.where(improbable("taken", "among", f.lit(asks)))
    counted = broken.groupBy("quota", "bucket", "principal").agg(f.count("*").alias("unlikely"))
    return counted.select(f.lit("tally").alias("case"), "*")


def buckets(found: DataFrame) -> DataFrame:
    """Everything about each bucket, one row each."""
    tallies = found.where(f.col("case") == "tally")
    sums = (f.sum(name).alias(name) for name in (*COUNTS, "lost_units"))
    return tallies.groupBy("quota", "bucket").agg(*sums, *_worst())


def overall(table: DataFrame) -> DataFrame:
    """One row over all of a table's."""
    named = [name for name in SUMS if name in table.columns]
    failed = f.count_if(f.size("not_held") > 0) if "not_held" in table.columns else f.lit(0)
    return table.agg(
        f.count("*").alias("principals"),
        failed.alias("failed"),
        *(f.sum(name).alias(name) for name in named),
        *_worst(),
    )


def judged(
    table: DataFrame, *, allow_lost: bool, allow_missing: bool, allow_clock: bool = False, lacks: bool = False
) -> DataFrame:
    """The table with, for each row, what did not hold: an empty list is all that is wanted.

    Args:
        lacks: rows are missing that may have charged ids, which then only seem to be new.
    """
    excused = f.lit(allow_missing and lacks)
    improbable = f.udf(held.improbable, BooleanType(), useArrow=False)
    lost = (f.col("lost") > 0) | (f.col("charged_again") > 0)
    failed = {
        held.FALSELY_SEEN: ~excused & improbable("falsely_seen", "lookups"),
        held.UNLIKELY: ~excused & (f.col("unlikely") > 0),
        held.OVER: f.col("over") > 0,
        held.DIFFERS: f.col("differs") > 0,
        held.LOST: f.lit(not allow_lost) & lost,
        held.ALTERED: f.lit(not allow_lost) & (f.col("altered") > 0),
        held.UNTOLD: f.lit(not allow_missing) & (f.col("untold") > 0),
        held.STALE: f.col("stale") > 0,
        held.CONTRADICTS: f.col("contradicts") > 0,
        held.CLOCK: f.lit(not allow_clock) & (f.col("clock") > 0),
        held.SAME_ORDER: f.col("same_order") > 0,
    }
    named = f.array(*(f.when(wrong, f.lit(name)) for name, wrong in failed.items()))
    return table.withColumn("not_held", f.array_compact(named))


def cases(found: DataFrame) -> DataFrame:
    """The single cases."""
    columns = (
        "case",
        "principal",
        "quota",
        "bucket",
        "at_ms",
        "order",
        "digest",
        "amount",
        "logged",
        "exact",
    )
    return found.where(f.col("case") != "tally").select(*columns)


def _worst() -> tuple[Column, Column]:
    """Of several ratios the one that is nearest to its bound, and that bound."""
    excess = f.when(f.col("bound") > 0, f.col("worst") / f.col("bound")).otherwise(f.col("worst"))
    return f.max_by("worst", excess).alias("worst"), f.max_by("bound", excess).alias("bound")
