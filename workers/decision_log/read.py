"""Reads the decision log as one table, for Python: each row once, from files of all supported versions."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pyarrow as pa
from pyarrow import compute, fs
from pyarrow import parquet as pq

from workers.decision_log.folder import Folder
from workers.decision_log.schema import (
    HOUR_MS,
    IDENTITY,
    SCHEMA,
    as_now,
    blaming,
    columns_of,
    footer,
    hour_of,
)

TRIES: Final = 3
"""How often the files are listed: a merge may remove files while they are read."""


def read(url: str | Path, *, since_ms: int | None = None, until_ms: int | None = None) -> pa.Table:
    """The rows of a period, or all.

    Args:
        url: the URL of the log.
        since_ms, until_ms: the period, excluding its end.

    Raises:
        BadFileError: a file is corrupt, of another version, or lacks a column.
        OSError: the folder cannot be read.
    """
    folder = Folder(url)
    for attempt in range(TRIES):
        try:
            tables = [_table(folder, file) for file in folder.rows() if _within(file, since_ms, until_ms)]
        except FileNotFoundError:
            if attempt == TRIES - 1:
                raise
        else:
            break
    rows = distinct(pa.concat_tables([SCHEMA.empty_table(), *tables]))
    if since_ms is not None:
        rows = rows.filter(compute.greater_equal(rows["at_ms"], since_ms))
    if until_ms is not None:
        rows = rows.filter(compute.less(rows["at_ms"], until_ms))
    return rows


def distinct(rows: pa.Table) -> pa.Table:
    """Each row once, in the order of first occurrence."""
    numbered = rows.select(IDENTITY).append_column("at", pa.array(range(rows.num_rows), pa.int64()))
    first = numbered.group_by(list(IDENTITY)).aggregate([("at", "min")])["at_min"]
    return rows if len(first) == rows.num_rows else rows.take(first.sort())


def _within(file: fs.FileInfo, since_ms: int | None, until_ms: int | None) -> bool:
    hour = hour_of(file.path)
    assert hour is not None
    return (since_ms is None or hour + HOUR_MS > since_ms) and (until_ms is None or hour < until_ms)


def _table(folder: Folder, file: fs.FileInfo) -> pa.Table:
    columns = columns_of(footer(file.path, folder.filesystem).schema.to_arrow_schema())
    with blaming(file.path):
        return as_now(
            pq.read_table(file.path, filesystem=folder.filesystem, columns=columns, partitioning=None)
        )
