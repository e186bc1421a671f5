"""The audit's tables, made from rows of the log, from findings, or from other tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import BooleanType

from app.domain.decision import OUTCOMES
from workers.spark.audit import findings
from workers.spark.audit.bucket_findings import COUNTS
from workers.spark.buckets import charging_mode, without_store

ASK_COUNTS: Final = ("asks", *OUTCOMES, "fallback", "unordered", "replayed")
"""The counts of asks: all, by decision, decided without the store, without an order, repeated to a retry."""

LATE_MS: Final = 60_000
"""The longest possible time between an ask and its call to the store."""

SUMS: Final = (*ASK_COUNTS, *COUNTS, "lost_units")


def _outcome_counts() -> list[Column]:
    by_outcome = (f.count_if(f.col("decision") == outcome).alias(outcome) for outcome in OUTCOMES)
    return [*by_outcome, f.count_if(f.col("source") == "fallback").alias("fallback")]


def asks(rows: DataFrame) -> DataFrame:
    """The number of asks of each principal."""
    return (
        rows.where(f.col("kind") == "decision")
        .groupBy("principal")
        .agg(
            f.count("*").alias("asks"),
            *_outcome_counts(),
            f.count_if(f.col("order").isNull()).alias("unordered"),
            f.count_if(f.col("replayed")).alias("replayed"),
        )
    )


def over_time(rows: DataFrame, slice_ms: int) -> DataFrame:
    """The number of asks in each slice of time, by decision, in order."""
    decided = rows.where(f.col("kind") == "decision")
    begins = f.floor(f.col("at_ms") / slice_ms) * slice_ms
    return decided.groupBy(begins.alias("from_ms")).agg(*_outcome_counts()).orderBy("from_ms")


def principals(asked: DataFrame, found: DataFrame) -> DataFrame:
    """All counts of each principal, one row each; asks without a principal have the principal null."""
    counted = found.groupBy("principal").agg(*_sums((*COUNTS, "lost_units")), *worst_ratio())
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
    """The falsely seen ids that an ask without the store had named before.

    That ask's call may have charged them. The search covers the life of a layer, which is longer
    than the window of the charges.
    """
    lifetime_ms = f.array_max("verdicts.ttl_ms")
    named = rows.where(without_store() & charging_mode()).select(
        f.col("principal").alias("by"),
        f.explode("ids").alias("named"),
        f.col("at_ms").alias("named_ms"),
        (f.col("at_ms") + lifetime_ms + LATE_MS).alias("until_ms"),
    )
    seen = found.where((f.col("case") == "falsely_seen") & f.col("digest").isNotNull())
    same = f.col("principal").eqNullSafe(f.col("by")) & (f.col("digest") == f.col("named"))
    then = f.col("at_ms").between(f.col("named_ms"), f.col("until_ms"))
    return seen.join(named, same & then, "left_semi")


def subtracted(explained: DataFrame) -> DataFrame:
    """Findings with counts below 0, which subtract the cases of ``named_before``."""
    counted = explained.groupBy("quota", "bucket", "principal").agg((-f.count("*")).alias("falsely_seen"))
    return counted.select(f.lit("tally").alias("case"), "*")


def unlikely(found: DataFrame, explained: DataFrame, asks: int) -> DataFrame:
    """The asks with more falsely seen ids than chance explains, counted by principal, as findings.

    Args:
        explained: cases that another ask explains, and that do not count.
        asks: how many asks were decided.
    """
    is_unlikely = f.udf(findings.unlikely, BooleanType(), useArrow=False)
    case = ["quota", "bucket", "order", "digest"]
    seen = found.where(f.col("case") == "falsely_seen").join(explained.select(*case), case, "left_anti")
    by_ask = seen.groupBy("quota", "bucket", "principal", "order").agg(
        f.sum("amount").cast("long").alias("seen"), f.max("among").alias("among")
    )
    broken = by_ask.where(is_unlikely("seen", "among", f.lit(asks)))
    counted = broken.groupBy("quota", "bucket", "principal").agg(f.count("*").alias("unlikely"))
    return counted.select(f.lit("tally").alias("case"), "*")


def buckets(found: DataFrame) -> DataFrame:
    """All counts of each bucket, one row each."""
    return (
        found.where(f.col("case") == "tally")
        .groupBy("quota", "bucket")
        .agg(*_sums((*COUNTS, "lost_units")), *worst_ratio())
    )


def overall(table: DataFrame) -> DataFrame:
    """One row of totals over a table of principals."""
    failed = f.count_if(f.size("not_held") > 0) if "not_held" in table.columns else f.lit(0)
    sums = _sums(name for name in SUMS if name in table.columns)
    return table.agg(f.count("*").alias("principals"), failed.alias("failed"), *sums, *worst_ratio())


def judged(
    table: DataFrame, *, allow_lost: bool, allow_missing: bool, allow_clock: bool = False, lacks: bool = False
) -> DataFrame:
    """The table with the findings of each row in ``not_held``, which is empty if all bounds held.

    Args:
        lacks: rows are missing. They may have charged ids that now look new.
    """
    excused = f.lit(allow_missing and lacks)
    is_improbable = f.udf(findings.improbable, BooleanType(), useArrow=False)
    lost = (f.col("lost") > 0) | (f.col("charged_again") > 0)
    failed = {
        findings.FALSELY_SEEN: ~excused & is_improbable("falsely_seen", "lookups"),
        findings.UNLIKELY: ~excused & (f.col("unlikely") > 0),
        findings.OVER: f.col("over") > 0,
        findings.DIFFERS: f.col("differs") > 0,
        findings.LOST: f.lit(not allow_lost) & lost,
        findings.ALTERED: f.lit(not allow_lost) & (f.col("altered") > 0),
        findings.UNTOLD: f.lit(not allow_missing) & (f.col("untold") > 0),
        findings.STALE: f.col("stale") > 0,
        findings.CONTRADICTS: f.col("contradicts") > 0,
        findings.CLOCK: f.lit(not allow_clock) & (f.col("clock") > 0),
        findings.SAME_ORDER: f.col("same_order") > 0,
    }
    return with_findings(table, failed)


def with_findings(table: DataFrame, failed: Mapping[str, Column], *before: Column) -> DataFrame:
    """The table with the names of the findings that apply in ``not_held``, after those ``before``."""
    names = f.array_compact(f.array(*(f.when(applies, f.lit(name)) for name, applies in failed.items())))
    return table.withColumn("not_held", f.concat(*before, names))


def cases(found: DataFrame) -> DataFrame:
    """The single cases."""
    return found.where(f.col("case") != "tally").select(
        "case", "principal", "quota", "bucket", "at_ms", "order", "digest", "amount", "logged", "exact"
    )


def relative_to_bound() -> Column:
    """The ratio of a row, divided by its bound."""
    return f.when(f.col("bound") > 0, f.col("worst") / f.col("bound")).otherwise(f.col("worst"))


def worst_ratio() -> tuple[Column, Column]:
    """The ratio nearest to its bound, and that bound."""
    part = relative_to_bound()
    return f.max_by("worst", part).alias("worst"), f.max_by("bound", part).alias("bound")


def _sums(names: Iterable[str]) -> list[Column]:
    return [f.sum(name).alias(name) for name in names]
