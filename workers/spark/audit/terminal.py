"""What the terminal is told of an audit: the verdict, whom it concerns, and what passed on trust."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from workers.spark.audit import held

NAMED: Final = 10
"""So many principals of those that did not hold are named; all of them are in the report."""


def said(report: dict[str, Any], out: str, took_s: float) -> str:
    """What the terminal is told: the verdict, and who it concerns."""
    total = report["overall"]
    unjudged = f", {total['unjudged']:,} not judged" if total["unjudged"] else ""
    counted = f"{total['asks']:,} decisions, {total['judged']:,} verdicts judged{unjudged} in {took_s:.0f} s"
    if total["missing_batches"] or total["dropped_rows"]:
        counted += f", {total['missing_batches']:,} batches missing, {total['dropped_rows']:,} rows dropped"
    if total["missing_rows"] or total["added_rows"]:
        counted += (
            f", {total['missing_rows']:,} rows missing inside of batches, {total['added_rows']:,} added"
        )
    end = "\n".join([f"{counted}; the report is {out}/report.html", *_not_silent(report, total)])
    if report["held"]:
        return f"All bounds held: {end}"
    who = f", for {total['failed']:,} principals" if total["failed"] else ""
    lines = [f"Not all bounds held{who}:"]
    lines += [
        f"  {named(row['principal'])}: {'; '.join(row['not_held'])}" for row in report["failed"][:NAMED]
    ]
    if total["failed"] > NAMED:
        lines.append("  ... and others, who are in the report")
    if total["not_held"]:
        lines.append(f"  over all: {'; '.join(total['not_held'])}")
    if report["is_whole"] and any(held.OLDER.intersection(row["not_held"]) for row in report["failed"]):
        lines.append("  If the log was switched on over a store in use, say --older.")
    return "\n".join([*lines, end])


def _not_silent(report: dict[str, Any], total: dict[str, Any]) -> Iterator[str]:
    """What passed because it was asked for, or because of what is not there."""
    if report["older"]:
        yield (
            "  --older: this log has its beginning, the first batch of every node. If the store was not in "
            f"use before it, leave that out: {total['believed']:,} ids taken as seen were believed, and "
            f"{total['unjudged']:,} verdicts not judged"
        )
    elif not report["has_beginning"]:
        yield (
            "  The first batches of some nodes are not there, so buckets may be older than the log: "
            f"{total['believed']:,} ids taken as seen were believed"
        )


def named(principal: str | None) -> str:
    """A principal as it is shown."""
    return "(asks without a principal)" if principal is None else principal.encode("unicode_escape").decode()
