"""The files of the decision log, each checked before anything is computed, and read by row groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs
from pyarrow import parquet as pq

from app.storage_location import InvalidLocationError, StorageLocation
from workers.decision_log.schema import (
    SCHEMA,
    SECRETS_KEY,
    VERDICT,
    BadFileError,
    blaming,
    columns_of,
    footer,
    held_by,
    hour_of,
    partition,
    readable,
    secrets_of,
)
from workers.jobs.errors import JobError
from workers.jobs.period import END_MS, Period, format_instant

READERS: Final = 16
"""How many footers are read at a time: on an object store each is a round trip."""

RETRIES: Final = 3
"""How often the files are listed, as the writer may merge or remove some in the meantime."""

SHOWN_LETTERS: Final = 12
"""How many letters of a fingerprint a message shows."""

TASKS: Final = 128
FEWEST_ROWS: Final = 60_000
MOST_ROWS: Final = 500_000
"""The usual number of tasks for a log, and the bounds of a task's rows: enough to make its start cheap, and
few enough that its verdicts fit in memory."""

FooterCheck = Callable[[str, pq.FileMetaData], None]
"""Checks a file by its name and footer; raises JobError or BadFileError."""

NEEDED: Final = {field.name: not field.nullable for field in VERDICT}
TEXTS: Final = tuple(field.name for field in SCHEMA if pa.types.is_string(field.type))
"""The columns that are read as dictionaries: their values repeat."""


class LogPart(Protocol):
    """A part of a log that one task reads.

    Attributes:
        rows: how many rows it has, about.
    """

    @property
    def rows(self) -> int: ...

    def tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """The rows of this part, in several tables; texts are dictionaries.

        Raises:
            JobError: it cannot be read.
        """


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Row groups that one task reads, in the order of time.

    Attributes:
        files: paths, each with the numbers of row groups.
        rows: how many rows they have.
    """

    url: str
    files: tuple[tuple[str, tuple[int, ...]], ...]
    rows: int

    def tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Each row group, without columns that the file's version lacks; texts are dictionaries.

        Raises:
            JobError: a file cannot be read, or has invalid values.
        """
        location = location_of(self.url)
        for path, groups in self.files:
            try:
                yield from _read(location.open()[0], path, groups, columns)
            except FileNotFoundError:
                raise JobError(f"{path}: was merged or removed meanwhile; start the job again") from None
            except (BadFileError, OSError) as error:
                raise JobError(location.redact(error)) from None


def _read(
    filesystem: fs.FileSystem, path: str, groups: Sequence[int], columns: Sequence[str]
) -> Iterator[pa.Table]:
    with (
        blaming(path),
        pq.ParquetFile(path, filesystem=filesystem, read_dictionary=list(TEXTS)) as file,
    ):
        held = [name for name in columns if name in columns_of(file.schema_arrow)]
        for group in groups:
            table = file.read_row_group(group, columns=held, use_threads=False)
            check_values(path, table)
            yield table


def check_values(path: str, table: pa.Table) -> None:
    """Refuse rows without a value that each row has, with an invalid text, or with a time beyond all years.

    Raises:
        BadFileError: names the file and the column.
    """
    table.validate(full=True)
    for field in SCHEMA:
        if field.name not in table.schema.names:
            continue
        column = table.column(field.name)
        if column.null_count and not field.nullable:
            raise BadFileError(path, f"column {field.name}: is null in a row")
        if field.name == "verdicts":
            for verdicts in (chunk.flatten() for chunk in column.chunks):
                for inner in verdicts.type:
                    if NEEDED.get(inner.name) and verdicts.field(inner.name).null_count:
                        raise BadFileError(path, f"column verdicts.{inner.name}: is null in a row")
        elif field.name == "at_ms" and column.length():
            first, last = (end.as_py() for end in pc.min_max(column).values())
            if not 0 <= first <= last < END_MS:
                raise BadFileError(path, f"column at_ms: has {first} to {last}, which are no times")


class Fingerprints:
    """Checks the secret of each file of a log.

    Attributes:
        known: the fingerprint that all files must have: the deployment's, else the first one found in a file.
            None until then.
    """

    def __init__(self, known: str | None) -> None:
        self.known = known
        self._owner = "this deployment"

    def check(self, file: str, footer: pq.FileMetaData) -> None:
        """Check one file. Files of older writers name no secret, and pass.

        Raises:
            JobError: the file names another secret.
            BadFileError: the file's fingerprints cannot be read.
        """
        for fingerprint in sorted(secrets_of(file, footer.metadata)):
            if self.known is None:
                self.known, self._owner = fingerprint, file
            elif fingerprint != self.known:
                raise JobError(
                    f"{file}: metadata {SECRETS_KEY.decode()}: its ids were hashed with another secret"
                    f" ({fingerprint[:SHOWN_LETTERS]}) than that of {self._owner}"
                    f" ({self.known[:SHOWN_LETTERS]}), so they would match no id there; leave"
                    " this file out with --from or --at, or set QUOTAGATE_HASH_SECRET to its secret"
                )


def log_files(url: str) -> dict[str, int]:
    """The sizes in bytes of all files of a log, by their paths.

    Raises:
        JobError: the log cannot be listed.
    """
    filesystem, root = opened(location_of(url))
    files, _ = _list_files(filesystem, root, Period())
    return {entry.path: entry.size or 0 for entry in filesystem.get_file_info(files)}


def opened(location: StorageLocation) -> tuple[fs.FileSystem, str]:
    """The filesystem of a location, and the path in it.

    Raises:
        JobError: it can never be reached, or cannot be now.
    """
    try:
        return location.open()
    except (InvalidLocationError, OSError) as error:
        raise JobError(f"{location.name}: {location.redact(error)}") from None


def row_groups(
    url: str, period: Period, check: FooterCheck | None = None, only: Sequence[str] | None = None
) -> list[RowGroups]:
    """The row groups of the hours of a period, in the order of time, after each file was checked.

    Args:
        check: called with each file's footer.
        only: the paths of the files to read; by default all.

    Raises:
        JobError: there are no rows, or a file is invalid; the message names the file and the field.
    """
    location = location_of(url)
    name = location.name
    filesystem, root = opened(location)
    for attempt in range(RETRIES):
        files, hours = _list_files(filesystem, root, period) if only is None else (sorted(only), [])
        found: list[tuple[str, int, int]] = []
        holds: dict[str, set[str]] = {}
        try:
            with ThreadPoolExecutor(READERS) as pool:
                footers = pool.map(lambda file: footer(file, filesystem), files)
                for file, about in zip(files, footers, strict=True):
                    _check_hour(file, about)
                    holds[file] = held_by(file, about)
                    if check is not None:
                        check(file, about)
                    rows = (about.row_group(group).num_rows for group in range(about.num_row_groups))
                    found += [(file, group, count) for group, count in enumerate(rows) if count]
        except FileNotFoundError as error:
            if attempt == RETRIES - 1:
                raise JobError(f"{name}: files vanish while they are read: {error}") from None
            continue
        except BadFileError as error:
            raise JobError(str(error)) from None
        if not found and only is None:
            raise JobError(_no_rows(name, hours))
        sources = _sources(holds)
        return _tasks(url, [group for group in found if group[0] not in sources])
    raise AssertionError("the last attempt returns or raises")


def _sources(holds: Mapping[str, Collection[str]]) -> set[str]:
    """The files whose rows are in a merged file too: they stay for a while, as readers may have listed them.

    Args:
        holds: of each file, the names of those that it was merged from.
    """
    of = {file: {f"{file.rpartition('/')[0]}/{name}" for name in names} for file, names in holds.items()}
    named = set[str]().union(*of.values())
    left = [file for file in of if file not in named]  # the merged file of each row is one of these
    sources: set[str] = set()
    while left:
        fresh = of.get(left.pop(), set()) - sources
        sources |= fresh
        left += fresh
    return sources


def _tasks(url: str, groups: Sequence[tuple[str, int, int]]) -> list[RowGroups]:
    """Tasks of about equal size for row groups: path, number and rows of each.

    A large log has larger tasks, not more, since each task has a part of each partition.
    """
    total = sum(rows for _, _, rows in groups)
    enough = min(max(total // TASKS, FEWEST_ROWS), MOST_ROWS)
    tasks: list[RowGroups] = []
    files: dict[str, list[int]] = {}
    gathered = 0
    for path, group, rows in groups:
        files.setdefault(path, []).append(group)
        gathered += rows
        if gathered >= enough or (path, group) == groups[-1][:2]:
            chosen = tuple((file, tuple(numbers)) for file, numbers in files.items())
            tasks.append(RowGroups(url, chosen, gathered))
            files, gathered = {}, 0
    return tasks


def _check_hour(file: str, about: pq.FileMetaData) -> None:
    """Refuse a file with times outside its folder's hour: reading a period would miss those rows."""
    column = about.schema.names.index("at_ms")
    for group in range(about.num_row_groups):
        times = about.row_group(group).column(column).statistics
        if times is None or not times.has_min_max:
            continue
        for at_ms in (times.min, times.max):
            if partition(at_ms) not in file:
                raise JobError(f"{file}: column at_ms: has {at_ms}, which belongs in {partition(at_ms)}")


def _list_files(filesystem: fs.FileSystem, root: str, period: Period) -> tuple[list[str], list[int]]:
    """The files of a period, chosen by the names of their folders; and all hours of the log."""
    try:
        everything = fs.FileSelector(root, recursive=True, allow_not_found=True)
        entries = filesystem.get_file_info(everything)
    except (OSError, pa.ArrowException) as error:
        raise JobError(f"{root}: cannot be listed: {' '.join(str(error).split())}") from None
    hours = {
        entry.path: hour
        for entry in entries
        if entry.type == fs.FileType.File
        and readable(entry.base_name)
        and (hour := hour_of(entry.path)) is not None
    }
    files = sorted(path for path, hour in hours.items() if period.overlaps_hour(hour))
    return files, sorted(set(hours.values()))


def _no_rows(name: str, hours: Sequence[int]) -> str:
    if not hours:
        return (
            f"{name}: has no decision log: no file such as date=2026-11-21/hour=10/....parquet; rows are "
            "written within five seconds"
        )
    first, last = (format_instant(hour)[:13] for hour in (hours[0], hours[-1]))
    return f"{name}: no row in the period; the log has hours {first} to {last} UTC"


def location_of(url: str) -> StorageLocation:
    """The location of a log.

    Raises:
        JobError: the URL is invalid; the message shows only its scheme, as the rest may contain secrets.
    """
    try:
        return StorageLocation(url)
    except InvalidLocationError as error:
        raise JobError(f"{url.partition(':')[0]}://...: {error}") from None
