"""The report of a what-if as one HTML page."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import TYPE_CHECKING, Final

from app.domain.decision import OUTCOMES
from app.domain.quota import KEYS, PRODUCER_IDS_RATE, Defaults
from app.terminal import duration, exact
from workers.jobs.charts import UsageChart, clock, usage_over_time
from workers.jobs.page import head, number, shortened, table
from workers.jobs.whatif.causes import CAUSES
from workers.jobs.whatif.compared import Compared, QuotaOutcome, UsageSeries, World
from workers.jobs.whatif.what_if import WhatIf

if TYPE_CHECKING:
    from workers.jobs.whatif.report import WhatIfReport

CHARTS: Final = 10
LARGEST: Final = 20
IN_PAGE: Final = 200
"""The most rows of a table that the page shows; the Parquet files have all."""

SCENARIOS: Final = {
    "as-logged": "Every ask comes when it came.",
    "retry-after-wait": "An ask that is newly throttled comes again after its wait, up to three times.",
    "stop-while-waiting": "A caller sends nothing while it waits; its asks queue, each for up to a minute.",
}


def html(report: WhatIfReport) -> str:
    """The page of a report."""
    found = report.what_if
    touched = most_touched(found)
    return "".join(
        [
            head("Quotagate what-if"),
            *_result(report),
            "<h2>Decisions</h2>",
            table(
                ["decision", "#before", "#after"],
                [
                    (outcome, *(number(each.decisions[outcome]) for each in _worlds(found.overall)))
                    for outcome in OUTCOMES
                ]
                + [("all waits", *(duration(each.wait_ms) for each in _worlds(found.overall)))]
                + [
                    (name, *(number(getattr(each, field)) for each in _worlds(found.overall)))
                    for name, field in (
                        ("asks that came again", "retries"),
                        ("asks given up while waiting", "gave_up"),
                    )
                ],
            ),
            *_quotas(found),
            *_principals(touched, len(found.principals)),
            *_charts(report, touched),
            *_reproduction(found),
        ]
    )


def most_touched(found: WhatIf) -> list[tuple[str, Compared]]:
    """The principals with other decisions or waits than before, most changed first."""
    changed = [
        (name, each)
        for name, each in found.principals.items()
        if each.changed
        or each.before.decisions != each.after.decisions
        or each.before.wait_ms != each.after.wait_ms
    ]
    return sorted(
        changed,
        key=lambda one: (-one[1].changed, -abs(one[1].after.wait_ms - one[1].before.wait_ms), one[0]),
    )


def _worlds(compared: Compared) -> tuple[World, World]:
    return compared.before, compared.after


def _result(report: WhatIfReport) -> Iterable[str]:
    overall = report.what_if.overall
    kind = "failed" if overall.newly_refused else "held"
    yield "<h1>Quotagate what-if</h1>"
    yield f'<p class="{kind}"><strong>{overall.newly_refused:,} asks that were admitted would be refused, '
    yield f"{overall.newly_admitted:,} that were refused would be admitted.</strong></p>"
    period = f"{clock(report.from_ms)} to {clock(report.to_ms)} UTC"
    yield f'<p class="faint">{escape(report.log)}, {period}. {escape(SCENARIOS[report.scenario])} '
    if overall.kept:
        yield f"{overall.kept:,} answers are as they were: kept answers, answers without the store, and asks "
        yield "that a throttle factor of 0 held."
    yield "</p>"


def by_refusals(found: WhatIf) -> list[tuple[tuple[str, str], QuotaOutcome]]:
    """The quotas; those that refused most asks come first."""
    return sorted(
        found.quotas.items(), key=lambda one: (-one[1].refused_after - one[1].refused_before, one[0])
    )


def _quotas(found: WhatIf) -> Iterable[str]:
    rows = by_refusals(found)
    yield "<h2>Quotas</h2>"
    yield table(
        ["entity", "quota", "#limit before", "#limit after", "#refused before", "#refused after"],
        [
            (
                entity,
                key,
                " or ".join(map(exact, sorted(outcome.limits_before))) or "none",
                _limit_after(outcome),
                number(outcome.refused_before),
                number(outcome.refused_after),
            )
            for (entity, key), outcome in rows[:IN_PAGE]
        ],
    )
    yield shortened(IN_PAGE, len(rows), "quotas")


def _principals(touched: list[tuple[str, Compared]], count: int) -> Iterable[str]:
    yield "<h2>Principals touched most</h2>"
    yield f"<p>{len(touched):,} of {count:,} have other decisions or waits.</p>"
    if not touched:
        return
    yield table(
        ["principal", "#asks", "#newly refused", "#newly admitted", "#refused before", "#refused after",
         "#all waits before", "#all waits after"],
        [
            (
                name_of(name),
                *map(
                    number,
                    (
                        each.before.decisions.total(),
                        each.newly_refused,
                        each.newly_admitted,
                        each.before.refused,
                        each.after.refused,
                    ),
                ),
                *(duration(world.wait_ms) for world in _worlds(each)),
            )
            for name, each in touched[:LARGEST]
        ],
    )  # fmt: skip
    yield shortened(LARGEST, len(touched), "principals")


def charted(
    report: WhatIfReport, touched: Iterable[tuple[str, Compared]]
) -> Iterator[tuple[str, str, UsageChart]]:
    """Name, quota key and chart of the principals touched most; the quota is the one that changed most."""
    drawn = 0
    for name, compared in touched:
        series = report.what_if.series.get(name)
        key = _most_changed(compared)
        if not name or series is None or key is None or drawn == CHARTS:
            continue
        drawn += 1
        yield name, key, chart_of(report, name, series, key)


def _charts(report: WhatIfReport, touched: list[tuple[str, Compared]]) -> Iterable[str]:
    for place, (name, key, chart) in enumerate(charted(report, touched)):
        if not place:
            yield '<h2>Usage over time</h2><p><span class="key admit"></span>asked for'
            yield '<span class="key before"></span>limit and refused asks, before'
            yield '<span class="key after"></span>limit and refused asks, after</p>'
        shown = f"mean over {duration(report.slice_ms)}"
        if key == PRODUCER_IDS_RATE:
            shown = "new ids charged in the window, as logged"
        yield f"<h3>{escape(name)}: <code>{key}</code>, {shown}</h3>"
        label = f"{key} of {name} over time"
        yield usage_over_time(chart, report.from_ms, report.to_ms, report.slice_ms, label)


def _most_changed(compared: Compared) -> str | None:
    """The quota key whose number of refused asks changed most; the number of delayed asks breaks a tie."""
    before, after = _worlds(compared)
    keys = sorted(
        key
        for key in {*before.refused_by, *after.refused_by, *before.delayed_by, *after.delayed_by}
        if key in KEYS
    )

    def change(key: str) -> tuple[int, int, int]:
        return (
            abs(after.refused_by[key] - before.refused_by[key]),
            abs(after.delayed_by[key] - before.delayed_by[key]),
            after.refused_by[key] + after.delayed_by[key],
        )

    return max(keys, key=change, default=None)


def chart_of(report: WhatIfReport, name: str, series: UsageSeries, key: str) -> UsageChart:
    """The values of a principal's chart: rates as means of a slice, ids as counts in the trailing window."""
    quota = report.what_if.limits.get(name, {}).get(key)
    usage_field, per_unit = KEYS[key].usage, KEYS[key].per_unit
    amounts = {at: amount for (at, field), amount in series.usage.items() if field == usage_field}
    usage: dict[int, float]
    if key == PRODUCER_IDS_RATE:
        window_ms = quota.window_ms if quota is not None else Defaults().window_ms
        usage = _in_window(amounts, report, window_ms)
    else:
        usage = {at: amount / per_unit / (report.slice_ms / 1000) for at, amount in amounts.items()}
    return UsageChart(
        usage,
        series.limits.get(key, []),
        None if quota is None else float(quota.limit),
        series.refused_before,
        series.refused_after,
    )


def _in_window(amounts: Mapping[int, float], report: WhatIfReport, window_ms: int) -> dict[int, float]:
    """The sum of the trailing window at the end of each slice."""
    inside: deque[tuple[int, float]] = deque()
    total, found = 0.0, {}
    begin_ms = report.from_ms - report.from_ms % report.slice_ms
    for at in range(begin_ms, report.to_ms + 1, report.slice_ms):
        amount = amounts.get(at, 0)
        inside.append((at, amount))
        total += amount
        while inside[0][0] <= at - window_ms:
            total -= inside.popleft()[1]
        found[at] = total
    return found


def _reproduction(found: WhatIf) -> Iterable[str]:
    reproduction = found.reproduction
    yield "<h2>The log reproduces itself</h2>"
    yield f"<p>{reproduction.reproduced:,} of {reproduction.decisions:,} decisions are exactly those that "
    yield "the quotas of the log give again; each of the others has a known cause.</p>"
    if reproduction.causes:
        yield table(
            ["cause", "#decisions"],
            [(CAUSES[cause], number(count)) for cause, count in reproduction.causes.most_common() if count],
        )
    yield '<p class="faint">docs/pipeline.md says what is assumed.</p></body></html>\n'


def _limit_after(outcome: QuotaOutcome) -> str:
    if outcome.limit_after is None:
        return "none"
    return f"{exact(outcome.limit_after)}{', in shadow' if outcome.shadow_after else ''}"


def name_of(principal: str) -> str:
    """A principal's name for people."""
    return principal or "(no principal)"
