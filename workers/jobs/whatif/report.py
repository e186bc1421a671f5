"""Replays a period of a log under other quotas, and writes the tables, the page and the summary."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from app.domain.decision import OUTCOMES
from workers.jobs import console
from workers.jobs.charts import slice_of
from workers.jobs.files import LogPart
from workers.jobs.folder import OutputFolder
from workers.jobs.period import Period
from workers.jobs.progress import Progress
from workers.jobs.runner import Runner
from workers.jobs.whatif import page
from workers.jobs.whatif.compared import Compared
from workers.jobs.whatif.console_tables import console_tables
from workers.jobs.whatif.log import ReplayedLog
from workers.jobs.whatif.quotas import ProposedQuotas
from workers.jobs.whatif.simulation import Assumptions
from workers.jobs.whatif.what_if import WhatIf

OVERVIEW, REPLAY = 10.0, 90.0
"""The shares of the parts of a what-if in its time, in per cent."""

SUMMARY: Final = "summary.json"

WORLDS: Final = ("before", "after")
USAGE: Final = pa.map_(pa.string(), pa.float64())
PRINCIPALS: Final = pa.schema(
    [
        ("principal", pa.string()),
        ("asks", pa.int64()),
        *((f"{outcome}_{world}", pa.int64()) for world in WORLDS for outcome in OUTCOMES),
        *((f"{name}_{world}", pa.int64()) for name in ("refused", "wait_ms") for world in WORLDS),
        *((f"usage_{world}", USAGE) for world in WORLDS),
        *((name, pa.int64()) for name in ("newly_refused", "newly_admitted", "kept", "retries", "gave_up")),
    ]
)
"""A row for each principal, null for asks without one; ``usage`` is what was admitted, by field."""

QUOTAS: Final = pa.schema(
    [
        ("entity", pa.string()),
        ("quota", pa.string()),
        ("limits_before", pa.list_(pa.float64())),
        ("limit_after", pa.float64()),
        ("shadow_after", pa.bool_()),
        ("refused_before", pa.int64()),
        ("refused_after", pa.int64()),
    ]
)
"""A row for each quota of the log or of the file; the limits of the log include those of changed quotas."""


@dataclass(frozen=True, slots=True)
class WhatIfReport:
    """The result of a what-if, with the facts about the log that a reader needs.

    Attributes:
        log: the log's name.
        from_ms, to_ms: the times of the first and the last row of the period.
        slice_ms: the length of a slice of time.
        missing_batches, missing_rows: what the log lacks, by its numbers.
    """

    what_if: WhatIf
    log: str
    scenario: str
    from_ms: int
    to_ms: int
    slice_ms: int
    missing_batches: int
    missing_rows: int


def report(
    runner: Runner,
    progress: Progress,
    arguments: argparse.Namespace,
    proposed: ProposedQuotas,
    period: Period,
    tasks: Sequence[LogPart],
    whole: Callable[[], Sequence[LogPart]],
    folder: OutputFolder,
) -> WhatIfReport:
    """Replay a period, and write the tables, the page and the summary.

    A log that does not reproduce itself gets a summary alone.

    Args:
        tasks: the row groups of the hours of the period, and of those ``around`` it.
        whole: gives all row groups of the log.

    Raises:
        JobError: the log cannot be read, or has no decision in the period.
        JobUsageError: the log does not have every decision.
    """
    log = ReplayedLog.of(runner, progress, arguments, period, tasks, whole, OVERVIEW)
    overview = log.overview
    slice_ms = slice_of(overview.judged_span_ms)
    assumptions = Assumptions(
        scenario=arguments.scenario,
        from_ms=period.from_ms or 0,
        max_ids=arguments.max_ids,
        is_whole=log.is_whole,
        sequential=arguments.combine_delays == "sequential",
        rules=proposed.rules,
        slice_ms=slice_ms,
    )
    found = log.what_if(proposed.quotas, assumptions, REPLAY)
    made = WhatIfReport(
        found,
        log.name,
        arguments.scenario,
        overview.judged_from_ms or 0,
        overview.judged_to_ms or 0,
        slice_ms,
        log.missing_batches,
        log.missing_rows,
    )
    folder.text(SUMMARY, json.dumps(summary(found), indent=1))
    console.write(folder, made.log, made.from_ms, made.to_ms, console_tables(made))
    if not found.reproduction.other:
        for table, rows, schema in (
            ("principals", principals(found.principals), PRINCIPALS),
            ("quotas", quotas(found), QUOTAS),
        ):
            folder.table(table, pa.Table.from_pylist(list(rows), schema=schema).to_batches(), schema)
        folder.text("report.html", page.html(made))
    return made


def summary(found: WhatIf) -> dict[str, Any]:
    """The summary for programs; without reproduction nothing is known of the other quotas."""
    reproduction, overall = found.reproduction, found.overall
    is_known = not reproduction.other
    return {
        "decisions": reproduction.decisions,
        "reproduced": reproduction.reproduced,
        "causes": {cause: count for cause, count in sorted(reproduction.causes.items()) if cause != "other"},
        "other": reproduction.other,
        "before": {outcome: overall.before.decisions[outcome] for outcome in OUTCOMES} if is_known else {},
        "after": {outcome: overall.after.decisions[outcome] for outcome in OUTCOMES} if is_known else {},
        "newly_refused": overall.newly_refused if is_known else None,
        "newly_admitted": overall.newly_admitted if is_known else None,
    }


def principals(found: Mapping[str, Compared]) -> Iterable[dict[str, Any]]:
    """The rows of ``PRINCIPALS``."""
    for name, compared in found.items():
        row: dict[str, Any] = {"principal": name or None, "asks": compared.before.decisions.total()}
        for world, of in (("before", compared.before), ("after", compared.after)):
            row |= {f"{outcome}_{world}": of.decisions[outcome] for outcome in OUTCOMES}
            row |= {f"refused_{world}": of.refused, f"wait_ms_{world}": of.wait_ms}
            row[f"usage_{world}"] = sorted(of.usage.items())
        row |= {"newly_refused": compared.newly_refused, "newly_admitted": compared.newly_admitted}
        row |= {"kept": compared.kept, "retries": compared.after.retries, "gave_up": compared.after.gave_up}
        yield row


def quotas(found: WhatIf) -> Iterable[dict[str, Any]]:
    """The rows of ``QUOTAS``."""
    for (entity, key), outcome in found.quotas.items():
        yield {
            "entity": entity,
            "quota": key,
            "limits_before": sorted(outcome.limits_before),
            "limit_after": outcome.limit_after,
            "shadow_after": outcome.shadow_after,
            "refused_before": outcome.refused_before,
            "refused_after": outcome.refused_after,
        }
