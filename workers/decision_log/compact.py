"""Merging the small files of an hour that is over, so that readers open few, and removing what they held.

A merged file says in its metadata which files it holds. It is in place before one of them is removed, and
they stay a while, for readers that have listed them; until then readers drop the rows that stand twice. So a
merge can end at any moment, and two can be under way, without a row that is lost.
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

from workers.decision_log.fingerprints import secrets_of, with_secrets
from workers.decision_log.folder import ASIDE, ROWS_OF_A_GROUP, Folder
from workers.decision_log.schema import (
    HOUR_MS,
    IDENTITY,
    SCHEMA,
    SUFFIX,
    BadFile,
    as_now,
    blaming,
    columns_of,
    footer,
    partition,
    readable,
    texts_of,
)

MERGED: Final = "merged-"
HOLDS: Final = b"quotagate.holds"
"""Under this key of a merged file's metadata stand the names of the files whose rows it holds, as JSON."""

SETTLED_MS: Final = 5 * 60_000
"""How long after its end an hour is merged: late batches have come by then."""

STAY_S: Final = 600.0
LARGE: Final = 64 * 1024 * 1024

EDGES: Final = pa.schema({"batch": pa.string(), "first": pa.int32(), "last": pa.int32()})

log = structlog.get_logger("quotagate.log")


class Compactor:
    """Merges the hours of a folder.

    Args:
        stay_s: how long files stay beside the merged one that holds them, and half-written ones at all.
        large: bytes from which a file is not small any more, and of what is merged into one.
    """

    def __init__(self, folder: Folder, *, stay_s: float = STAY_S, large: int = LARGE) -> None:
        self._folder = folder
        self._stay_ms = stay_s * 1000
        self._large = large
        self._bad: set[str] = set()
        """What could not be read: said once, and left as it is."""

    def compact(self, now_ms: int, over: Callable[[], bool] = lambda: False) -> int:
        """Merge what can be merged, and remove what is held elsewhere; how many files were merged.

        Args:
            now_ms: the store's time.
            over: says whether to end before it is done.

        Raises:
            OSError: the folder does not take it; what is done is done.
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
                except BadFile as bad:
                    self._say(bad)
                else:
                    merged += len(group)
        return merged

    def _sweep(self, files: Sequence[fs.FileInfo], now_ms: int) -> None:
        """Remove what a writer left half-written when it was killed."""
        for file in files:
            if file.base_name.startswith(ASIDE) and self._stayed(file, now_ms):
                self._folder.remove(file.path)

    def _small(self, files: Sequence[fs.FileInfo], now_ms: int) -> list[fs.FileInfo]:
        """The small files that no merged one holds, after those are removed that have stayed long enough."""
        whole = [file for file in files if readable(file.base_name)]
        if len(whole) < 2:
            return []
        held: set[str] = set()
        known: set[str] = set()
        for file in whole:
            if file.base_name.startswith(MERGED) and (names := self._holds(file)) is not None:
                known.add(file.base_name)
                held |= names
                for source in whole:
                    if source.base_name in names and self._stayed(file, now_ms):
                        self._folder.remove(source.path)
        return [
            file
            for file in whole
            if file.base_name not in held
            and file.size < self._large
            and (file.base_name in known or self._holds(file) is not None)
        ]

    def _groups(self, files: Sequence[fs.FileInfo]) -> Iterator[list[fs.FileInfo]]:
        """Files that together make a large one, two or more."""
        group: list[fs.FileInfo] = []
        for file in files:
            group.append(file)
            if len(group) > 1 and sum(each.size for each in group) >= self._large:
                yield group
                group = []
        if len(group) > 1:
            yield group

    def _holds(self, file: fs.FileInfo) -> set[str] | None:
        """Which files it holds; None if it is gone, or none of ours: then it stays as it is."""
        if file.path in self._bad:
            return None
        try:
            return held_by(file.path, footer(file.path, self._folder.filesystem))
        except FileNotFoundError:
            return None
        except BadFile as bad:
            self._say(bad)
            return None

    def _say(self, bad: BadFile) -> None:
        self._bad.add(bad.path)
        log.warning("a file of the decision log is left as it is", why=self._folder.told(bad))

    def _stayed(self, file: fs.FileInfo, now_ms: int) -> bool:
        return file.mtime is not None and file.mtime.timestamp() * 1000 <= now_ms - self._stay_ms


def held_by(path: str, said: pq.FileMetaData) -> set[str]:
    """The names of the files whose rows a file holds, none but for a merged one.

    Raises:
        BadFile: what it says are no names.
    """
    return set(texts_of(path, said.metadata, HOLDS, "the names of files"))


def merge(folder: Folder, inside: str, files: Sequence[fs.FileInfo]) -> None:
    """Put a file in place with the rows of several, and none twice that the writer wrote twice.

    Raises:
        BadFile: one cannot be read; nothing is in place then.
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
    """The rows of earlier files: of each batch its first to last place, if none is missing between.

    So the writer leaves a batch. Of others nothing is known, and their rows are kept: a row that stands twice
    is one to every reader, but one that is left out is lost.
    """

    def __init__(self) -> None:
        self._known = EDGES.empty_table()

    def fresh(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows that are not known."""
        at = compute.index_in(rows["batch"], value_set=self._known["batch"].combine_chunks())
        first, last = (self._known[edge].combine_chunks().take(at) for edge in ("first", "last"))
        place = rows["place"]
        known = compute.and_(compute.greater_equal(place, first), compute.less_equal(place, last))
        return rows.filter(compute.invert(compute.fill_null(known, False)))

    def add(self, rows: Sequence[pa.RecordBatch]) -> None:
        """Know the rows of one file."""
        if not rows:
            return
        by_batch = pa.Table.from_batches(rows).group_by("batch")
        found = by_batch.aggregate([("place", "min"), ("place", "max"), ("place", "count_distinct")])
        span = compute.add(compute.subtract(found["place_max"], found["place_min"]), 1)
        whole = found.filter(compute.equal(span, found["place_count_distinct"]))
        edges = whole.select(["batch", "place_min", "place_max"]).rename_columns(EDGES.names)
        self._known = pa.concat_tables([self._known, edges.cast(EDGES)])


def _rows(folder: Folder, path: str) -> Iterator[pa.RecordBatch]:
    """The rows of a file, some at a time, in our columns alone."""
    with blaming(path), pq.ParquetFile(path, filesystem=folder.filesystem) as file:
        for rows in file.iter_batches(ROWS_OF_A_GROUP, columns=columns_of(file.schema_arrow)):
            yield from as_now(rows).to_batches()
