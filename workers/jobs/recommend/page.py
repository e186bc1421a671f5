"""The report of a recommendation as one HTML page."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING, Final

from app.terminal import duration, exact, measured
from workers.jobs.charts import bars, clock
from workers.jobs.page import head, number, shortened, table
from workers.jobs.recommend import text
from workers.jobs.recommend.limits import KeyLimits

if TYPE_CHECKING:
    from workers.jobs.recommend.report import Recommendation

IN_CHART: Final = 20
IN_PAGE: Final = 200
"""The most rows of a table that the page shows; the Parquet files have all."""


def html(made: Recommendation) -> str:
    """The page of a recommendation."""
    period = f"{clock(made.from_ms)} to {clock(made.to_ms)} UTC"
    return "".join(
        [
            head("Quotagate recommendation"),
            "<h1>Quotagate recommendation</h1>",
            f'<p class="faint">{escape(made.log)}, {period}: {made.demands.asks:,} asks. ',
            f"{escape(text.basis(made))} The limits are in quotas.yaml.</p>",
            *(f"<p>{escape(line)}</p>" for line in (*text.effects(made), *text.notes(made))),
            "<h2>Outliers</h2>",
            *_outliers(made),
            *(part for each in made.found for part in _limits(each)),
            '<p class="faint">docs/pipeline.md says how limits and outliers are found.</p></body></html>\n',
        ]
    )


def _outliers(made: Recommendation) -> Iterable[str]:
    rows = [(each, outlier) for each in made.found for outlier in each.outliers]
    if not rows:
        yield "<p>None.</p>"
        return
    yield "<p>They get no limit of their own for any key, so the defaults hold them. Look at each before you "
    yield "apply the file: a limit of its own is a decision of yours.</p>"
    yield table(
        ["entity", "quota", "#need", "#need of peers", "#times", "#new ids an ask", "#asks", "#held"],
        [
            (
                outlier.entity,
                each.quota,
                exact(outlier.need),
                "" if outlier.typical is None else measured(outlier.typical),
                "" if outlier.times_typical is None else measured(outlier.times_typical),
                "" if outlier.ids_of_an_ask is None else f"{outlier.ids_of_an_ask:.2f}",
                number(outlier.asks),
                number(outlier.held),
            )
            for each, outlier in rows[:IN_PAGE]
        ],
    )
    yield shortened(IN_PAGE, len(rows), "outliers")
    chart = [
        (f"{outlier.entity} {each.quota}", outlier.need / each.default.limit, exact(outlier.need), False)
        for each, outlier in rows
        if each.default
    ]
    if chart:
        yield "<p>Needs of outliers. The bound is the default, and bars end at three times it.</p>"
        yield bars(chart[:IN_CHART], "needs of outliers")


def _limits(found: KeyLimits) -> Iterable[str]:
    yield f"<h2><code>{found.quota}</code></h2>"
    if found.default is None:
        return
    rows = [found.default, *found.own]
    yield table(
        ["entity", "#limit", "#need", "#entities", "#asks", "#held", "#history", "confidence"],
        [
            (
                limit.entity,
                exact(limit.limit),
                exact(limit.need),
                number(limit.entities),
                number(limit.asks),
                number(limit.held),
                duration(limit.history_ms),
                limit.confidence,
            )
            for limit in rows[:IN_PAGE]
        ],
    )
    yield shortened(IN_PAGE, len(rows), "limits")
