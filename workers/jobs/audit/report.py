"""Audits a period of a log: runs all checks, and writes the report's tables, its page and its summary."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from app.domain.decision import OUTCOMES
from workers.decision_log.schema import HOUR_MS
from workers.jobs import batches, console
from workers.jobs.audit import page, stale_limits, tables
from workers.jobs.audit.bucket_findings import SCHEMA
from workers.jobs.audit.console_tables import console_tables
from workers.jobs.audit.judge import AuditRules
from workers.jobs.audit.limits import JudgedPeriod
from workers.jobs.audit.replay import LateRowsError, ReplayRules, replay
from workers.jobs.audit.scan import SavedRows, Scanned, ScanRules, scan
from workers.jobs.audit.state import AuditState
from workers.jobs.batches import Task
from workers.jobs.charts import slice_of
from workers.jobs.errors import JobError, JobUsageError
from workers.jobs.files import LogPart, location_of
from workers.jobs.folder import OutputFolder
from workers.jobs.period import Period, partial_log
from workers.jobs.runner import Runner
from workers.jobs.verdicts import VERDICTS_OF_A_DECISION

LARGEST: Final = 20
IN_PAGE: Final = 200
"""The most rows of a table that the page shows; the Parquet files have all."""


ROWS_OF_A_PARTITION: Final = 1_000_000
"""About so many verdicts are sorted at a time by each process."""

OVERVIEW, SCAN, REPLAY = 5.0, 45.0, 50.0
"""The shares of the parts of an audit in its time, in per cent."""

SUMMARY: Final = "summary.json"

SETTLED_MS: Final = 60_000
"""Rows of this age are taken as settled: nodes and the writer are not slower. After a slower one, the next
audit reads the log whole."""


def audit(
    runner: Runner,
    arguments: argparse.Namespace,
    period: Period,
    tasks: Sequence[LogPart],
    whole: Callable[[], Sequence[LogPart]],
    folder: OutputFolder,
    state: AuditState | None = None,
) -> dict[str, Any]:
    """Audit a period, and write the report's tables, its page and its summary; returns the page's values.

    Args:
        tasks: the row groups of the hours of the period, and of those ``around`` it.
        whole: gives all row groups of the log.
        state: what earlier audits found in other rows. The report is on all rows, and the state has all of
            them afterwards.

    Raises:
        JobError: the log cannot be read, or has no decision in the period.
        JobUsageError: the log does not have every decision.
        LateRowsError: the rows change what earlier audits found.
    """
    name = location_of(arguments.log).name
    grace_ms, wide = round(arguments.grace * 1000), around(arguments, period)
    known = AuditState() if state is None else state
    overview = batches.overview(runner, tasks, wide, period, OVERVIEW)
    copies = batches.copies(runner, tasks, overview, 0)
    if known.overlaps(overview):
        raise LateRowsError("rows are there again, in other hours")
    known.overview.add(overview)
    overview = known.overview
    gaps, faults = batches.gaps_and_faults(runner, whole, overview, period)

    is_whole = period.from_ms is None and not gaps.beginning
    known.judge_by(None if is_whole and not arguments.older else overview.ordered_ms)
    slice_ms = slice_of(overview.judged_span_ms)
    saved = known.saved_rows()
    rows = sum(task.rows for task in tasks) * VERDICTS_OF_A_DECISION + sum(each.rows for each in saved)
    partitions = max(1, rows // ROWS_OF_A_PARTITION)
    sequential = arguments.combine_delays == "sequential"
    rules = ScanRules(period, slice_ms, arguments.clock == "store", sequential, partitions)
    each_once: list[Task | SavedRows] = [*batches.each_once(tasks, wide, copies), *saved]
    parts, scattered = runner.scatter(partial(scan, rules), each_once, SCAN)
    scanned = known.scanned
    for part in parts:
        scanned.add(part)
    asked = scanned.asks.table()
    asks = _checked(scanned, asked, f"{name}", period)

    audit_rules = AuditRules(
        arguments.max_ids,
        sequential,
        period.from_ms,
        is_whole and not arguments.older,
        scanned.resets,
        scanned.loads,
        overview.ordered_ms,
    )
    settled_ms = None if state is None else (overview.last_ms or 0) - SETTLED_MS
    replay_rules = ReplayRules(audit_rules, asks, settled_ms)
    replayed = list(scattered.gather(partial(replay, replay_rules), REPLAY))
    kept = [part.kept for part in replayed if part.kept is not None]
    known.keep(kept)
    found = [*scanned.findings, known.findings, *(part.findings for part in replayed)]
    from_ms = -math.inf if is_whole else (overview.first_ms or 0) + grace_ms
    times = JudgedPeriod(from_ms, (overview.last_ms or 0) - grace_ms, grace_ms)
    if stale := stale_limits.stale_uses(scanned.uses.table(), scanned.changes, scanned.factors, times):
        if known.files:
            raise LateRowsError("limits were not in force, and all verdicts by them are counted")
        found += scattered.gather(partial(stale_limits.stale_verdicts, stale, period), 0)

    lacks = bool(gaps.batches or scanned.counts["dropped"] or faults.missing)
    allowed = tables.Allowed(arguments.allow_lost, arguments.allow_missing, arguments.allow_clock, lacks)
    findings = pa.concat_tables([SCHEMA.empty_table(), *found])
    principals = tables.principals(asked, findings, allowed)
    known.twice = twice = sorted({*known.twice, *batches.in_two_versions(copies)})
    counts = {
        "missing_batches": gaps.batches,
        "dropped_rows": scanned.counts["dropped"],
        "missing_rows": faults.missing,
        "added_rows": faults.added,
        "told_twice": len(twice),
    }
    overall = tables.over_all(principals, counts, allowed, absent=bool(gaps.absent))
    written = {
        "principals": principals,
        "buckets": tables.buckets(findings),
        "cases": tables.cases(findings),
        "overall": overall,
    }
    for table, rows in written.items():
        folder.table(table, rows.to_batches(), rows.schema)
    report = {
        "asks": asks,
        "changes": scanned.counts["changes"],
        "factors": scanned.counts["factors"],
        "from_ms": overview.judged_from_ms,
        "to_ms": overview.judged_to_ms,
        **_top_rows(**written),
        "grace_s": arguments.grace,
        "lacking": gaps.nodes,
        "absent": gaps.absent,
        "inside": faults.worst,
        "twice": twice,
        "slice_ms": slice_ms,
        "over_time": _over_time(scanned, slice_ms),
        "log": name,
        "is_whole": audit_rules.is_whole,
        "has_beginning": not gaps.beginning,
        "older": arguments.older and is_whole,
        "max_ids": audit_rules.max_ids,
        "combine_delays": arguments.combine_delays,
    }
    folder.text(SUMMARY, json.dumps(_summary(report, principals), indent=1))
    console.write(folder, name, report["from_ms"], report["to_ms"], console_tables(report))
    folder.text("report.html", page.html(report))
    return report


def around(arguments: argparse.Namespace, period: Period) -> Period:
    """The period to read: also hours before it, for the state of buckets, and changes shortly after it.

    A change that is logged after the period may be in force within it.
    """
    return period.widened(round(arguments.lead_in * HOUR_MS), round(arguments.grace * 1000) + 1)


def _checked(scanned: Scanned, asked: pa.Table, name: str, period: Period) -> int:
    """The number of asks in the period.

    Raises:
        JobUsageError: the log does not have every decision.
        JobError: the period has no decision.
    """
    counts = scanned.counts
    # A bucket with charges proves that asks were admitted, although the log has no admitted ask.
    leaves_out_admitted = counts["ever_held"] and not counts["ever_admitted"]
    if counts["apart"] or (counts["from_store"] and not counts["admitted"] and leaves_out_admitted):
        raise JobUsageError(partial_log(f"{name}: the audit", period))
    asks = pc.sum(asked["asks"]).as_py()
    if not asks:
        raise JobError(f"{name}: no decision in the period {period}")
    return int(asks)


def _over_time(scanned: Scanned, slice_ms: int) -> list[dict[str, int]]:
    """The number of asks in each slice of time, by decision, in order; earlier audits had shorter slices."""
    slices: Counter[tuple[int, str]] = Counter()
    for (from_ms, name), asks in scanned.slices.items():
        slices[from_ms // slice_ms * slice_ms, name] += asks
    scanned.slices = slices
    begins = sorted({from_ms for from_ms, _ in slices})
    names = (*OUTCOMES, "fallback")
    return [{"from_ms": at, **{name: slices[at, name] for name in names}} for at in begins]


def _top_rows(principals: pa.Table, buckets: pa.Table, cases: pa.Table, overall: pa.Table) -> dict[str, Any]:
    """The rows of the tables that the page shows."""
    [total] = overall.to_pylist()
    failed = principals.filter(pc.greater(pc.list_value_length(principals["not_held"]), 0))
    bounded = buckets.filter(pc.and_(buckets["bound"].is_valid(), pc.greater(buckets["worst"], 0)))
    nearest = bounded.append_column("part", tables.relative_to_bound(bounded))
    nearest = nearest.sort_by([("part", "descending"), ("bucket", "ascending")])
    seen = cases.filter(pc.equal(cases["case"], "falsely_seen"))
    return {
        "overall": total,
        "held": not total["not_held"] and not total["failed"],
        "failed": failed.slice(0, IN_PAGE).to_pylist(),
        "largest": principals.slice(0, LARGEST).to_pylist(),
        "nearest": nearest.slice(0, LARGEST).to_pylist(),
        "cases": cases.slice(0, IN_PAGE).to_pylist(),
        "cases_count": cases.num_rows,
        "falsely_seen": seen.slice(0, IN_PAGE).to_pylist(),
    }


def _summary(report: Mapping[str, Any], principals: pa.Table) -> dict[str, Any]:
    """The summary for programs: counts, and the findings over all and by principal."""
    total = report["overall"]
    named = principals.filter(pc.greater(pc.list_value_length(principals["not_held"]), 0))
    failed = [
        {"principal": row["principal"], "findings": row["not_held"]}
        for row in named.select(["principal", "not_held"]).to_pylist()
    ]
    over_all = [{"findings": total["not_held"]}] if total["not_held"] else []
    return {
        "decisions": total["asks"],
        "verdicts": total["verdicts"],
        "judged": total["judged"],
        "unjudged": total["unjudged"],
        "findings": [*over_all, *failed],
    }
