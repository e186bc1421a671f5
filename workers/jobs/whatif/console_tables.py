"""The tables of a what-if for the console."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from app.domain.decision import OUTCOMES
from app.terminal import exact
from workers.jobs.console import Cell, ConsoleTable, slices
from workers.jobs.whatif.causes import CAUSES
from workers.jobs.whatif.compared import Compared
from workers.jobs.whatif.page import by_refusals, charted, most_touched

if TYPE_CHECKING:
    from workers.jobs.charts import UsageChart
    from workers.jobs.whatif.report import WhatIfReport


def console_tables(report: WhatIfReport) -> Iterator[ConsoleTable]:
    """The tables that the page has; none if the log does not reproduce itself."""
    found = report.what_if
    if found.reproduction.other:
        return
    worlds = (found.overall.before, found.overall.after)
    decisions: list[Sequence[Cell]] = [
        (outcome, *(world.decisions[outcome] for world in worlds)) for outcome in OUTCOMES
    ]
    yield ConsoleTable("decisions", "Decisions", ("decision", "before", "after"), decisions)
    touched = most_touched(found)
    for name, key, chart in charted(report, touched):
        yield from _over_time(report, name, key, chart)
    quotas = [
        (
            entity,
            key,
            " or ".join(exact(limit) for limit in sorted(one.limits_before)) or None,
            one.limit_after,
            one.refused_before,
            one.refused_after,
        )
        for (entity, key), one in by_refusals(found)
    ]
    columns: Sequence[str] = (
        "entity",
        "quota",
        "limit_before",
        "limit_after",
        "refused_before",
        "refused_after",
    )
    yield ConsoleTable("quotas", "Quotas", columns, quotas)
    columns = (
        *("principal", "asks", "newly_refused", "newly_admitted", "refused_before", "refused_after"),
        *("waits_before_ms", "waits_after_ms"),
    )
    rows = [_principal(name, each) for name, each in touched]
    yield ConsoleTable("principals", "Principals with other decisions or waits", columns, rows)
    causes = [(CAUSES[cause], count) for cause, count in found.reproduction.causes.most_common() if count]
    if causes:
        title = "Decisions that the quotas of the log do not give again, with the cause"
        yield ConsoleTable("causes", title, ("cause", "decisions"), causes)


def _principal(name: str, each: Compared) -> Sequence[Cell]:
    return (
        name or None,
        each.before.decisions.total(),
        each.newly_refused,
        each.newly_admitted,
        each.before.refused,
        each.after.refused,
        each.before.wait_ms,
        each.after.wait_ms,
    )


def _over_time(report: WhatIfReport, name: str, key: str, chart: UsageChart) -> Iterator[ConsoleTable]:
    """The usage of a principal with both limits, and its refused asks."""
    usage: list[Sequence[Cell]] = []
    refused: list[Sequence[Cell]] = []
    limits = list(chart.limits_before)
    limit_before: float | None = None
    for at_ms in slices(report.from_ms, report.to_ms, report.slice_ms):
        while limits and limits[0][0] <= at_ms:
            limit_before = limits.pop(0)[1]
        usage.append((at_ms, chart.usage.get(at_ms, 0.0), limit_before, chart.limit_after))
        refused.append((at_ms, _at(chart.refused_before, at_ms), _at(chart.refused_after, at_ms)))
    columns: Sequence[str] = ("at_ms", "asked_for", "limit_before", "limit_after")
    yield ConsoleTable("usage_over_time", f"{key} of {name}", columns, usage)
    columns = ("at_ms", "refused_before", "refused_after")
    yield ConsoleTable("refused_over_time", f"Refused asks of {name}", columns, refused)


def _at(counts: Mapping[int, int], at_ms: int) -> int:
    return counts.get(at_ms, 0)
