"""Writes batches to one file per hour; sets unreadable batches aside for a newer writer."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Final

import pyarrow as pa
import structlog

from app.decision_log.batch import Batch
from app.decision_log.stream import StreamEntry
from workers.decision_log.folder import ASIDE, Folder
from workers.decision_log.rows import UnreadableError, decode, table
from workers.decision_log.schema import HOUR_MS, SUFFIX, partition, with_secrets

UNREADABLE: Final = "_unreadable"
"""The folder for batches that could not be read, as the nodes sent them."""

BATCH: Final = ".batch"

ROWS_AT_ONCE: Final = 8_192

log = structlog.get_logger("quotagate.log")


class Flush:
    """Entries of the stream, converted to files once.

    If writing fails, the next call continues with the same file names.

    Args:
        name: a unique name for its files.

    Attributes:
        done: for each entry its id, how many of its rows were written, and how many could not be read.
    """

    def __init__(self, entries: Sequence[StreamEntry], name: str) -> None:
        self.entries = entries
        self.done: list[tuple[bytes, int, int]] = []
        self._name = name
        self._left: list[tuple[str, str, pa.Table | bytes]] | None = None

    def write(self, folder: Folder) -> None:
        """Write the files that were not written yet.

        Raises:
            OSError: the folder cannot be written; the next call continues.
        """
        if self._left is None:
            self._left = list(self._files())
        while self._left:
            folder.put(*self._left[-1])
            self._left.pop()

    def _files(self) -> Iterator[tuple[str, str, pa.Table | bytes]]:
        """Folder, name and content of each file."""
        tables = []
        unreadable: list[tuple[StreamEntry, UnreadableError]] = []
        made_by: set[str] = set()
        self.done = []
        for entries in _some(self.entries):
            found, rows = _read(entries)
            tables.append(rows)
            made_by |= {batch.secret for _, batch in found if isinstance(batch, Batch) and batch.secret}
            unreadable += [(entry, why) for entry, why in found if isinstance(why, UnreadableError)]
            self.done += [
                (entry.id, len(batch.rows), 0) if isinstance(batch, Batch) else (entry.id, 0, entry.rows)
                for entry, batch in found
            ]
        for inside, part in by_hour(pa.concat_tables(tables)):
            schema = with_secrets(part.schema, made_by)
            yield inside, f"{self._name}{SUFFIX}", part.replace_schema_metadata(schema.metadata)
        for entry, _ in unreadable:
            if entry.packed:  # else somebody removed it from the stream, so there is nothing to keep
                yield UNREADABLE, f"{entry.id.decode()}{BATCH}", entry.packed
        if unreadable:
            first, why = unreadable[0]
            log.warning(
                "batches cannot be read and are kept aside",
                batches=len(unreadable),
                folder=UNREADABLE,
                first=first.id.decode(),
                why=str(why),
            )


def _some(entries: Sequence[StreamEntry]) -> Iterator[list[StreamEntry]]:
    """Split entries into lots: as Python objects, rows take three times the memory of columns."""
    some: list[StreamEntry] = []
    rows = 0
    for entry in entries:
        some.append(entry)
        rows += max(entry.rows, 1)
        if rows >= ROWS_AT_ONCE:
            yield some
            some, rows = [], 0
    if some:
        yield some


def _read(
    entries: Sequence[StreamEntry],
) -> tuple[list[tuple[StreamEntry, Batch | UnreadableError]], pa.Table]:
    """Return each entry with its batch, or why it cannot be read; and the rows of all readable batches."""
    found = [(entry, _decoded(entry)) for entry in entries]
    try:
        return found, table([batch for _, batch in found if isinstance(batch, Batch)])
    except UnreadableError:  # a batch has a value that does not fit its column
        found = [(entry, _alone(batch)) for entry, batch in found]
        return found, table([batch for _, batch in found if isinstance(batch, Batch)])


def _decoded(entry: StreamEntry) -> Batch | UnreadableError:
    if not entry.packed:
        return UnreadableError("somebody removed it from the stream before it was written")
    try:
        return decode(entry.packed)
    except UnreadableError as why:
        return why


def _alone(batch: Batch | UnreadableError) -> Batch | UnreadableError:
    """Decode a batch, and check that its rows fit the columns."""
    if isinstance(batch, UnreadableError):
        return batch
    try:
        table([batch])
    except UnreadableError as why:
        return why
    return batch


def by_hour(rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """The rows of each hour, in order, with the partition of the hour."""
    if not rows.num_rows:
        return
    times = rows["at_ms"].to_pylist()
    where = {hour: partition(hour * HOUR_MS) for hour in {at_ms // HOUR_MS for at_ms in times}}
    if len(where) == 1:
        yield from ((inside, rows) for inside in where.values())
        return
    places: dict[str, list[int]] = {}
    for place, at_ms in enumerate(times):
        places.setdefault(where[at_ms // HOUR_MS], []).append(place)
    for inside, found in sorted(places.items()):
        yield inside, rows.take(pa.array(found, pa.int32()))


def take_up(folder: Folder) -> int:
    """Write the batches that an older writer set aside and that can be read now; return how many.

    Raises:
        OSError: the folder cannot be written; the next call continues.
    """
    taken = 0
    for file in folder.files(UNREADABLE):
        if file.base_name.startswith(ASIDE):
            continue  # an unfinished copy: the stream still has the batch
        id_ = PurePosixPath(file.base_name).stem
        entry = StreamEntry(id_.encode(), folder.read(file.path), 0)
        if isinstance(_alone(_decoded(entry)), Batch):
            Flush([entry], f"{id_}-{secrets.token_hex(4)}").write(folder)
            folder.remove(file.path)
            taken += 1
    return taken
