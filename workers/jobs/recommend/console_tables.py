"""The tables of a recommendation for the console."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from workers.jobs.console import ConsoleTable
from workers.jobs.recommend import text

if TYPE_CHECKING:
    from workers.jobs.recommend.report import Recommendation


def console_tables(made: Recommendation) -> Iterator[ConsoleTable]:
    """The tables that the page has."""
    lines = [(line,) for line in (text.basis(made), *text.effects(made), *text.notes(made))]
    yield ConsoleTable("notes", "Basis and effects", ("note",), lines)
    outliers = [
        (one.entity, each.quota, one.need, one.typical, one.ids_of_an_ask, one.asks, one.held)
        for each in made.found
        for one in each.outliers
    ]
    if outliers:
        columns: Sequence[str] = (
            "entity",
            "quota",
            "need",
            "need_of_peers",
            "new_ids_of_an_ask",
            "asks",
            "held",
        )
        yield ConsoleTable("outliers", "Outliers, which get no limit of their own", columns, outliers)
    columns = ("entity", "quota", "limit", "need", "entities", "asks", "held", "history_ms", "confidence")
    limits = [
        (
            *(limit.entity, key, float(limit.limit), limit.need, limit.entities),
            *(limit.asks, limit.held, limit.history_ms, limit.confidence),
        )
        for key, limit in made.limits
    ]
    yield ConsoleTable("limits", "Limits, which are in quotas.yaml", columns, limits)
