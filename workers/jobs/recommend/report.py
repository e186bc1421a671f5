"""Recommends limits from a period of a log, and writes the file of quotas, the tables and the page."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from app.domain.entity import Entity
from app.domain.ladder import MatchingRules, Quotas
from app.domain.quota import Defaults
from app.domain.quota_value import Definition
from workers.jobs import console
from workers.jobs.errors import JobError
from workers.jobs.files import LogPart
from workers.jobs.folder import OutputFolder
from workers.jobs.needs import Needs
from workers.jobs.period import Period
from workers.jobs.progress import Progress
from workers.jobs.recommend import page, text
from workers.jobs.recommend.console_tables import console_tables
from workers.jobs.recommend.demand import Demands, demands
from workers.jobs.recommend.forms import DEFAULTS, definition, forms
from workers.jobs.recommend.limits import Basis, KeyLimits, Limit, recommended
from workers.jobs.runner import Runner, without_collector
from workers.jobs.whatif.compared import Compared, World
from workers.jobs.whatif.log import ReplayedLog
from workers.jobs.whatif.quotas import resolved
from workers.jobs.whatif.simulation import APART, Assumptions
from workers.jobs.whatif.terminal import differences
from workers.jobs.whatif.what_if import WhatIf

OVERVIEW, FORMS, MEASURE, REPLAY = 5.0, 5.0, 40.0, 50.0
"""The shares of the parts of a recommendation in its time, in per cent."""

QUOTAS: Final = "quotas.yaml"
SUMMARY: Final = "summary.json"

LIMITS: Final = pa.schema(
    [
        ("entity", pa.string()),
        ("quota", pa.string()),
        ("limit", pa.float64()),
        ("need", pa.float64()),
        ("entities", pa.int64()),
        ("asks", pa.int64()),
        ("held", pa.int64()),
        ("history_ms", pa.int64()),
        ("confidence", pa.string()),
    ]
)
"""A row for each limit of the file; ``held`` of the asks needed more than it."""

OUTLIERS: Final = pa.schema(
    [
        ("entity", pa.string()),
        ("quota", pa.string()),
        ("need", pa.float64()),
        ("typical", pa.float64()),
        ("ids_of_an_ask", pa.float64()),
        ("asks", pa.int64()),
        ("held", pa.int64()),
        ("history_ms", pa.int64()),
    ]
)
"""A row for each outlier and quota key; ``typical`` is the need that its peers let expect."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Recommended limits, with the facts about the log that a reader needs.

    Attributes:
        log: the log's name.
        from_ms, to_ms: the times of the first and the last row of the period.
        found: the limits of each key.
        definitions: the file's quotas, by entity and key.
        what_if: the log, replayed under these quotas.
    """

    log: str
    from_ms: int
    to_ms: int
    basis: Basis
    demands: Demands
    found: Sequence[KeyLimits]
    definitions: Mapping[str, Mapping[str, Definition]]
    what_if: WhatIf

    @property
    def limits(self) -> Iterable[tuple[str, Limit]]:
        """Each limit, with its key: of each key the default first."""
        for each in self.found:
            yield from ((each.quota, limit) for limit in ([each.default] if each.default else []))
            yield from ((each.quota, limit) for limit in each.own)

    @property
    def outliers(self) -> set[str]:
        """The entities that are outliers for any key."""
        return {outlier.entity for each in self.found for outlier in each.outliers}

    @property
    def effects(self) -> tuple[World, World]:
        """The asks of outliers, and of all others, under the recommended quotas."""
        outliers, others = (self.what_if.principals.get(name, Compared()) for name in (APART, ""))
        return outliers.after, others.after


def report(
    runner: Runner,
    progress: Progress,
    arguments: argparse.Namespace,
    defaults: Defaults,
    rules: MatchingRules,
    period: Period,
    tasks: Sequence[LogPart],
    whole: Callable[[], Sequence[LogPart]],
    folder: OutputFolder,
) -> Recommendation:
    """Recommend limits, and write the file, the tables, the page and the summary.

    Args:
        tasks: the row groups of the hours of the period, and of those around it.
        whole: gives all row groups of the log.

    Raises:
        JobError: the log cannot be read, does not reproduce itself, or has nothing to recommend a limit for.
        JobUsageError: the log does not have every decision.
    """
    log = ReplayedLog.of(runner, progress, arguments, period, tasks, whole, OVERVIEW)
    measured = forms(log, arguments.keys, defaults, FORMS)
    with without_collector():
        needed = demands(log.slices(MEASURE), Needs(measured, rules, arguments.max_ids), period.from_ms or 0)
    basis = Basis(quantile_of_a_key(arguments.quantile, needed.by_key), arguments.headroom, arguments.max_ids)
    found = recommended(needed.by_key, {key: DEFAULTS[key] for key in measured}, basis)
    definitions = file_of(found, measured, defaults)
    assumptions = Assumptions(
        from_ms=period.from_ms or 0,
        max_ids=arguments.max_ids,
        is_whole=log.is_whole,
        sequential=arguments.combine_delays == "sequential",
        rules=rules,
        apart=frozenset(outlier.entity for each in found for outlier in each.outliers),
    )
    what_if = log.what_if(resolved(definitions, defaults), assumptions, REPLAY)
    if what_if.reproduction.other:
        raise differences(
            what_if.reproduction, log.missing_batches, log.missing_rows, "no limits were recommended"
        )
    if not found:
        raise JobError(f"{log.name}: no ask in the period {period} uses anything that a quota could limit")
    made = Recommendation(
        log.name,
        log.overview.judged_from_ms or 0,
        log.overview.judged_to_ms or 0,
        basis,
        needed,
        found,
        definitions,
        what_if,
    )
    folder.text(QUOTAS, text.quotas(made))
    folder.text(SUMMARY, json.dumps(summary(made), indent=1))
    for table, rows, schema in (("limits", _limits(made), LIMITS), ("outliers", _outliers(made), OUTLIERS)):
        folder.table(table, pa.Table.from_pylist(list(rows), schema=schema).to_batches(), schema)
    console.write(folder, made.log, made.from_ms, made.to_ms, console_tables(made))
    folder.text("report.html", page.html(made))
    return made


def quantile_of_a_key(quantile: float, keys: Iterable[str]) -> float:
    """The quantile for each key, such that all keys of an ask together hold up no more than one would.

    >>> round(quantile_of_a_key(0.99, ["request_rate", "producer_byte_rate"]), 6)
    0.995
    """
    mine = list(keys)
    of_users = sum(DEFAULTS[key] == "user=*" for key in mine)
    return 1 - (1 - quantile) / max(of_users, len(mine) - of_users, 1)


def file_of(
    found: Sequence[KeyLimits], measured: Quotas, defaults: Defaults
) -> dict[str, dict[str, Definition]]:
    """The quotas of the file, by entity and key."""
    definitions: dict[str, dict[str, Definition]] = {}
    for each in found:
        (form,) = measured[each.quota].values()
        for limit in [*([each.default] if each.default else []), *each.own]:
            entity = Entity.parse(limit.entity)
            by_key = definitions.setdefault(limit.entity, {})
            by_key[each.quota] = definition(form, entity, limit.limit, defaults)
    return definitions


def summary(made: Recommendation) -> dict[str, Any]:
    """The summary for programs."""
    return {
        "entities": len(made.definitions),
        "outliers": len(made.outliers),
        "refused_asks": made.what_if.overall.after.refused,
    }


def _limits(made: Recommendation) -> Iterable[dict[str, Any]]:
    """The rows of ``LIMITS``."""
    for key, limit in made.limits:
        yield limit._asdict() | {"quota": key, "limit": float(limit.limit)}


def _outliers(made: Recommendation) -> Iterable[dict[str, Any]]:
    """The rows of ``OUTLIERS``."""
    for each in made.found:
        for outlier in each.outliers:
            yield outlier._asdict() | {"quota": each.quota}
