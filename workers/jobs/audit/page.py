"""The report as one HTML page, light and dark, without scripts and without anything from other hosts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final

from app.domain.decision import OUTCOMES
from app.domain.shape import FALSE_SEEN
from workers.jobs import charts
from workers.jobs.audit.admitted_amounts import excess
from workers.jobs.audit.findings import FALSELY_SEEN
from workers.jobs.page import head, number, shortened, table

SHOWN: Final = 20
"""How many identities with two different rows the page names; all are counted."""

COUNTS: Final = (
    ("asks", "decisions"),
    *((outcome, outcome) for outcome in OUTCOMES),
    ("fallback", "decided by the fallback, without the store"),
    ("unordered", "without a place in the store's order: local and fallback answers"),
    ("replayed", "answers repeated to a retry"),
    ("verdicts", "verdicts of quotas, given by the store"),
    ("judged", "verdicts recomputed exactly and compared"),
    ("unjudged", "verdicts not compared: the log does not determine what the bucket held"),
    ("differs", "verdicts or decisions that are not the exact ones"),
    ("lookups", "lookups of new ids"),
    ("falsely_seen", "new ids taken as seen"),
    ("charged_ids", "ids charged"),
    ("charged_again", "ids charged although they were known"),
    ("unlikely", "asks with more new ids taken as seen than chance explains"),
    ("believed", "ids taken as seen and not checked: the log does not reach back far enough"),
    ("lost", "times that a bucket had lost charges"),
    ("lost_units", "units lost with them"),
    ("altered", "times that a bucket was charged less than the row says"),
    ("unlogged", "times that a bucket held more charges than the log"),
    ("untold", "of these, more than decisions without the store may have made"),
    ("stale", "verdicts by a limit that was not in force"),
    ("corrections", "clock corrections"),
    ("over", "asks admitted above a bound"),
    ("contradicts", "rows that contradict themselves"),
    ("clock", "rows whose time does not fit their place in the store's order"),
    ("same_order", "rows that share their place in the store's order with another row"),
    ("missing_batches", "batches missing from the log, by their numbers"),
    ("dropped_rows", "rows that nodes had to drop"),
    ("missing_rows", "rows missing inside of batches"),
    ("added_rows", "rows that their batch did not have"),
    ("told_twice", "identities with two different rows"),
)
"""The rows of the table of totals: a column of `overall`, and its meaning."""

PRINCIPAL_COUNTS: Final = (
    "asks",
    *OUTCOMES,
    "fallback",
    "differs",
    "falsely_seen",
    "lost",
    "untold",
    "stale",
    "corrections",
    "over",
)
"""The counts of a principal in the page."""


def html(report: Mapping[str, Any]) -> str:
    """The page of a report."""
    total = report["overall"]
    return "".join(
        [
            head("Quotagate audit"),
            *_verdict(report, total),
            "<h2>Totals</h2>",
            table(["", "#count"], [(label, number(total[name])) for name, label in COUNTS]),
            *_batches(report),
            *_decisions(report),
            *_false_seen(report, total),
            *_admitted(report),
            *_principals("Principals for which a bound did not hold", report["failed"], total["failed"]),
            *_principals("Principals with most decisions", report["largest"], len(report["largest"])),
            *_cases(report),
            *_end(report),
        ]
    )


def _end(report: Mapping[str, Any]) -> Iterable[str]:
    yield f'<p class="faint">At most {report["max_ids"]:,} ids are remembered for each principal; delays are '
    yield f"combined by: {escape(report['combine_delays'])}. docs/pipeline.md and docs/bounds.md explain "
    yield "what is recomputed, and where the bounds come from.</p></body></html>\n"


def _verdict(report: Mapping[str, Any], total: Mapping[str, Any]) -> Iterable[str]:
    yield "<h1>Quotagate audit</h1>"
    if report["held"]:
        yield '<p class="held"><strong>All bounds held.</strong></p>'
    else:
        reasons = "; ".join(total["not_held"]) or "see the principals below"
        who = f", for {total['failed']:,} principals" if total["failed"] else ""
        yield f'<p class="failed"><strong>Not all bounds held</strong>{who}: {escape(reasons)}.</p>'
    period = f"{charts.clock(report['from_ms'])} to {charts.clock(report['to_ms'])} UTC"
    yield f'<p class="faint">{escape(report["log"])}, {period}. '
    yield f"{report['changes']:,} changes of quotas and {report['factors']:,} of the throttle factor. "
    yield "Each verdict was judged by the limit that its node applied, and that limit by these changes: "
    yield f"within {report['grace_s']:g} s of a change, the old and the new limit are both right.</p>"
    if report["older"]:
        yield "<p>Judged with --older, although the log has the first batch of every node: "
        yield f"{total['believed']:,} ids taken as seen were not checked.</p>"


def _batches(report: Mapping[str, Any]) -> Iterable[str]:
    """The faults of nodes and of whole batches."""
    if report["absent"]:
        yield "<h2>Missing nodes</h2><p>Other nodes name batches of these, but the log has none: "
        yield f"{escape(', '.join(report['absent']))}.</p>"
    if report["inside"]:
        yield "<h2>Batches that are not as their node wrote them</h2>"
        yield table(
            ["batch", "#rows missing", "#rows added", "when (UTC)"],
            [
                (one.batch, number(one.missing), number(one.added), charts.clock(one.from_ms))
                for one in report["inside"]
            ],
        )
    if report["twice"]:
        yield "<h2>Identities with two different rows</h2>"
        yield table(["batch", "#place"], [(batch, number(place)) for batch, place in report["twice"][:SHOWN]])
    if report["lacking"]:
        yield "<h2>Missing from the log</h2><p>Numbers of batches that are missing between others: a full "
        yield "stream refused them, or they were lost with the store before they were read.</p>"
        yield table(
            ["node", "#first number", "#last number", "#missing"],
            [(one.node, *(number(each) for each in one[1:])) for one in report["lacking"]],
        )


def _decisions(report: Mapping[str, Any]) -> Iterable[str]:
    yield "<h2>Decisions over time</h2><p>"
    for outcome in OUTCOMES:
        yield f'<span class="key {outcome}"></span>{outcome}'
    yield "</p>"
    yield charts.stacked_bars(report["over_time"], OUTCOMES, report["slice_ms"])


def _false_seen(report: Mapping[str, Any], total: Mapping[str, Any]) -> Iterable[str]:
    yield "<h2>New ids taken as seen</h2>"
    failed = ((_principal(row), row) for row in report["failed"][:10] if row["lookups"])
    plotted = []
    for name, row in [("all principals", total), *failed]:
        rate = row["falsely_seen"] / row["lookups"] if row["lookups"] else 0.0
        counted = f"{row['falsely_seen']:,} of {row['lookups']:,}"
        plotted.append((name, rate / FALSE_SEEN, counted, FALSELY_SEEN not in row["not_held"]))
    yield charts.bars(plotted, "the share of new ids that was taken as seen, against the design's bound")
    yield f'<p class="faint">By design this happens in {FALSE_SEEN:g} of the lookups of new ids. The bound '
    yield "counts as broken if a store that keeps it gave this result in one of a million audits.</p>"
    if report["falsely_seen"]:
        rows = ((row, "" if row["digest"] is None else str(row["digest"])) for row in report["falsely_seen"])
        yield table(
            ["principal", "#digest of the id", "when (UTC)"],
            [(_principal(row), digest, charts.clock(row["at_ms"])) for row, digest in rows],
        )


def _admitted(report: Mapping[str, Any]) -> Iterable[str]:
    yield "<h2>Admitted, against the stated bounds</h2>"
    plotted = []
    for row in report["nearest"]:
        ratio = excess(row["worst"], row["bound"])
        ratios = f"{row['worst']:.4f} of {row['bound']:.4f}"
        plotted.append((f"{row['quota']} {row['bucket']}", ratio, ratios, row["over"] == 0))
    yield charts.bars(plotted, "the most admitted in any window, against the bound") or (
        "<p>No quota that denies admitted anything.</p>"
    )


def _principals(title: str, rows: Sequence[Mapping[str, Any]], count: int) -> Iterable[str]:
    if not rows:
        return
    yield f"<h2>{escape(title)}</h2>"
    yield table(
        ["principal", "what did not hold", *(f"#{name.replace('_', ' ')}" for name in PRINCIPAL_COUNTS)],
        [
            (_principal(row), "; ".join(row["not_held"]), *(number(row[name]) for name in PRINCIPAL_COUNTS))
            for row in rows
        ],
    )
    yield shortened(len(rows), count, "principals")


def _cases(report: Mapping[str, Any]) -> Iterable[str]:
    if not report["cases"]:
        return
    yield "<h2>Cases</h2>"
    yield table(
        ["case", "when (UTC)", "principal", "bucket", "decided", "exact"],
        [
            (
                row["case"].replace("_", " "),
                charts.clock(row["at_ms"]),
                _principal(row),
                f"{row['quota']} {row['bucket']}" if row["quota"] else "",
                row["logged"],
                row["exact"],
            )
            for row in report["cases"]
        ],
    )
    yield shortened(len(report["cases"]), report["cases_count"], "cases")


def _principal(row: Mapping[str, Any]) -> str:
    return "(no principal)" if row["principal"] is None else str(row["principal"])
