"""What the log lacks: batches, by their numbers; rows that nodes dropped; charges that no row tells of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from workers.spark.audit import held
from workers.spark.audit.batches import Inside

NUMBERED: Final = r"(?s)^(.*)-([0-9]{12})$"
"""How a batch is named: the node, and a number that grows by one."""

FIRST: Final = 1
"""The number of a node's first batch."""

SHOWN: Final = 20
MOST: Final = 10**12
"""What a row says that were dropped is believed up to this."""


class Lacking(NamedTuple):
    """A node that lacks batches between its first and its last number."""

    node: str
    first: int
    last: int
    missing: int


@dataclass(frozen=True, slots=True)
class Missing:
    """What is missing from the rows that were read.

    Attributes:
        batches: whose numbers are missing between those of others of their node, or of what others say of it.
        rows: that nodes had to drop, by their own account.
        beginning: the first batches of a node are not there: they may have been removed with their hours.
        nodes: of those that miss most batches: name, first and last number, how many are missing.
        absent: nodes of which others say that they left batches, and of which not one is there.
    """

    batches: int
    rows: int
    beginning: bool
    nodes: tuple[Lacking, ...]
    absent: tuple[str, ...] = ()

    @property
    def rows_or_batches(self) -> bool:
        """Whether anything is missing that was decided."""
        return bool(self.batches or self.rows)


def of(rows: DataFrame, there: DataFrame, everywhere: DataFrame | None = None) -> Missing:
    """What is missing from rows.

    Args:
        there: what ``batches.seen`` saw of their batches.
        everywhere: rows that are there, too, if only some of all were read.
    """
    beside = None if everywhere is None else numbers(everywhere)
    found = gaps(numbers(there), beside, said_of_others(there)).persist(StorageLevel.DISK_ONLY)
    total = found.agg(f.sum("missing"), f.max("begins")).first()
    assert total is not None
    nodes: tuple[Lacking, ...] = ()
    absent: tuple[str, ...] = ()
    if total[0]:
        lacking = found.where(f.col("missing") > 0).orderBy(f.desc("missing"), "node").limit(SHOWN)
        nodes = tuple(Lacking(*row) for row in lacking.select(*Lacking._fields).collect())
        none = found.where(f.col("begins").isNull()).orderBy("node").limit(SHOWN)
        absent = tuple(row["node"] for row in none.collect())
    return Missing(total[0] or 0, dropped(rows), (total[1] or 0) > FIRST, nodes, absent)


def numbers(rows: DataFrame) -> DataFrame:
    """The numbers of the batches of each node, each once; names that are none of a batch are left out."""
    batches = rows.select("batch").distinct().where(f.col("batch").rlike(NUMBERED))
    part = [f.regexp_extract("batch", NUMBERED, place) for place in (1, 2)]
    return batches.select(part[0].alias("node"), part[1].cast("long").alias("number"))


def said_of_others(there: DataFrame) -> DataFrame:
    """The numbers of batches that nodes say others had left: of each the smallest and the largest.

    What was left before the first row is not looked for: it may have been removed with its hour.
    """
    begins = there.agg(f.min("from_ms").alias("begins_ms"))
    told = there.where(f.col("siblings").isNotNull()).select(f.explode("siblings").alias("one"))
    within = told.crossJoin(f.broadcast(begins)).where(f.col("one.at_ms") >= f.col("begins_ms"))
    ends = within.groupBy("one.node").agg(f.array(f.min("one.number"), f.max("one.number")).alias("ends"))
    return ends.select("node", f.explode("ends").alias("number"))


def gaps(
    numbered: DataFrame, everywhere: DataFrame | None = None, said: DataFrame | None = None
) -> DataFrame:
    """How many numbers each node lacks between its first and its last; ``begins`` is the first that is there.

    Args:
        everywhere: numbers that count as there, too; which are between which others is another matter.
        said: numbers that must be there, as others say so.
    """
    wanted = numbered if said is None else numbered.unionByName(said)
    ends = wanted.groupBy("node").agg(f.min("number").alias("first"), f.max("number").alias("last"))
    there = numbered if everywhere is None else everywhere.unionByName(numbered).distinct()
    is_between = (f.col("t.node") == f.col("e.node")) & f.col("t.number").between(
        f.col("e.first"), f.col("e.last")
    )
    counted = (
        ends.alias("e")
        .join(there.alias("t"), is_between, "left")
        .groupBy("e.node", "e.first", "e.last")
        .agg(f.count("t.number").alias("there"), f.min("t.number").alias("begins"))
    )
    missing = f.col("last") - f.col("first") + 1 - f.col("there")
    return counted.select("node", "first", "last", missing.alias("missing"), "begins")


def dropped(rows: DataFrame) -> int:
    """How many rows nodes say they dropped; at least one for each time that one says so."""
    said = f.from_json("change.after", "rows long")["rows"]
    many = f.least(f.greatest(f.coalesce(said, f.lit(1)), f.lit(1)), f.lit(MOST)).cast("double")
    total = rows.where(f.col("kind") == "dropped").agg(f.sum(many)).first()
    return int(total[0] or 0) if total else 0


def untold(found: DataFrame, rows: DataFrame) -> DataFrame:
    """Where a bucket held more charges that no row tells of than decisions without the store may have made.

    Such a decision may have charged each of its buckets once, after all; those of which the log then has what
    the store decided late are told of. Gives rows of what is found, for every principal that met them.
    """
    may = f.when(f.col("kind") == "late", -1).otherwise(1)
    unanswered = f.col("order").isNull()  # of a full store's answers it is known what they charged
    without_store = (f.col("kind") == "decision") & (f.col("source") == "fallback") & unanswered
    charging = f.col("mode").isin("admit", "record")
    allowed = (
        rows.where((without_store | (f.col("kind") == "late")) & charging)
        .select(may.alias("may"), f.explode("verdicts").alias("one"))
        .groupBy("one.quota", "one.bucket")
        .agg(f.sum("may").alias("may"))
    )
    met = (
        found.where((f.col("case") == "tally") & (f.col("unlogged") > 0))
        .groupBy("quota", "bucket", "principal")
        .agg(f.sum("unlogged").alias("untold"))
    )
    bucket = ["quota", "bucket"]
    most = f.greatest(f.coalesce("may", f.lit(0)), f.lit(0))
    broken = (
        met.groupBy(*bucket)
        .agg(f.sum("untold").alias("all"))
        .join(allowed, bucket, "left")
        .where(f.col("all") > most)
    )
    return met.join(broken.select(*bucket), bucket).select(
        f.lit("tally").alias("case"), *bucket, "principal", "untold"
    )


def judged(
    total: DataFrame, missing: Missing, inside: Inside, twice: int, *, allow_missing: bool
) -> DataFrame:
    """The row over all, with what is missing and what did not hold because of that or of nothing judged.

    Args:
        inside: what is wrong inside of batches.
        twice: how many identities have two rows that differ.
    """
    failed: dict[str, Column] = {
        held.MISSING: f.lit(missing.rows_or_batches and not allow_missing),
        held.ABSENT: f.lit(bool(missing.absent) and not allow_missing),
        held.GAPS: f.lit(inside.missing > 0 and not allow_missing),
        held.ADDED: f.lit(inside.added > 0),
        held.TWICE: f.lit(twice > 0),
        held.NOTHING: (f.col("verdicts") > 0) & (f.col("judged") == 0),
    }
    named = f.array(*(f.when(wrong, f.lit(name)) for name, wrong in failed.items()))
    return (
        total.withColumn("missing_batches", f.lit(missing.batches).cast("long"))
        .withColumn("dropped_rows", f.lit(missing.rows).cast("long"))
        .withColumn("missing_rows", f.lit(inside.missing).cast("long"))
        .withColumn("added_rows", f.lit(inside.added).cast("long"))
        .withColumn("told_twice", f.lit(twice).cast("long"))
        .withColumn("not_held", f.array_compact(f.concat("not_held", named)))
    )
