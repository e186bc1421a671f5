"""Batches on their way into files, one file for each hour, and aside those that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa
import structlog

from app.store.decision_log import Batch
from workers.decision_log.fingerprints import with_secrets
from workers.decision_log.folder import Folder
from workers.decision_log.rows import Unreadable, decode, table
from workers.decision_log.schema import HOUR_MS, SUFFIX, partition
from workers.decision_log.stream import Entry

UNREADABLE: Final = "_unreadable"
"""The folder beside the rows with the batches that could not be read, as the nodes left them."""

BATCH: Final = ".batch"

ROWS_AT_ONCE: Final = 8_192

log = structlog.get_logger("quotagate.log")


class Flush:
    """Some entries, made into files once; when writing fails it goes on later, with the same names.

    Args:
        name: of its files, and of no others.

    Attributes:
        done: of each entry its id, the rows written and the rows unreadable.
    """

    def __init__(self, entries: Sequence[Entry], name: str) -> None:
        self.entries = entries
        self.done: list[tuple[bytes, int, int]] = []
        self._name = name
        self._left: list[tuple[str, str, pa.Table | bytes]] | None = None

    def write(self, folder: Folder) -> None:
        """Put into place what is not in place yet.

        Raises:
            OSError: the folder does not take it; the next call goes on.
        """
        if self._left is None:
            self._left = list(self._files())
        while self._left:
            folder.put(*self._left[-1])
            self._left.pop()

    def _files(self) -> Iterator[tuple[str, str, pa.Table | bytes]]:
        """Folder, name and content of each file."""
        tables = []
        unreadable: list[tuple[Entry, Unreadable]] = []
        secrets: set[str] = set()
        self.done = []
        for entries in _some(self.entries):
            found, rows = _read(entries)
            tables.append(rows)
            secrets |= {batch.secret for _, batch in found if isinstance(batch, Batch) and batch.secret}
            unreadable += [(entry, why) for entry, why in found if isinstance(why, Unreadable)]
            self.done += [
                (entry.id, len(batch.rows), 0) if isinstance(batch, Batch) else (entry.id, 0, entry.rows)
                for entry, batch in found
            ]
        for inside, part in by_hour(pa.concat_tables(tables)):
            made_by = with_secrets(part.schema, secrets)
            yield inside, f"{self._name}{SUFFIX}", part.replace_schema_metadata(made_by.metadata)
        for entry, _ in unreadable:
            if entry.packed:  # else somebody removed it from the stream, and there is nothing to keep
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


def _some(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Entries of a bounded number of rows: as Python's objects they take three times what columns do."""
    some: list[Entry] = []
    rows = 0
    for entry in entries:
        some.append(entry)
        rows += max(entry.rows, 1)
        if rows >= ROWS_AT_ONCE:
            yield some
            some, rows = [], 0
    if some:
        yield some


def _read(entries: Sequence[Entry]) -> tuple[list[tuple[Entry, Batch | Unreadable]], pa.Table]:
    """Each entry with its batch or why it cannot be read, and the rows of those that can."""
    found = [(entry, _decoded(entry)) for entry in entries]
    try:
        return found, table([batch for _, batch in found if isinstance(batch, Batch)])
    except Unreadable:  # one of them has what no column takes
        found = [(entry, _alone(batch)) for entry, batch in found]
        return found, table([batch for _, batch in found if isinstance(batch, Batch)])


def read(entry: Entry) -> Batch | Unreadable:
    """The batch of an entry, if its rows fit into columns, or why it cannot be read."""
    return _alone(_decoded(entry))


def _decoded(entry: Entry) -> Batch | Unreadable:
    if not entry.packed:
        return Unreadable("somebody removed it from the stream before it was written")
    try:
        return decode(entry.packed)
    except Unreadable as why:
        return why


def _alone(batch: Batch | Unreadable) -> Batch | Unreadable:
    """A batch, if its rows fit into columns."""
    if isinstance(batch, Unreadable):
        return batch
    try:
        table([batch])
    except Unreadable as why:
        return why
    return batch


def by_hour(rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """The rows of each hour, in order, and where they belong."""
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
