"""The audit's tables, made of the asks of each principal and of the findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from workers.jobs.audit import findings
from workers.jobs.audit.bucket_findings import COUNTS, SCHEMA
from workers.jobs.audit.scan import ASK_COUNTS
from workers.jobs.verdicts import Flags, integers

KEYS: Final = ("quota", "bucket", "principal")
SUMS: Final = (*ASK_COUNTS, *COUNTS, "lost_units")
CASES: Final = (
    "case", "principal", "quota", "bucket", "at_ms", "order", "digest", "amount", "logged", "exact",
)  # fmt: skip
"""The columns of single cases."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """Findings that are no faults in this audit.

    Attributes:
        lacks: rows are missing. They may have charged ids that now look new.
    """

    lost: bool = False
    missing: bool = False
    clock: bool = False
    lacks: bool = False


def principals(asked: pa.Table, found: pa.Table, allowed: Allowed) -> pa.Table:
    """All counts of each principal, and its findings; asks without a principal have the principal null.

    Args:
        asked: the counts ``ASK_COUNTS`` by principal.
        found: rows of ``bucket_findings.SCHEMA``.
    """
    both = pa.concat_tables([asked, found.select(_held(found, "principal"))], promote_options="default")
    table = judged(_added_up(both, ["principal"]), allowed)
    return table.sort_by([("asks", "descending"), ("principal", "ascending")])


def buckets(found: pa.Table) -> pa.Table:
    """All counts of each bucket, one row each, in the order of their names."""
    tallies = found.filter(pc.equal(found["case"], "tally"))
    table = _added_up(tallies, ["quota", "bucket"]).drop_columns(list(ASK_COUNTS))
    return table.sort_by([("quota", "ascending"), ("bucket", "ascending")])


def by_bucket(tallies: pa.Table) -> pa.Table:
    """Counts of buckets, added up by bucket and principal, as ``bucket_findings.SCHEMA``."""
    table = _added_up(tallies.select(_held(tallies, *KEYS)), KEYS)
    columns = {name: table[name] for name in SCHEMA.names if name in table.schema.names}
    case = pa.repeat(pa.scalar("tally"), table.num_rows)
    rows = pa.table({**columns, "case": case})
    return pa.concat_tables([SCHEMA.empty_table(), rows], promote_options="default").select(SCHEMA.names)


def cases(found: pa.Table) -> pa.Table:
    """The single cases, in the store's order."""
    single = found.filter(pc.not_equal(found["case"], "tally")).select(CASES)
    return single.sort_by([(name, "ascending") for name in ("order", "bucket", "digest", "quota", "case")])


def over_all(table: pa.Table, lacking: Mapping[str, int], allowed: Allowed, *, absent: bool) -> pa.Table:
    """One row of totals over the table of principals, with all findings.

    Args:
        lacking: the numbers of rows and batches that the log lacks, or has too often.
        absent: a node is missing.
    """
    failed = int((integers(pc.list_value_length(table["not_held"].combine_chunks())) > 0).sum())
    total = judged(_added_up(table, []), allowed)
    judged_any = total["judged"][0].as_py() or not total["verdicts"][0].as_py()
    more = {
        findings.MISSING: bool(lacking["missing_batches"] or lacking["dropped_rows"]) and not allowed.missing,
        findings.ABSENT: absent and not allowed.missing,
        findings.GAPS: lacking["missing_rows"] > 0 and not allowed.missing,
        findings.ADDED: lacking["added_rows"] > 0,
        findings.TWICE: lacking["told_twice"] > 0,
        findings.NOTHING: not judged_any,
    }
    names = [*total["not_held"][0].as_py(), *(name for name, applies in more.items() if applies)]
    [row] = total.drop_columns(["not_held"]).to_pylist()
    row = {"principals": table.num_rows, "failed": failed, **row, **lacking, "not_held": names}
    types = {field.name: field.type for field in total.schema}
    fields = [(name, types.get(name, pa.int64())) for name in row]
    return pa.Table.from_pylist([row], pa.schema(fields))


def judged(table: pa.Table, allowed: Allowed) -> pa.Table:
    """The table with the findings of each row in ``not_held``, which is empty if all bounds held."""

    def some(name: str) -> Flags:
        return integers(table[name].combine_chunks()) > 0

    excused = allowed.missing and allowed.lacks
    improbable = some("falsely_seen")
    for place in np.flatnonzero(improbable).tolist():
        counts = (table[name][place].as_py() for name in ("falsely_seen", "lookups"))
        improbable[place] = findings.improbable(*counts)
    failed = {
        findings.FALSELY_SEEN: improbable & (not excused),
        findings.UNLIKELY: some("unlikely") & (not excused),
        findings.OVER: some("over"),
        findings.DIFFERS: some("differs"),
        findings.LOST: (some("lost") | some("charged_again")) & (not allowed.lost),
        findings.ALTERED: some("altered") & (not allowed.lost),
        findings.UNTOLD: some("untold") & (not allowed.missing),
        findings.STALE: some("stale"),
        findings.CONTRADICTS: some("contradicts"),
        findings.CLOCK: some("clock") & (not allowed.clock),
        findings.SAME_ORDER: some("same_order"),
    }
    return table.append_column("not_held", _names(failed))


def _names(failed: Mapping[str, Flags]) -> pa.Array:
    """For each row the names of the findings that apply."""
    applies = np.stack(list(failed.values()), axis=1)
    ends = np.concatenate([[0], np.cumsum(applies.sum(axis=1))])
    _, which = np.nonzero(applies)
    names = pa.array(list(failed), pa.string()).take(pa.array(which))
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), names)


def relative_to_bound(table: pa.Table) -> pa.ChunkedArray:
    """The ratio of each row, divided by its bound."""
    bounded = pc.greater(table["bound"], 0).combine_chunks().fill_null(False)
    return pc.if_else(bounded, pc.divide(table["worst"], table["bound"]), table["worst"])


def _held(found: pa.Table, *keys: str) -> list[str]:
    return [*keys, *(name for name in (*SUMS, "worst", "bound") if name in found.schema.names)]


def _added_up(table: pa.Table, keys: Sequence[str]) -> pa.Table:
    """The sums of all counts by some keys, with the ratio nearest to its bound, and that bound."""
    for name in SUMS:
        if name not in table.schema.names:
            table = table.append_column(name, pa.nulls(table.num_rows, pa.int64()))
    table = table.append_column("part", relative_to_bound(table))
    table = table.sort_by([("part", "descending"), ("bound", "descending")])
    nearest = pc.ScalarAggregateOptions(skip_nulls=False)
    sums = table.group_by(list(keys), use_threads=False).aggregate(
        [
            *((name, "sum") for name in SUMS),
            *((name, "first", nearest) for name in ("worst", "bound")),
        ]
    )
    sums = sums.rename_columns([*keys, *SUMS, "worst", "bound"])
    return pa.table(
        {name: sums[name].fill_null(0) if name in SUMS else sums[name] for name in sums.schema.names}
    )
