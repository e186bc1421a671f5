"""Finds gaps in the log: batches, by their numbers; nodes; dropped rows; and unexplained charges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from pyspark import StorageLevel
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from workers.spark.audit import findings
from workers.spark.audit.batches import BatchFaults
from workers.spark.audit.tables import with_findings
from workers.spark.buckets import charging_mode, without_store

NUMBERED: Final = r"(?s)^(.*)-([0-9]{12})$"
"""The name of a batch: its node, and a number that grows by one."""

FIRST: Final = 1
"""The number of a node's first batch."""

SHOWN: Final = 20
MOST: Final = 10**12
"""The largest number of dropped rows that one log row may report."""


class NodeGap(NamedTuple):
    """A node with batches missing between its first and its last number."""

    node: str
    first: int
    last: int
    missing: int


@dataclass(frozen=True, slots=True)
class LogGaps:
    """The gaps in the rows that were read.

    Attributes:
        batches: batches missing between others of the same node, or named by other nodes.
        rows: rows that nodes reported as dropped.
        beginning: the first batches of a node are missing; they may have been removed with their hours.
        nodes: the nodes that lack most batches.
        absent: nodes without any batch that other nodes name.
    """

    batches: int
    rows: int
    beginning: bool
    nodes: tuple[NodeGap, ...]
    absent: tuple[str, ...] = ()

    @property
    def has_any(self) -> bool:
        """Whether any decision is missing."""
        return bool(self.batches or self.rows)


def gaps_in(rows: DataFrame, batches: DataFrame, all_rows: DataFrame | None = None) -> LogGaps:
    """The gaps in rows.

    Args:
        batches: the ``summaries`` of their batches.
        all_rows: all rows of the log, if only some were read.
    """
    elsewhere = None if all_rows is None else batch_numbers(all_rows)
    gaps = number_gaps(batch_numbers(batches), elsewhere, named_by_others(batches))
    gaps = gaps.persist(StorageLevel.DISK_ONLY)
    total = gaps.agg(f.sum("missing"), f.max("begins")).first()
    assert total is not None
    missing, begins = total[0] or 0, total[1] or 0
    nodes: tuple[NodeGap, ...] = ()
    absent: tuple[str, ...] = ()
    if missing:
        worst = gaps.where(f.col("missing") > 0).orderBy(f.desc("missing"), "node").limit(SHOWN)
        nodes = tuple(NodeGap(*row) for row in worst.select(*NodeGap._fields).collect())
        without_batch = gaps.where(f.col("begins").isNull()).orderBy("node").limit(SHOWN)
        absent = tuple(row["node"] for row in without_batch.collect())
    return LogGaps(missing, dropped_rows(rows), begins > FIRST, nodes, absent)


def batch_numbers(rows: DataFrame) -> DataFrame:
    """The numbers of each node's batches, each once; other names are left out."""
    batches = rows.select("batch").distinct().where(f.col("batch").rlike(NUMBERED))
    node, number = (f.regexp_extract("batch", NUMBERED, group) for group in (1, 2))
    return batches.select(node.alias("node"), number.cast("long").alias("number"))


def named_by_others(batches: DataFrame) -> DataFrame:
    """The smallest and the largest batch number of each node that other nodes name.

    Batches from before the first row are left out: they may have been removed with their hour.
    """
    begins = batches.agg(f.min("from_ms").alias("begins_ms"))
    named = batches.where(f.col("siblings").isNotNull()).select(f.explode("siblings").alias("one"))
    within = named.crossJoin(f.broadcast(begins)).where(f.col("one.at_ms") >= f.col("begins_ms"))
    ends = within.groupBy("one.node").agg(f.array(f.min("one.number"), f.max("one.number")).alias("ends"))
    return ends.select("node", f.explode("ends").alias("number"))


def number_gaps(
    numbers: DataFrame, elsewhere: DataFrame | None = None, named: DataFrame | None = None
) -> DataFrame:
    """How many numbers each node lacks between its first and last; ``begins`` is the first existing number.

    Args:
        elsewhere: further existing numbers, which do not extend the span from first to last.
        named: numbers that must exist, as other nodes name them.
    """
    wanted = numbers if named is None else numbers.unionByName(named)
    ends = wanted.groupBy("node").agg(f.min("number").alias("first"), f.max("number").alias("last"))
    existing = numbers if elsewhere is None else elsewhere.unionByName(numbers).distinct()
    is_between = (f.col("t.node") == f.col("e.node")) & f.col("t.number").between(
        f.col("e.first"), f.col("e.last")
    )
    counted = (
        ends.alias("e")
        .join(existing.alias("t"), is_between, "left")
        .groupBy("e.node", "e.first", "e.last")
        .agg(f.count("t.number").alias("existing"), f.min("t.number").alias("begins"))
    )
    missing = f.col("last") - f.col("first") + 1 - f.col("existing")
    return counted.select("node", "first", "last", missing.alias("missing"), "begins")


def dropped_rows(rows: DataFrame) -> int:
    """The number of dropped rows that nodes report; at least one for each report."""
    logged = f.from_json("change.after", "rows long")["rows"]
    count = f.least(f.greatest(f.coalesce(logged, f.lit(1)), f.lit(1)), f.lit(MOST)).cast("double")
    total = rows.where(f.col("kind") == "dropped").agg(f.sum(count)).first()
    return int(total[0] or 0) if total else 0


def untold(found: DataFrame, rows: DataFrame) -> DataFrame:
    """The unlogged charges in buckets with more of them than decisions without the store explain.

    A decision without the store may have charged each of its buckets once, unless a row of kind ``late`` has
    that charge. The result has a finding for each principal with such charges.
    """
    explains = f.when(f.col("kind") == "late", -1).otherwise(1)
    allowed = (
        rows.where((without_store() | (f.col("kind") == "late")) & charging_mode())
        .select(explains.alias("allowed"), f.explode("verdicts").alias("one"))
        .groupBy("one.quota", "one.bucket")
        .agg(f.sum("allowed").alias("allowed"))
    )
    unlogged = (
        found.where((f.col("case") == "tally") & (f.col("unlogged") > 0))
        .groupBy("quota", "bucket", "principal")
        .agg(f.sum("unlogged").alias("untold"))
    )
    bucket = ["quota", "bucket"]
    explained = f.greatest(f.coalesce("allowed", f.lit(0)), f.lit(0))
    unexplained = (
        unlogged.groupBy(*bucket)
        .agg(f.sum("untold").alias("all"))
        .join(allowed, bucket, "left")
        .where(f.col("all") > explained)
    )
    return unlogged.join(unexplained.select(*bucket), bucket).select(
        f.lit("tally").alias("case"), *bucket, "principal", "untold"
    )


def with_gaps(
    overall: DataFrame, gaps: LogGaps, faults: BatchFaults, twice: int, *, allow_missing: bool
) -> DataFrame:
    """The row over all principals, with the gaps in the log, and the findings that follow.

    Args:
        faults: the faults of batches.
        twice: how many identities have two rows that differ.
    """
    counts = {
        "missing_batches": gaps.batches,
        "dropped_rows": gaps.rows,
        "missing_rows": faults.missing,
        "added_rows": faults.added,
        "told_twice": twice,
    }
    table = overall.withColumns({name: f.lit(count).cast("long") for name, count in counts.items()})
    failed = {
        findings.MISSING: f.lit(gaps.has_any and not allow_missing),
        findings.ABSENT: f.lit(bool(gaps.absent) and not allow_missing),
        findings.GAPS: f.lit(faults.missing > 0 and not allow_missing),
        findings.ADDED: f.lit(faults.added > 0),
        findings.TWICE: f.lit(twice > 0),
        findings.NOTHING: (f.col("verdicts") > 0) & (f.col("judged") == 0),
    }
    return with_findings(table, failed, f.col("not_held"))
