"""The files of the decision log, each checked before anything is computed, and read by row groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol

import pyarrow as pa
from pyarrow import fs
from pyarrow import parquet as pq

from app.storage_location import InvalidLocationError, StorageLocation
from workers.decision_log.schema import (
    SCHEMA,
    SECRETS_KEY,
    BadFileError,
    blaming,
    columns_of,
    footer,
    hour_of,
    partition,
    readable,
    secrets_of,
)
from workers.jobs.errors import JobError
from workers.jobs.period import Period, format_instant

READERS: Final = 16
"""How many footers are read at a time: on an object store each is a round trip."""

RETRIES: Final = 3
"""How often the files are listed, as the writer may merge or remove some in the meantime."""

SHOWN_LETTERS: Final = 12
"""How many letters of a fingerprint a message shows."""

ROWS_AT_ONCE: Final = 60_000
"""A task has about so many rows: enough to make its start cheap, few enough for its columns in memory."""

FooterCheck = Callable[[str, pq.FileMetaData], None]
"""Checks a file by its name and footer; raises JobError or BadFileError."""

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
        """Its rows in several tables; texts are dictionaries.

        Raises:
            JobError: it cannot be read.
        """


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Row groups of one file that are read together.

    Attributes:
        rows: how many rows they have.
    """

    url: str
    path: str
    groups: tuple[int, ...]
    rows: int

    def tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Each row group, with those of the columns that the file's version has; texts are dictionaries.

        Raises:
            JobError: the file cannot be read.
        """
        filesystem, _ = location_of(self.url).open()
        try:
            with (
                blaming(self.path),
                pq.ParquetFile(self.path, filesystem=filesystem, read_dictionary=list(TEXTS)) as file,
            ):
                held = [name for name in columns if name in columns_of(file.schema_arrow)]
                for group in self.groups:
                    yield file.read_row_group(group, columns=held, use_threads=False)
        except FileNotFoundError:
            raise JobError(f"{self.path}: was merged or removed meanwhile; start the job again") from None
        except BadFileError as error:
            raise JobError(str(error)) from None


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


def row_groups(url: str, period: Period, check: FooterCheck | None = None) -> list[RowGroups]:
    """The row groups of the hours of a period, in the order of time, after each file was checked.

    Args:
        check: called with each file's footer.

    Raises:
        JobError: there are no rows, or a file is invalid; the message names the file and the field.
    """
    location = location_of(url)
    name = location.name
    try:
        filesystem, root = location.open()
    except (InvalidLocationError, OSError) as error:
        raise JobError(f"{name}: {location.redact(error)}") from None
    for attempt in range(RETRIES):
        files, hours = _list_files(filesystem, root, period)
        found: list[RowGroups] = []
        try:
            with ThreadPoolExecutor(READERS) as pool:
                footers = pool.map(lambda file: footer(file, filesystem), files)
                for file, about in zip(files, footers, strict=True):
                    _check_hour(file, about)
                    if check is not None:
                        check(file, about)
                    found += _tasks(url, file, about)
        except FileNotFoundError as error:
            if attempt == RETRIES - 1:
                raise JobError(f"{name}: files vanish while they are read: {error}") from None
            continue
        except BadFileError as error:
            raise JobError(str(error)) from None
        if not found:
            raise JobError(_no_rows(name, period, hours))
        return found
    raise AssertionError("the last attempt returns or raises")


def _tasks(url: str, file: str, about: pq.FileMetaData) -> Iterator[RowGroups]:
    """The row groups of a file, together while they have few rows."""
    groups: list[int] = []
    rows = 0
    for group in range(about.num_row_groups):
        groups.append(group)
        rows += about.row_group(group).num_rows
        if rows >= ROWS_AT_ONCE or (group == about.num_row_groups - 1 and rows):
            yield RowGroups(url, file, tuple(groups), rows)
            groups, rows = [], 0


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
        entries = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
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


def _no_rows(name: str, period: Period, hours: Sequence[int]) -> str:
    if not hours:
        return f"{name}: has no decision log: no file such as date=2026-11-21/hour=10/....parquet"
    first, last = (format_instant(hour)[:13] for hour in (hours[0], hours[-1]))
    return f"{name}: no row in the period {period}; the log has hours {first} to {last} UTC"


def location_of(url: str) -> StorageLocation:
    """The location of a log.

    Raises:
        JobError: the URL is invalid; the message shows only its scheme, as the rest may contain secrets.
    """
    try:
        return StorageLocation(url)
    except InvalidLocationError as error:
        raise JobError(f"{url.partition(':')[0]}://...: {error}") from None
