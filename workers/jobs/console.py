"""The files from which the console draws a report: the period of its log, and the first rows of its tables.

``app/node/reports.py`` reads them. The Parquet files have all rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from workers.jobs.folder import OutputFolder

ABOUT: Final = "report.json"
TABLES: Final = "tables.json"
IN_CONSOLE: Final = 200
"""The most rows of a table that is not a curve; so a report has a few megabytes at most."""

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class ConsoleTable:
    """A table of a report; one that begins with ``at_ms`` is drawn as curves over time.

    Attributes:
        columns: names that end in ``_ms`` are times, and ``at_ms`` is an instant.
        rows: the first rows at least.
        count: the number of all rows; by default the length of ``rows``.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    count: int | None = None

    def document(self) -> dict[str, object]:
        """The table as JSON has it; it has no infinity and no NaN."""
        rows = self.rows if self.columns[0] == "at_ms" else self.rows[:IN_CONSOLE]
        return {
            "name": self.name,
            "title": self.title,
            "columns": list(self.columns),
            "count": len(self.rows) if self.count is None else self.count,
            "rows": [[_finite(cell) for cell in row] for row in rows],
        }


def write(
    folder: OutputFolder, log: str, from_ms: int | None, to_ms: int | None, tables: Iterable[ConsoleTable]
) -> None:
    """Write the files.

    Args:
        log: the log's name.
        from_ms, to_ms: the times of its first and its last row in the period.

    Raises:
        JobError: the files cannot be written.
    """
    folder.text(ABOUT, json.dumps({"log": log, "from_ms": from_ms, "to_ms": to_ms}))
    folder.text(TABLES, json.dumps({"tables": [table.document() for table in tables]}))


def slices(from_ms: int, to_ms: int, slice_ms: int) -> Iterator[int]:
    """The beginnings of the slices of a time, with its end; a curve has a row for each, also without asks.

    >>> list(slices(1_500, 3_000, 1_000))
    [1000, 2000, 3000]
    """
    return islice(range(from_ms - from_ms % slice_ms, to_ms + 1, slice_ms), 1_000)


def _finite(cell: Cell) -> Cell:
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell
