"""The job `audit`: reads a period of the log, judges every bucket, and leaves a report and a verdict."""

from __future__ import annotations

import argparse
import math
import os
import time
from typing import TYPE_CHECKING, Any, Final

from workers.spark.refused import WrongUse

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from workers.spark.audit import batches
    from workers.spark.audit.judge import Rules
    from workers.spark.audit.limits import Times
    from workers.spark.audit.missing import Missing
    from workers.spark.log import Period

COMBINATIONS: Final = ("max", "sequential")
CLOCKS: Final = ("store", "caller")
LEAD_IN_HOURS: Final = 3.0
GRACE_S: Final = 2.0
LARGEST: Final = 20
IN_PAGE: Final = 200
"""Rows of a table in the page; the Parquet files have all."""
SLICES: Final = (1_000, 10_000, 60_000, 600_000, 3_600_000, 6 * 3_600_000, 24 * 3_600_000)
"""How long a slice of time may be in a plot, in milliseconds."""
IN_PLOT: Final = 150

ABOUT: Final = """\
Recompute from the raw asks what should have been decided, compare it with what was decided, and say whether
the limits held: exit code 0 if all bounds held, 1 if not, with the principals named.

Needs a log of QUOTAGATE_LOG=all. Writes OUT/report.html, and OUT/principals, OUT/buckets, OUT/cases and
OUT/overall as Parquet.

examples:
  quotagate spark audit --out report
  quotagate spark audit --from 2026-11-21T10:00:00Z --to 2026-11-21T11:00:00Z --out report --overwrite
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the audit takes."""
    parser.description = ABOUT
    parser.add_argument("--out", required=True, help="folder of the report, which must not be there yet")
    parser.add_argument("--from", dest="from_", metavar="INSTANT", help="judge from then on (ISO 8601)")
    parser.add_argument("--to", metavar="INSTANT", help="judge what is before then")
    parser.add_argument(
        "--lead-in",
        type=float,
        default=LEAD_IN_HOURS,
        metavar="HOURS",
        help="read so much before --from, to know how the buckets stood; default: %(default)s",
    )
    parser.add_argument(
        "--older",
        action="store_true",
        help="buckets may be older than the log, which was switched on over a store in use: new ids are "
        "judged once that is certain; so they are with --from, and where the log's beginning was removed",
    )
    parser.add_argument(
        "--allow-lost", action="store_true", help="charges lost in a failover that is known do not count"
    )
    parser.add_argument(
        "--allow-missing",
        action="store_true",
        help="rows that are known to be missing do not count, nor more charged than the rows tell of, nor, "
        "where rows are missing, new ids taken as seen",
    )
    parser.add_argument(
        "--allow-clock",
        action="store_true",
        help="rows whose time is not that of their place in the store's order do not count: the store's "
        "clock is known to have been set back",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=GRACE_S,
        metavar="SECONDS",
        help="so long before and after a change of a quota either limit is right; default: %(default)s",
    )
    parser.add_argument(
        "--combine-delays",
        choices=COMBINATIONS,
        default=os.environ.get("QUOTAGATE_COMBINE_DELAYS", "max"),
        help="how the nodes join delays; default: QUOTAGATE_COMBINE_DELAYS, %(default)s",
    )
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default=os.environ.get("QUOTAGATE_CLOCK", "store"),
        help="whose time counts; by the caller's, which may be any, no clock is found to be shifted; "
        "default: QUOTAGATE_CLOCK, %(default)s",
    )


def run(arguments: argparse.Namespace) -> int:
    """Audit; 0 if all held, 1 if not."""
    from workers.spark import progress  # noqa: PLC0415  Spark takes a while to import, and --help does without
    from workers.spark.audit.terminal import said  # noqa: PLC0415
    from workers.spark.folder import Folder  # noqa: PLC0415
    from workers.spark.log import Period  # noqa: PLC0415
    from workers.spark.session import started  # noqa: PLC0415

    if not arguments.log:
        raise WrongUse("--log or QUOTAGATE_LOG_URL says where the decision log is")
    if not 0 <= arguments.grace < math.inf or not 0 <= arguments.lead_in < math.inf:
        raise WrongUse("--grace and --lead-in: must be 0 or more")
    if arguments.combine_delays not in COMBINATIONS:  # argparse does not look at what the environment says
        raise WrongUse(f"--combine-delays: must be {' or '.join(COMBINATIONS)}")
    if arguments.clock not in CLOCKS:
        raise WrongUse(f"--clock: must be {' or '.join(CLOCKS)}")
    period = Period.of(arguments.from_, arguments.to)
    began = time.monotonic()
    with started("quotagate audit", arguments.master, arguments.memory, arguments.java) as spark:
        folder = Folder(spark, arguments.out, overwrite=arguments.overwrite)
        with progress.shown(spark, "audit"), folder:
            report = audit(spark, arguments, period, folder)
    print(said(report, arguments.out, time.monotonic() - began))  # noqa: T201  the answer
    return 0 if report["held"] else 1


def audit(spark: SparkSession, arguments: argparse.Namespace, period: Period, folder: Any) -> dict[str, Any]:
    """Write the report's tables and its page; what the page shows."""
    from pyspark import StorageLevel  # noqa: PLC0415
    from pyspark.sql import functions as f  # noqa: PLC0415

    from workers.spark import log  # noqa: PLC0415
    from workers.spark.audit import batches, frames, limits, missing, page  # noqa: PLC0415

    led_in = period.begun_earlier(arguments.lead_in)
    as_they_lie = log.rows(spark, arguments.log, led_in)
    twice = log.standing_twice(as_they_lie)
    everything = log.each_once(as_they_lie, twice)
    told_twice = batches.twice(as_they_lie, twice)
    rows = everything if period.from_ms is None else everything.where(f.col("at_ms") >= period.from_ms)
    name = log.place_of(arguments.log).name
    about = _checked(rows, everything, name, period)
    there = batches.seen(everything).persist(StorageLevel.DISK_ONLY)
    lacks = _missing(spark, arguments.log, everything, there, period)
    is_whole = period.from_ms is None and not lacks.beginning
    inside = _inside(spark, arguments.log, there, period, lacks)
    rules = _rules(arguments, everything, period.from_ms, is_whole=is_whole and not arguments.older)
    by_store = arguments.clock == "store"
    found = judged(everything, rows, rules, by_store=by_store).persist(StorageLevel.DISK_ONLY)
    grace_ms = round(arguments.grace * 1000)
    # A change just after the period may have been followed within it already.
    after_ms = None if period.to_ms is None else period.to_ms + grace_ms + 1
    around = (
        everything
        if after_ms is None
        else log.rows(spark, arguments.log, log.Period(led_in.from_ms, after_ms))
    )
    first_ms, last_ms = _ends(around)
    times = limits.Times(-math.inf if is_whole else first_ms + grace_ms, last_ms - grace_ms, grace_ms)
    for beside in (
        *_strangers(found, everything, about["asks"]),
        _untold(found, everything),
        _stale(rows, around, times),
    ):
        if beside is not None:
            found = found.unionByName(beside.persist(StorageLevel.DISK_ONLY), allowMissingColumns=True)
    allowed = {
        "allow_lost": arguments.allow_lost,
        "allow_missing": arguments.allow_missing,
        "allow_clock": arguments.allow_clock,
        "lacks": lacks.rows_or_batches or inside.missing > 0,
    }
    table = frames.judged(frames.principals(frames.asks(rows), found), **allowed)
    table = table.persist(StorageLevel.DISK_ONLY)
    total = frames.judged(frames.overall(table), **allowed)
    folder.table("principals", table)
    folder.table("buckets", frames.buckets(found))
    folder.table("cases", frames.cases(found))
    total = missing.judged(total, lacks, inside, len(told_twice), allow_missing=arguments.allow_missing)
    folder.table("overall", total)
    about |= {"lacking": lacks.nodes, "absent": lacks.absent, "inside": inside.batches, "twice": told_twice}
    report = _report(spark, folder, about | {"grace_s": arguments.grace})
    slice_ms = next(
        (one for one in SLICES if (about["to_ms"] - about["from_ms"]) / one <= IN_PLOT), SLICES[-1]
    )
    report["slice_ms"] = slice_ms
    report["over_time"] = [row.asDict() for row in frames.over_time(rows, slice_ms).collect()]
    report |= {
        "log": name,
        "is_whole": rules.is_whole,
        "has_beginning": not lacks.beginning,
        "older": arguments.older and is_whole,
        "max_ids": rules.max_ids,
        "combine_delays": arguments.combine_delays,
    }
    folder.text("report.html", page.html(report))
    return report


def judged(everything: DataFrame, rows: DataFrame, rules: Rules, *, by_store: bool = True) -> DataFrame:
    """What is found in every bucket, and in the decisions of a period.

    Args:
        by_store: times are the store's, not the callers'.
    """
    from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415

    from workers.spark.audit import contradictions, decisions, found  # noqa: PLC0415
    from workers.spark.audit.judge import judging  # noqa: PLC0415
    from workers.spark.buckets import by_bucket  # noqa: PLC0415

    verdicts = by_bucket(everything).mapInArrow(judging(rules), from_arrow_schema(found.SCHEMA))
    combine = decisions.combining(sequential=rules.sequential)
    combined = decisions.to_combine(rows).mapInArrow(combine, from_arrow_schema(decisions.SCHEMA))
    look = contradictions.contradicting(by_store=by_store)
    columns = [*contradictions.Row._fields]
    contradicting = rows.select(*columns).mapInArrow(look, from_arrow_schema(contradictions.SCHEMA))
    found_so_far = verdicts.unionByName(combined, allowMissingColumns=True)
    return found_so_far.unionByName(contradicting, allowMissingColumns=True)


def _checked(rows: DataFrame, everything: DataFrame, name: str, period: Period) -> dict[str, Any]:
    """How much there is to judge; refuses a log that does not hold every decision."""
    from pyspark.sql import functions as f  # noqa: PLC0415

    from workers.spark.refused import Refused  # noqa: PLC0415

    from_store = (f.col("kind") == "decision") & (f.col("source") == "store") & ~f.col("replayed")
    charges = f.exists("verdicts", lambda one: f.size(one["charged_ids"]) > 0)
    about = rows.agg(
        f.count_if(f.col("kind") == "decision").alias("asks"),
        f.count_if(from_store).alias("from_store"),
        f.count_if(from_store & (f.col("decision") == "admit")).alias("admitted"),
        f.count_if((f.col("kind") == "ids") & charges).alias("apart"),
        f.count_if(f.col("kind") == "factor").alias("factors"),
        f.count_if(f.col("kind") == "quota").alias("changes"),
        f.min("at_ms").alias("from_ms"),
        f.max("at_ms").alias("to_ms"),
    ).first()
    assert about is not None
    none_admitted = about["from_store"] and not about["admitted"]
    if about["apart"] or (none_admitted and _leaves_out(everything)):
        raise WrongUse(
            f"{name}: the audit needs every decision, a log of QUOTAGATE_LOG=all; this one, {period}, "
            "leaves out asks that were admitted, as QUOTAGATE_LOG=denied does"
        )
    if not about["asks"]:
        raise Refused(f"{name}: no decision in the period {period}")
    return about.asDict()


def _leaves_out(everything: DataFrame) -> bool:
    """Whether a bucket holds something, though the log tells of nothing that was admitted."""
    from pyspark.sql import functions as f  # noqa: PLC0415

    admitted = f.col("decision") == "admit"
    holds = f.exists("verdicts", lambda one: one["observed"] > 0)
    from_store = everything.where((f.col("kind") == "decision") & (f.col("source") == "store"))
    seen = from_store.agg(f.count_if(admitted), f.count_if(holds)).first()
    assert seen is not None
    return not seen[0] and seen[1] > 0


def _missing(
    spark: SparkSession, url: str, everything: DataFrame, there: DataFrame, period: Period
) -> Missing:
    """What is missing from the rows read; a batch that no row of the period is of may lie beside it."""
    from workers.spark import log  # noqa: PLC0415
    from workers.spark.audit import missing  # noqa: PLC0415

    found = missing.of(everything, there)
    if found.batches and period != log.Period():
        found = missing.of(everything, there, log.rows(spark, url, log.Period()))
    return found


def _inside(
    spark: SparkSession, url: str, there: DataFrame, period: Period, lacks: Missing
) -> batches.Inside:
    """What is wrong inside of the batches of the rows read; those of a period may have others beside it."""
    from pyspark.sql import functions as f  # noqa: PLC0415

    from workers.spark import log  # noqa: PLC0415
    from workers.spark.audit import batches  # noqa: PLC0415

    all_rows = None if period == log.Period() else log.rows(spark, url, log.Period())
    begins_ms = None
    if lacks.beginning:
        first = there.agg(f.min("from_ms")).first() if all_rows is None else _ends(all_rows)
        begins_ms = first[0] if first else None
    return batches.inside(there, all_rows, begins_ms)


def _strangers(found: DataFrame, everything: DataFrame, asks: int) -> list[DataFrame]:
    """What becomes of new ids taken as seen, by asks without the store, and by how many are of one ask."""
    from pyspark.sql import functions as f  # noqa: PLC0415

    from workers.spark.audit import frames  # noqa: PLC0415

    strangers = found.agg(f.sum("falsely_seen")).first()
    if not strangers or not strangers[0]:
        return []
    told = frames.named_before(found, everything)
    return [frames.taken_back(told), frames.unlikely(found, told, asks)]


def _untold(found: DataFrame, everything: DataFrame) -> DataFrame | None:
    """Charges that no row tells of and nothing explains; None if all are told of."""
    from pyspark.sql import functions as f  # noqa: PLC0415

    from workers.spark.audit import missing  # noqa: PLC0415

    unlogged = found.agg(f.sum("unlogged")).first()
    return missing.untold(found, everything) if unlogged and unlogged[0] else None


def _ends(rows: DataFrame) -> tuple[int, int]:
    """When rows begin and end."""
    from pyspark.sql import functions as f  # noqa: PLC0415

    ends = rows.agg(f.min("at_ms"), f.max("at_ms")).first()
    assert ends is not None
    return ends[0], ends[1]


def _stale(rows: DataFrame, around: DataFrame, times: Times) -> DataFrame | None:
    """The verdicts whose limit did not stand, by the changes around them; None if there can be none."""
    from pyspark import StorageLevel  # noqa: PLC0415

    from workers.spark.audit import stale  # noqa: PLC0415

    suspected = stale.suspected(rows, around, stale.factors(around), times)
    suspected = suspected.persist(StorageLevel.DISK_ONLY)
    return stale.stale(rows, suspected) if suspected.count() else None


def _rules(
    arguments: argparse.Namespace,
    everything: DataFrame,
    from_ms: int | None,
    *,
    is_whole: bool,
) -> Rules:
    from workers.spark import buckets  # noqa: PLC0415
    from workers.spark.audit.judge import Rules  # noqa: PLC0415

    emptied, loaded = (buckets.places(each(everything)) for each in (buckets.resets, buckets.loads))
    first = everything.where("order is not null").agg({"at_ms": "min"}).first()
    sequential = arguments.combine_delays == "sequential"
    log_from_ms = first[0] if first else None
    return Rules(arguments.max_ids, sequential, from_ms, is_whole, emptied, loaded, log_from_ms)


def _report(spark: SparkSession, folder: Any, about: dict[str, Any]) -> dict[str, Any]:
    """What the page shows, read from the tables just written."""
    from pyspark.sql import functions as f  # noqa: PLC0415

    def first(table: DataFrame, count: int, *order: Any) -> list[dict[str, Any]]:
        return [row.asDict() for row in table.orderBy(*order).limit(count).collect()]

    table = spark.read.parquet(folder.inside("principals"))
    cases = spark.read.parquet(folder.inside("cases"))
    buckets = spark.read.parquet(folder.inside("buckets"))
    total = first(spark.read.parquet(folder.inside("overall")), 1, "asks")[0]
    failed = table.where(f.size("not_held") > 0)
    bounded = buckets.where(f.col("bound").isNotNull() & (f.col("worst") > 0))
    nearest = f.when(f.col("bound") > 0, f.col("worst") / f.col("bound")).otherwise(f.col("worst"))
    strangers = cases.where(f.col("case") == "falsely_seen")
    return {
        **about,
        "overall": total,
        "held": not total["not_held"] and not total["failed"],
        "failed": first(failed, IN_PAGE, f.desc("asks"), "principal") if total["failed"] else [],
        "largest": first(table, LARGEST, f.desc("asks"), "principal"),
        "nearest": first(bounded, LARGEST, f.desc(nearest), "bucket"),
        "cases": first(cases, IN_PAGE, "order", "bucket", "digest"),
        "cases_count": cases.count(),
        "falsely_seen": first(strangers, IN_PAGE, "order", "digest") if total["falsely_seen"] else [],
    }
