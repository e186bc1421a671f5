"""Audits a period of a log: runs all checks, and writes the report's tables and its page."""

from __future__ import annotations

import argparse
import math
from typing import Any, Final

from pyspark import StorageLevel
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema

from workers.spark import log
from workers.spark.audit import (
    batches,
    bucket_findings,
    contradictions,
    limits,
    missing,
    page,
    stale_limits,
    tables,
)
from workers.spark.audit.judge import AuditRules, judging
from workers.spark.buckets import bucket_events, by_bucket, charges_apart, from_store
from workers.spark.errors import JobError, JobUsageError
from workers.spark.folder import OutputFolder
from workers.spark.log import Period

LARGEST: Final = 20
IN_PAGE: Final = 200
"""The most rows of a table that the page shows; the Parquet files have all."""
SLICES: Final = (1_000, 10_000, 60_000, 600_000, 3_600_000, 6 * 3_600_000, 24 * 3_600_000)
"""The possible lengths of a slice of time in a chart, in milliseconds."""
IN_CHART: Final = 150


def audit(
    spark: SparkSession, arguments: argparse.Namespace, period: Period, folder: OutputFolder
) -> dict[str, Any]:
    """Audit a period, and write the report's tables and its page; returns the page's values."""
    url, with_lead_in = arguments.log, period.with_lead_in(arguments.lead_in)
    all_copies = log.read_all(spark, url, with_lead_in)
    repeated = log.repeated_batches(all_copies)
    everything = log.without_duplicates(all_copies, repeated)
    twice = batches.in_two_versions(all_copies, repeated)
    rows = everything if period.from_ms is None else everything.where(period.contains(f.col("at_ms")))
    totals = _totals(everything, log.location_of(url).name, period)

    summaries = batches.summaries(everything).persist(StorageLevel.DISK_ONLY)
    all_rows = None if period == Period() else log.read_all(spark, url, Period())
    gaps = missing.gaps_in(everything, summaries)
    if gaps.batches and all_rows is not None:
        gaps = missing.gaps_in(everything, summaries, all_rows)
    begins_ms = None
    if gaps.beginning:
        begins_ms = totals["first_ms"] if all_rows is None else _first_and_last(all_rows)[0]
    faults = batches.faults(summaries, all_rows, begins_ms)

    is_whole = period.from_ms is None and not gaps.beginning
    resets, loads = bucket_events(everything)
    rules = AuditRules(
        arguments.max_ids,
        arguments.combine_delays == "sequential",
        period.from_ms,
        is_whole and not arguments.older,
        resets,
        loads,
        totals["log_from_ms"],
    )
    found = judged(everything, rows, rules, by_store=arguments.clock == "store")
    found = found.persist(StorageLevel.DISK_ONLY)
    more = _explained(found, everything, totals["asks"])
    if (stale := _stale(spark, arguments, everything, rows, period, totals, is_whole=is_whole)) is not None:
        more.append(stale)
    for each in more:
        found = found.unionByName(each.persist(StorageLevel.DISK_ONLY), allowMissingColumns=True)

    allowed = {
        "allow_lost": arguments.allow_lost,
        "allow_missing": arguments.allow_missing,
        "allow_clock": arguments.allow_clock,
        "lacks": gaps.has_any or faults.missing > 0,
    }
    principals = tables.judged(tables.principals(tables.asks(rows), found), **allowed)
    principals = principals.persist(StorageLevel.DISK_ONLY)
    overall = tables.judged(tables.overall(principals), **allowed)
    overall = missing.with_gaps(overall, gaps, faults, len(twice), allow_missing=arguments.allow_missing)
    written = {
        "principals": principals,
        "buckets": tables.buckets(found),
        "cases": tables.cases(found),
        "overall": overall,
    }
    for name, table in written.items():
        folder.table(name, table)
        written[name] = spark.read.schema(table.schema).parquet(folder.inside(name))
    span_ms = totals["to_ms"] - totals["from_ms"]
    slice_ms = next((one for one in SLICES if span_ms / one <= IN_CHART), SLICES[-1])
    report = {
        **totals,
        **_top_rows(**written),
        "grace_s": arguments.grace,
        "lacking": gaps.nodes,
        "absent": gaps.absent,
        "inside": faults.batches,
        "twice": twice,
        "slice_ms": slice_ms,
        "over_time": [row.asDict() for row in tables.over_time(rows, slice_ms).collect()],
        "log": log.location_of(url).name,
        "is_whole": rules.is_whole,
        "has_beginning": not gaps.beginning,
        "older": arguments.older and is_whole,
        "max_ids": rules.max_ids,
        "combine_delays": arguments.combine_delays,
    }
    folder.text("report.html", page.html(report))
    return report


def judged(everything: DataFrame, rows: DataFrame, rules: AuditRules, *, by_store: bool = True) -> DataFrame:
    """The findings in every bucket, and in the rows of a period.

    Args:
        by_store: times are the store's, not the callers'.
    """
    schema = from_arrow_schema(bucket_findings.SCHEMA)
    verdicts = by_bucket(everything).mapInArrow(judging(rules), schema)
    check = contradictions.checking(by_store=by_store, sequential=rules.sequential)
    return verdicts.union(rows.select(*contradictions.DecisionRow._fields).mapInArrow(check, schema))


def _totals(everything: DataFrame, name: str, period: Period) -> dict[str, Any]:
    """The counts and times of a period, from one pass over the rows.

    Raises:
        JobUsageError: the log does not have every decision.
        JobError: the period has no decision.
    """
    in_period = period.contains(f.col("at_ms"))
    is_new = from_store() & ~f.col("replayed") & in_period
    is_admitted = f.col("decision") == "admit"
    holds = f.exists("verdicts", lambda one: one["observed"] > 0)
    at_ms = f.when(in_period, f.col("at_ms"))
    totals = everything.agg(
        f.count_if((f.col("kind") == "decision") & in_period).alias("asks"),
        f.count_if(is_new).alias("from_store"),
        f.count_if(is_new & is_admitted).alias("admitted"),
        f.count_if(charges_apart() & in_period).alias("apart"),
        f.count_if((f.col("kind") == "factor") & in_period).alias("factors"),
        f.count_if((f.col("kind") == "quota") & in_period).alias("changes"),
        f.min(at_ms).alias("from_ms"),
        f.max(at_ms).alias("to_ms"),
        f.count_if(from_store() & is_admitted).alias("ever_admitted"),
        f.count_if(from_store() & holds).alias("ever_held"),
        f.min(f.when(f.col("order").isNotNull(), f.col("at_ms"))).alias("log_from_ms"),
        f.min("at_ms").alias("first_ms"),
        f.max("at_ms").alias("last_ms"),
    ).first()
    assert totals is not None
    # A bucket with charges proves that asks were admitted, although the log has no admitted ask.
    leaves_out_admitted = totals["ever_held"] and not totals["ever_admitted"]
    if totals["apart"] or (totals["from_store"] and not totals["admitted"] and leaves_out_admitted):
        raise JobUsageError(
            f"{name}: the audit needs every decision, a log of QUOTAGATE_LOG=all; this one, {period}, leaves "
            "out admitted asks, as QUOTAGATE_LOG=denied does"
        )
    if not totals["asks"]:
        raise JobError(f"{name}: no decision in the period {period}")
    return totals.asDict()


def _explained(found: DataFrame, everything: DataFrame, asks: int) -> list[DataFrame]:
    """Further findings: which falsely seen ids and unlogged charges other asks explain, and which do not."""
    sums = found.agg(f.sum("falsely_seen"), f.sum("unlogged")).first() or (0, 0)
    more = []
    if sums[0]:
        explained = tables.named_before(found, everything)
        more += [tables.subtracted(explained), tables.unlikely(found, explained, asks)]
    if sums[1]:
        more.append(missing.untold(found, everything))
    return more


def _stale(
    spark: SparkSession,
    arguments: argparse.Namespace,
    everything: DataFrame,
    rows: DataFrame,
    period: Period,
    totals: dict[str, Any],
    *,
    is_whole: bool,
) -> DataFrame | None:
    """The verdicts by limits that were not in force, if there are any."""
    grace_ms = round(arguments.grace * 1000)
    around, first_ms, last_ms = everything, totals["first_ms"], totals["last_ms"]
    if period.to_ms is not None:  # a change logged after the period may be in force within it
        from_ms = period.with_lead_in(arguments.lead_in).from_ms
        around = log.read_all(spark, arguments.log, Period(from_ms, period.to_ms + grace_ms + 1))
        first_ms, last_ms = _first_and_last(around)
    times = limits.JudgedPeriod(-math.inf if is_whole else first_ms + grace_ms, last_ms - grace_ms, grace_ms)
    uses = stale_limits.stale_uses(rows, around, stale_limits.factors(around), times)
    uses = uses.persist(StorageLevel.DISK_ONLY)
    return stale_limits.stale_verdicts(rows, uses) if uses.count() else None


def _first_and_last(rows: DataFrame) -> Row:
    ends = rows.agg(f.min("at_ms"), f.max("at_ms")).first()
    assert ends is not None
    return ends


def _top_rows(
    principals: DataFrame, buckets: DataFrame, cases: DataFrame, overall: DataFrame
) -> dict[str, Any]:
    """The rows of the tables that the page shows."""

    def top(table: DataFrame, count: int, *order: Any) -> list[dict[str, Any]]:
        return [row.asDict() for row in table.orderBy(*order).limit(count).collect()]

    [total] = top(overall, 1, "asks")
    failed = principals.where(f.size("not_held") > 0)
    bounded = buckets.where(f.col("bound").isNotNull() & (f.col("worst") > 0))
    seen = cases.where(f.col("case") == "falsely_seen")
    return {
        "overall": total,
        "held": not total["not_held"] and not total["failed"],
        "failed": top(failed, IN_PAGE, f.desc("asks"), "principal") if total["failed"] else [],
        "largest": top(principals, LARGEST, f.desc("asks"), "principal"),
        "nearest": top(bounded, LARGEST, f.desc(tables.relative_to_bound()), "bucket"),
        "cases": top(cases, IN_PAGE, "order", "bucket", "digest"),
        "cases_count": cases.count(),
        "falsely_seen": top(seen, IN_PAGE, "order", "digest") if total["falsely_seen"] else [],
    }
