"""Merges the small files of past hours, so that readers open few, and removes the sources.

The metadata of a merged file lists its sources. These are removed a while after the merge, because readers
may have listed them; meanwhile readers drop the duplicate rows. So no row is lost if a merge is cut short, or
if two run at once.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import pyarrow as pa
import structlog
from pyarrow import compute, fs
from pyarrow import parquet as pq

from workers.decision_log.folder import ASIDE, ROWS_OF_A_GROUP, Folder
from workers.decision_log.schema import (
    HOLDS,
    HOUR_MS,
    IDENTITY,
    MERGED,
    SCHEMA,
    SUFFIX,
    BadFileError,
    as_now,
    blaming,
    columns_of,
    footer,
    held_by,
    partition,
    readable,
    secrets_of,
    with_secrets,
)

SETTLED_MS: Final = 5 * 60_000
"""How long after its end an hour is merged, so that late batches are in."""

STAY_S: Final = 600.0
LARGE: Final = 64 * 1024 * 1024

EDGES: Final = pa.schema({"batch": pa.string(), "first": pa.int32(), "last": pa.int32()})

log = structlog.get_logger("quotagate.log")


class Compactor:
    """Merges the files of each hour of a folder.

    Args:
        stay_s: how long files stay after they were merged, and half-written ones after their last write.
        large: the size in bytes that merged files aim at; a file of this size is not merged again.
    """

    def __init__(self, folder: Folder, *, stay_s: float = STAY_S, large: int = LARGE) -> None:
        self._folder = folder
        self._stay_ms = stay_s * 1000
        self._large = large
        self._bad: set[str] = set()
        """Unreadable files: each is logged once, and not merged."""

    def compact(self, now_ms: int, over: Callable[[], bool] = lambda: False) -> int:
        """Merge files, and remove those that were merged earlier; return how many were merged.

        Args:
            now_ms: the store's time.
            over: returns whether to stop early.

        Raises:
            OSError: the folder cannot be written; the merges made so far stay.
        """
        merged = 0
        for hour, files in sorted(self._folder.hours().items()):
            self._sweep(files, now_ms)
            if hour + HOUR_MS + SETTLED_MS > now_ms:
                continue
            for group in self._groups(self._small(files, now_ms)):
                if over():
                    return merged
                try:
                    merge(self._folder, partition(hour), group)
                except BadFileError as bad:
                    self._say(bad)
                else:
                    merged += len(group)
        return merged

    def _sweep(self, files: Sequence[fs.FileInfo], now_ms: int) -> None:
        """Remove the half-written files of a writer that was killed."""
        for file in files:
            if file.base_name.startswith(ASIDE) and self._stayed(file, now_ms):
                self._folder.remove(file.path)

    def _small(self, files: Sequence[fs.FileInfo], now_ms: int) -> list[fs.FileInfo]:
        """Return the small files not merged yet; also remove files that were merged long enough ago."""
        whole = [file for file in files if readable(file.base_name)]
        if len(whole) < 2:
            return []
        merged_names: set[str] = set()
        known: set[str] = set()
        for file in whole:
            if file.base_name.startswith(MERGED) and (names := self._holds(file)) is not None:
                known.add(file.base_name)
                merged_names |= names
                for source in whole:
                    if source.base_name in names and self._stayed(file, now_ms):
                        self._folder.remove(source.path)
        return [
            file
            for file in whole
            if file.base_name not in merged_names
            and file.size < self._large
            and (file.base_name in known or self._holds(file) is not None)
        ]

    def _groups(self, files: Sequence[fs.FileInfo]) -> Iterator[list[fs.FileInfo]]:
        """Yield groups of two or more files that together make a large one."""
        group: list[fs.FileInfo] = []
        for file in files:
            group.append(file)
            if len(group) > 1 and sum(each.size for each in group) >= self._large:
                yield group
                group = []
        if len(group) > 1:
            yield group

    def _holds(self, file: fs.FileInfo) -> set[str] | None:
        """The names of a file's sources; None if the file is gone, or is no file of the log."""
        if file.path in self._bad:
            return None
        try:
            return held_by(file.path, footer(file.path, self._folder.filesystem))
        except FileNotFoundError:
            return None
        except BadFileError as bad:
            self._say(bad)
            return None

    def _say(self, bad: BadFileError) -> None:
        self._bad.add(bad.path)
        log.warning("a file of the decision log is left as it is", why=self._folder.redact(bad))

    def _stayed(self, file: fs.FileInfo, now_ms: int) -> bool:
        return file.mtime is not None and file.mtime.timestamp() * 1000 <= now_ms - self._stay_ms


def merge(folder: Folder, inside: str, files: Sequence[fs.FileInfo]) -> None:
    """Write one file with the rows of several; rows that the writer wrote twice are in it once.

    Raises:
        BadFileError: a file cannot be read; nothing was written.
    """
    holds = json.dumps([file.base_name for file in files]).encode()
    made_by = frozenset[str]().union(
        *(secrets_of(file.path, footer(file.path, folder.filesystem).metadata) for file in files)
    )
    schema = with_secrets(SCHEMA.with_metadata({**SCHEMA.metadata, HOLDS: holds}), made_by)
    first = files[0].base_name.removeprefix(MERGED).removesuffix(SUFFIX).partition("-")[0]
    name = f"{MERGED}{first}-{secrets.token_hex(4)}{SUFFIX}"
    taken = _Taken()
    gathered: list[pa.RecordBatch] = []
    with folder.parquet(inside, name, schema) as writer:
        for file in files:
            found: list[pa.RecordBatch] = []
            for rows in _rows(folder, file.path):
                fresh = taken.fresh(rows)
                found.append(fresh.select(IDENTITY))
                gathered.append(fresh.replace_schema_metadata(schema.metadata))
                if sum(each.num_rows for each in gathered) >= ROWS_OF_A_GROUP:
                    writer.write_table(pa.Table.from_batches(gathered))
                    gathered = []
            taken.add(found)
        writer.write_table(pa.Table.from_batches(gathered, schema))


class _Taken:
    """The rows of earlier files: for each batch its first and last place, if all places in between are there.

    Batches from the writer have no gaps. All rows of a batch with gaps are kept: readers drop a duplicate
    row, but an omitted row is lost.
    """

    def __init__(self) -> None:
        self._known = EDGES.empty_table()

    def fresh(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows that earlier files do not have."""
        at = compute.index_in(rows["batch"], value_set=self._known["batch"].combine_chunks())
        first, last = (self._known[edge].combine_chunks().take(at) for edge in ("first", "last"))
        place = rows["place"]
        known = compute.and_(compute.greater_equal(place, first), compute.less_equal(place, last))
        return rows.filter(compute.invert(compute.fill_null(known, False)))

    def add(self, rows: Sequence[pa.RecordBatch]) -> None:
        """Add the rows of one file."""
        if not rows:
            return
        by_batch = pa.Table.from_batches(rows).group_by("batch")
        found = by_batch.aggregate([("place", "min"), ("place", "max"), ("place", "count_distinct")])
        span = compute.add(compute.subtract(found["place_max"], found["place_min"]), 1)
        whole = found.filter(compute.equal(span, found["place_count_distinct"]))
        edges = whole.select(["batch", "place_min", "place_max"]).rename_columns(EDGES.names)
        self._known = pa.concat_tables([self._known, edges.cast(EDGES)])


def _rows(folder: Folder, path: str) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file in parts, with only the columns of the log."""
    with blaming(path), pq.ParquetFile(path, filesystem=folder.filesystem) as file:
        for rows in file.iter_batches(ROWS_OF_A_GROUP, columns=columns_of(file.schema_arrow)):
            yield from as_now(rows).to_batches()
