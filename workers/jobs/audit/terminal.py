"""The printed summary of an audit: the verdict, the failed principals, and the unchecked parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from app.terminal import plain
from workers.jobs.audit import findings

NAMED: Final = 10
"""How many failed principals are printed; the report has all."""


def summary(report: dict[str, Any], out: str, took_s: float) -> str:
    """The text for the terminal."""
    total = report["overall"]
    unjudged = f", {total['unjudged']:,} not judged" if total["unjudged"] else ""
    counts = f"{total['asks']:,} decisions, {total['judged']:,} verdicts judged{unjudged} in {took_s:.0f} s"
    if total["missing_batches"] or total["dropped_rows"]:
        counts += f", {total['missing_batches']:,} batches missing, {total['dropped_rows']:,} rows dropped"
    if total["missing_rows"] or total["added_rows"]:
        counts += f", {total['missing_rows']:,} rows missing inside of batches, {total['added_rows']:,} added"
    end = "\n".join([f"{counts}; the report is {out}/report.html", *_unchecked(report, total)])
    if report["held"]:
        return f"All bounds held: {end}"
    who = f", for {total['failed']:,} principals" if total["failed"] else ""
    lines = [f"Not all bounds held{who}:"]
    lines += [
        f"  {principal_text(row['principal'])}: {'; '.join(row['not_held'])}"
        for row in report["failed"][:NAMED]
    ]
    if total["failed"] > NAMED:
        lines.append("  ... and more, which are in the report")
    if total["not_held"]:
        lines.append(f"  over all: {'; '.join(total['not_held'])}")
    if report["is_whole"] and any(findings.OLDER.intersection(row["not_held"]) for row in report["failed"]):
        lines.append("  If the log was switched on while the store was in use, add --older.")
    return "\n".join([*lines, end])


def _unchecked(report: dict[str, Any], total: dict[str, Any]) -> Iterator[str]:
    """The unchecked parts, with reasons, and the part that an audit with a state read."""
    yield from report.get("state", ())
    if report["older"]:
        yield (
            "  --older: this log has the first batch of every node. If the store was not in use before, "
            f"remove --older: {total['believed']:,} ids taken as seen were not checked, and "
            f"{total['unjudged']:,} verdicts not judged"
        )
    elif not report["has_beginning"]:
        yield (
            "  The first batches of some nodes are missing, so buckets may be older than the log: "
            f"{total['believed']:,} ids taken as seen were not checked"
        )


def principal_text(principal: str | None) -> str:
    """A principal, safe for a terminal."""
    return "(asks without a principal)" if principal is None else plain(principal)
