"""Runs the job `backfill` in this process, and opens its output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from app.backfill.assertions import AssertionFolder
from app.domain.assertion import Assertion
from workers.jobs.__main__ import Processes
from workers.jobs.backfill.foreign import History, HistoryRules, history_tasks, read
from workers.jobs.backfill.job import run
from workers.jobs.backfill.logged import Log
from workers.jobs.backfill.uses import HistoryColumns
from workers.jobs.command import command_line
from workers.jobs.files import row_groups
from workers.jobs.period import Period, format_instant
from workers.jobs.progress import Silent
from workers.jobs.runner import ProcessRunner

MAX_IDS = 1_000_000
ALL = Period()


def made(out: Path, at_ms: int | None = None, driver: Any = None, **given: Any) -> AssertionFolder:
    """Run the job, by default in this process, and open its output."""
    driver = driver or Processes()
    parsed = command_line(driver).parse_args(["backfill", "--out", str(out)])
    for name, value in given.items():
        setattr(parsed, name, value)
    if at_ms is not None:
        parsed.at = format_instant(at_ms).replace(" UTC", "Z")
    assert run(parsed, driver) == 0
    return AssertionFolder.open(str(out))


def assertions(folder: AssertionFolder) -> list[Assertion]:
    """All assertions of a folder, in the order of their buckets."""
    return sorted((row for part in folder.read() for row in part), key=str)


def of_log(folder: Path, at_ms: int | None = None, period: Period = ALL) -> tuple[list[Assertion], bool]:
    """The assertions of a log in the order of their buckets, and whether they include rates."""
    with ProcessRunner(Silent(), 0) as runner:
        log = Log(str(folder), row_groups(str(folder), period), period)
        states = log.states(runner, at_ms, MAX_IDS)
        return said(states.parts), states.rates


def of_history(history: History, at_ms: int) -> list[Assertion]:
    """The assertions of a history, in the order of their buckets."""
    with ProcessRunner(Silent(), 0) as runner:
        return said(history.states(runner, at_ms, MAX_IDS).parts)


def said(parts: Iterator[Any]) -> list[Assertion]:
    """All assertions, in the order of their buckets."""
    rows = (row for part in parts for row in part.table.to_pylist())
    return sorted((Assertion(**row) for row in rows), key=str)


def uses(url: Path | str, kind: str, columns: HistoryColumns | None = None) -> Sequence[tuple[Any, ...]]:
    """The uses of a history: principal, id and time."""
    columns = columns or HistoryColumns()
    _, tasks = history_tasks(str(url), kind, columns)
    tables = (table for task in tasks for table in read(HistoryRules(columns, ALL, 2), task)[1])
    return [tuple(row.values()) for table in tables for row in table.to_pylist()]
