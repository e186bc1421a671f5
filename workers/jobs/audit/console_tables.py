"""The tables of an audit for the console."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from app.domain.decision import OUTCOMES
from workers.jobs.audit.page import COUNTS, PRINCIPAL_COUNTS
from workers.jobs.console import Cell, ConsoleTable, slices


def console_tables(report: Mapping[str, Any]) -> Iterator[ConsoleTable]:
    """The tables that the page has, from its values."""
    yield ConsoleTable("decisions_over_time", "Decisions over time", ("at_ms", *OUTCOMES), _over_time(report))
    total = report["overall"]
    if report["failed"]:
        title = "Principals for which a bound did not hold"
        yield _principals("failed", title, report["failed"], total["failed"])
    if report["cases"]:
        columns: Sequence[str] = ("case", "at_ms", "principal", "quota", "bucket", "logged", "exact")
        yield ConsoleTable("cases", "Cases", columns, _rows(report["cases"], columns), report["cases_count"])
    yield _principals("largest", "Principals with most decisions", report["largest"], total["principals"])
    bounded = ("quota", "bucket", "worst", "bound")
    title = "Admitted at most in a window, as a ratio to the limit, with the stated bound: nearest first"
    yield ConsoleTable("nearest", title, bounded, _rows(report["nearest"], bounded))
    counts = [(label, total[name]) for name, label in COUNTS]
    yield ConsoleTable("totals", "Totals", ("counted", "count"), counts)
    if report["lacking"]:
        columns = ("node", "first", "last", "missing")
        yield ConsoleTable("lacking", "Batches that are missing from the log", columns, report["lacking"])


def _over_time(report: Mapping[str, Any]) -> list[Sequence[Cell]]:
    """A row for each slice, even for those without asks."""
    found = {one["from_ms"]: one for one in report["over_time"]}
    if not found:
        return []
    return [
        (at_ms, *(found.get(at_ms, {}).get(name, 0) for name in OUTCOMES))
        for at_ms in slices(min(found), max(found), report["slice_ms"])
    ]


def _principals(name: str, title: str, rows: Sequence[Mapping[str, Any]], count: int) -> ConsoleTable:
    columns = ("principal", "findings", *PRINCIPAL_COUNTS)
    found = [
        (row["principal"], "; ".join(row["not_held"]), *(row[name] for name in PRINCIPAL_COUNTS))
        for row in rows
    ]
    return ConsoleTable(name, title, columns, found, count)


def _rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[Sequence[Cell]]:
    return [[row[name] for name in columns] for row in rows]
