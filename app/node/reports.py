"""Reports of jobs in a folder, as JSON: ``python -m app.node.reports FOLDER [NAME]`` prints a list or one.

A process of its own reads them: the parser holds Python's lock, for a large file longer than decisions may
wait, and no thread could be ended that waits for a network disk. A report is a folder with ``summary.json``;
``report.json`` has the period of its log, and ``tables.json`` its tables. Links are not followed, and only
regular files are read.
"""

from __future__ import annotations

import os
import resource
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from heapq import nlargest
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, field

SUMMARY: Final = "summary.json"
ABOUT: Final = "report.json"
TABLES: Final = "tables.json"

MAX_BYTES: Final = 16 * 1024 * 1024
"""The largest file that is read."""
MAX_LISTED: Final = 100
"""The most reports in a list."""
MAX_LISTED_BYTES: Final = 65_536
"""A larger summary is in its report alone, not in the list."""
MAX_TABLES: Final = 100
MAX_COLUMNS: Final = 100
MAX_ROWS: Final = 1_000
"""The most rows of a table; its count has all."""

CPU_S: Final = 20
"""The processor time of one reading: hundreds of times what the largest real report needs."""
MEMORY_BYTES: Final = 768 * 1024 * 1024
"""The address space of one reading: a crafted file would take fifty times its size."""

REFUSED: Final = 3
"""The exit code if there is no such report, or if it cannot be shown; the reason is the output."""

Kind = Literal["audit", "whatif", "recommend", "backfill"]
KINDS: Final[Mapping[str, Kind]] = {
    "verdicts": "audit",
    "newly_refused": "whatif",
    "outliers": "recommend",
    "as_of_ms": "backfill",
}
"""The kind of a report whose summary has this field."""

Count = Annotated[int, Meta(ge=0)]
Instant = Annotated[int, Meta(ge=0)]
Cell = str | int | float | bool | None
Name = Annotated[str, Meta(description="The name of its folder: one segment of the path.")]
KindOrNone = Annotated[
    Annotated[Kind, Meta(extra_json_schema={"type": "string"})] | None,
    Meta(description="The job that made it; null: its summary is not that of a known job."),
]
From = Annotated[
    Instant | None,
    Meta(description="The first row of the log in its period; null: an older version made it."),
]
To = Annotated[Instant | None, Meta(description="The last row of the log in its period.")]
Modified = Annotated[int, Meta(description="When its folder was changed last.")]
SummaryJson = Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object", "additionalProperties": True})]

T = TypeVar("T")


class ReportError(Exception):
    """There is no report of this name, or it cannot be shown; the text says why."""


class ReportEntryBody(Struct):
    """A report in a list."""

    name: Name
    kind: KindOrNone
    from_ms: From
    to_ms: To
    modified_ms: Modified
    summary: Annotated[
        SummaryJson | None, Meta(description="Its `summary.json`; null: it is larger than 64 KiB.")
    ]


class ReportListBody(Struct):
    """The reports, newest first."""

    reports: Annotated[list[ReportEntryBody], Meta(max_length=MAX_LISTED, description="Newest first.")]
    unreadable: Annotated[
        Count, Meta(description="How many of the newest folders are not listed, as they cannot be shown.")
    ]
    more: Annotated[bool, Meta(description=f"There are older folders: the newest {MAX_LISTED} are listed.")]


class ReportTableBody(Struct):
    """A table of a report."""

    name: Annotated[str, Meta(description="Its name in the report.")]
    title: Annotated[str, Meta(description="Its heading, for people.")]
    columns: Annotated[
        list[str],
        Meta(
            max_length=MAX_COLUMNS,
            description="The names of its columns. A table that begins with `at_ms` is a curve over time.",
        ),
    ]
    rows: Annotated[
        list[list[Cell]], Meta(max_length=MAX_ROWS, description="Its first rows, a value for each column.")
    ]
    count: Annotated[Count, Meta(description="The number of all its rows; the report's Parquet has them.")]


class ReportBody(Struct):
    """A report."""

    name: Name
    kind: KindOrNone
    log: Annotated[str | None, Meta(description="The name of the log; null: an older version made it.")]
    from_ms: From
    to_ms: To
    modified_ms: Modified
    summary: Annotated[SummaryJson, Meta(description="Its `summary.json`.")]
    tables: Annotated[list[ReportTableBody], Meta(max_length=MAX_TABLES, description="Its tables, in order.")]


class _About(Struct):
    log: str | None = None
    from_ms: Instant | None = None
    to_ms: Instant | None = None


class _Table(Struct):
    """A table as its file has it; only rows that are shown are read."""

    name: str
    title: str
    columns: Annotated[list[str], Meta(max_length=MAX_COLUMNS)]
    rows: list[msgspec.Raw]
    count: Count = 0

    def body(self) -> ReportTableBody:
        rows = [msgspec.json.decode(row, type=list[Cell]) for row in self.rows[:MAX_ROWS]]
        return ReportTableBody(self.name, self.title, self.columns, rows, max(self.count, len(self.rows)))


class _Tables(Struct):
    tables: Annotated[list[_Table], Meta(max_length=MAX_TABLES)] = field(default_factory=list)


def list_reports(folder: Path) -> ReportListBody:
    """Return the newest reports of a folder.

    Raises:
        OSError: the folder cannot be read.
    """
    with _opened(folder) as place:
        newest = nlargest(MAX_LISTED + 1, ((modified_ms, name) for name, modified_ms in _folders(place)))
        found = []
        for modified_ms, name in newest[:MAX_LISTED]:
            with suppress(ReportError), _report(place, name) as report:
                summary, kind = _summary(report)
                about = _decoded(ABOUT, _content(report, ABOUT), _About)
                listed = summary if len(bytes(summary)) <= MAX_LISTED_BYTES else None
                found.append(ReportEntryBody(name, kind, about.from_ms, about.to_ms, modified_ms, listed))
    more = len(newest) > MAX_LISTED
    return ReportListBody(found, min(len(newest), MAX_LISTED) - len(found), more)


def read_report(folder: Path, name: str) -> ReportBody:
    """Return a report.

    Raises:
        OSError: the folder cannot be read.
        ReportError: there is no report of this name, or it cannot be shown.
    """
    with _opened(folder) as place:
        modified_ms = dict(_folders(place)).get(name)
        if modified_ms is None:
            raise ReportError(f"There is no report named {name}.")
        with _report(place, name) as report:
            summary, kind = _summary(report)
            about = _decoded(ABOUT, _content(report, ABOUT), _About)
            held = _decoded(TABLES, _content(report, TABLES), _Tables)
            with _refusing(TABLES):
                tables = [table.body() for table in held.tables]
    return ReportBody(name, kind, about.log, about.from_ms, about.to_ms, modified_ms, summary, tables)


def _folders(place: int) -> Iterator[tuple[str, int]]:
    """Name and time of change (ms) of each folder; a job gives its folder a name without ``_`` at the end."""
    with os.scandir(place) as entries:
        for entry in entries:
            if entry.name.startswith(("_", ".")) or not _is_text(entry.name):
                continue
            with suppress(OSError):  # it vanished
                if entry.is_dir(follow_symlinks=False):
                    yield entry.name, entry.stat(follow_symlinks=False).st_mtime_ns // 1_000_000


def _is_text(name: str) -> bool:
    """Whether a name is UTF-8, so that JSON can hold it."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def _opened(path: str | Path, above: int | None = None) -> Iterator[int]:
    """A folder's descriptor."""
    linked = 0 if above is None else os.O_NOFOLLOW
    place = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | linked, dir_fd=above)
    try:
        yield place
    finally:
        os.close(place)


@contextmanager
def _report(above: int, name: str) -> Iterator[int]:
    """The descriptor of a report's folder.

    Raises:
        ReportError: it cannot be opened; also if a file below it cannot be read.
    """
    try:
        with _opened(name, above) as place:
            yield place
    except OSError as error:
        raise ReportError(f"This report cannot be read: {error.strerror}.") from None


def _content(place: int, name: str) -> bytes | None:
    """The content of a file in a folder; None without such a file.

    Raises:
        OSError: it cannot be read.
        ReportError: it is a link or no regular file, or too large.
    """
    try:
        _check(name, os.stat(name, dir_fd=place, follow_symlinks=False))
        # Between both looks it may have become another: then a pipe does not wait for its writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, dir_fd=place), "rb") as file:
            _check(name, os.fstat(file.fileno()))
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    _check_size(name, len(content))  # it may have grown
    return content


def _check(name: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise ReportError(f"This report cannot be shown: {name} is a link, or no regular file.")
    _check_size(name, found.st_size)


def _check_size(name: str, size: int) -> None:
    if size > MAX_BYTES:
        raise ReportError(f"This report cannot be shown: {name} is larger than {MAX_BYTES:,} bytes.")


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Turn an error of the parser into a refusal."""
    try:
        yield
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError):
        raise ReportError(f"This report cannot be shown: {name} is damaged, or no file of a job.") from None


def _decoded(name: str, content: bytes | None, as_: type[T]) -> T:
    """The value of a file; the empty one without the file, which older versions did not write."""
    with _refusing(name):
        return as_() if content is None else msgspec.json.decode(content, type=as_)


def _summary(place: int) -> tuple[msgspec.Raw, Kind | None]:
    """The summary of a report, and its kind."""
    content = _content(place, SUMMARY)
    if content is None:
        raise ReportError(f"This report cannot be shown: it has no {SUMMARY}.")
    with _refusing(SUMMARY):
        content.decode()  # the parser does not look into strings that it skips
        fields = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    kind = next((kind for name, kind in KINDS.items() if name in fields), None)
    return msgspec.Raw(content.strip()), kind


def main(folder: str, name: str | None = None) -> int:
    """Write a list, or one report."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        found = list_reports(Path(folder)) if name is None else read_report(Path(folder), name)
    except ReportError as refused:
        sys.stdout.buffer.write(str(refused).encode())
        return REFUSED
    sys.stdout.buffer.write(msgspec.json.encode(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
