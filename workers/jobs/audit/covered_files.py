"""The files of a log that a saved state covers: compared with the log, they leave the rows that are new.

Files of the log never change. The writer merges the small files of an hour into one, and removes whole hours
from the beginning. So a covered file is there with the same hash, or its rows are in other files of its hour
with the same content, or its whole hour was removed with all hours before it. Any other log is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from hashlib import sha256
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from workers.decision_log.schema import MERGED, SCHEMA, hour_of
from workers.jobs.audit.row_digests import Digests, row_digests
from workers.jobs.batches import Runs, groups_of, joined, runs_of
from workers.jobs.errors import JobError
from workers.jobs.files import RowGroups, location_of, opened, row_groups
from workers.jobs.period import Period
from workers.jobs.runner import Runner
from workers.jobs.verdicts import Flags, LogRows, integers

PIECE: Final = 1 << 20


class OtherLogError(JobError):
    """The state covers another log."""


Known = Mapping[str, Runs]
"""The places of the rows that are known, by batch."""


class Content(NamedTuple):
    """Some rows of a batch: their places, and the sum of their digests."""

    runs: Runs
    digest: int

    def plus(self, other: Content) -> Content:
        """These rows and others."""
        return Content(joined([*self.runs, *other.runs]), (self.digest + other.digest) % 2**64)


@dataclass(frozen=True, slots=True)
class LogFile:
    """A file of the log.

    Attributes:
        sha256: the hash of its bytes.
        batches: the rows of each batch in it.
    """

    sha256: str
    batches: Mapping[str, Content] = field(default_factory=dict)


class Sealed(NamedTuple):
    """A file, and its rows that were known before.

    Attributes:
        known: these rows by batch.
        left_out: their places by row group.
        whole: the row groups without other rows.
    """

    file: LogFile
    known: Mapping[str, Content]
    left_out: Mapping[int, Sequence[int]]
    whole: frozenset[int]


@dataclass(frozen=True, slots=True)
class UnknownRows:
    """Row groups without the rows that are known."""

    part: RowGroups
    left_out: Sequence[Sequence[int]]

    @property
    def rows(self) -> int:
        """How many rows are left."""
        return self.part.rows - sum(map(len, self.left_out))

    def tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """The rows of each row group.

        Raises:
            JobError: a file cannot be read.
        """
        for table, places in zip(self.part.tables(columns), self.left_out, strict=True):
            keeps = np.ones(table.num_rows, bool)
            keeps[np.array(places, np.int64)] = False
            yield table.filter(pa.array(keeps)) if places else table


@dataclass(frozen=True, slots=True)
class Comparison:
    """A log, compared with the files that a state covers.

    Attributes:
        files: the files of the log, all of which the next state covers.
        tasks: the row groups of the files that were not covered, without known rows.
        removed: how many covered hours were removed from the beginning of the log.
        differing: why the log has to be read whole: covered rows are there again, with other content.
    """

    files: Mapping[str, LogFile]
    tasks: Sequence[RowGroups | UnknownRows]
    removed: int
    differing: str | None


def compare(
    runner: Runner,
    url: str,
    paths: Iterable[str],
    covered: Mapping[str, LogFile],
    key: bytes,
    share: float,
) -> Comparison:
    """Compare a log with the files that a state covers.

    Args:
        paths: the files of the log.
        covered: the files that the state covers, by their path within the log.
        key: of the rows' digests.
        share: of the job's progress.

    Raises:
        OtherLogError: the state is not one of this log.
        JobError: a file cannot be read.
    """
    inside = {_within(url, path): path for path in paths}
    kept = [name for name in inside if name in covered]
    hashes = runner.each(partial(_hash, url), [inside[name] for name in kept], share / 4)
    for name, found in zip(kept, hashes, strict=True):
        if found != covered[name].sha256:
            right = covered[name].sha256
            raise OtherLogError(
                f"files: {name}: its sha256 is {found}, must be {right}: it was changed since then"
            )
    new = sorted(inside.keys() - covered.keys())
    known = _by_hour(covered)
    tasks = [(inside[name], known.get(hour_of(name) or 0, {}) if _is_merged(name) else {}) for name in new]
    sealed = dict(zip(new, runner.each(partial(_seal, url, key), tasks, share * 3 / 4), strict=True))
    files = {name: covered[name] for name in kept} | {name: each.file for name, each in sealed.items()}
    if covered and _contents(covered).keys().isdisjoint(_contents(files)):
        raise OtherLogError("files: the log has none of the rows that the state covers; it is another log")
    removed = _removed_hours({name: file for name, file in covered.items() if name not in inside}, files)
    unknown = _unknown(url, {inside[name]: each for name, each in sealed.items()})
    return Comparison(files, unknown, removed, _differing(covered, sealed))


def _is_merged(name: str) -> bool:
    return name.rpartition("/")[2].startswith(MERGED)


def _within(url: str, path: str) -> str:
    """The path of a file within the log."""
    return path.removeprefix(opened(location_of(url))[1]).lstrip("/")


def _hash(url: str, path: str) -> str:
    """The hash of a file's bytes."""
    found = sha256()
    try:
        with opened(location_of(url))[0].open_input_stream(path) as file:
            while piece := file.read(PIECE):
                found.update(piece)
    except FileNotFoundError:
        raise JobError(f"{path}: was merged or removed meanwhile; start the job again") from None
    except OSError as error:
        raise JobError(location_of(url).redact(error)) from None
    return found.hexdigest()


def _by_hour(covered: Mapping[str, LogFile]) -> dict[int, dict[str, Runs]]:
    """The places of the known rows, by the hour of their files and by batch."""
    found: dict[int, dict[str, Runs]] = defaultdict(dict)
    for name, file in covered.items():
        hour = found[hour_of(name) or 0]
        for batch, content in file.batches.items():
            hour[batch] = joined([*hour.get(batch, ()), *content.runs])
    return found


def _seal(url: str, key: bytes, task: tuple[str, Known]) -> Sealed:
    """Hash a file and its rows."""
    path, known = task
    file = row_groups(url, Period(), only=[path])
    all_rows: dict[str, Content] = {}
    known_rows: dict[str, Content] = {}
    left_out: dict[int, Sequence[int]] = {}
    whole = set()
    groups = [group for part in file for _, numbers in part.files for group in numbers]
    tables = (table for part in file for table in part.tables(SCHEMA.names))
    for group, table in zip(groups, tables, strict=True):
        digests, is_known = row_digests(table, key), _known(table, known)
        _add(all_rows, table, digests, np.ones(table.num_rows, bool))
        _add(known_rows, table, digests, is_known)
        if is_known.any():
            left_out[group] = np.flatnonzero(is_known).tolist()
        if is_known.all():
            whole.add(group)
    return Sealed(LogFile(_hash(url, path), all_rows), known_rows, left_out, frozenset(whole))


def _known(table: pa.Table, known: Known) -> Flags:
    """True for each row that is known."""
    batch = LogRows(table).column("batch")
    places = integers(LogRows(table).column("place"))
    code, found = integers(batch.indices), np.zeros(table.num_rows, bool)
    for number, name in enumerate(batch.dictionary.to_pylist()):
        if name in known:
            mine = np.flatnonzero(code == number)
            for first, last in known[name]:
                found[mine] |= (places[mine] >= first) & (places[mine] <= last)
    return found


def _add(sums: dict[str, Content], table: pa.Table, digests: Digests, chosen: Flags) -> None:
    """Add the chosen rows to the content of their batches."""
    rows = LogRows(table)
    names = rows.column("batch").dictionary.to_pylist()
    code, place = integers(rows.column("batch").indices)[chosen], integers(rows.column("place"))[chosen]
    order = np.lexsort((place, code))
    code, place, digests = code[order], place[order], digests[chosen][order]
    for begin, end in groups_of(code):
        content = Content(runs_of(place[begin:end]), int(digests[begin:end].sum()))
        name = names[code[begin]]
        sums[name] = sums[name].plus(content) if name in sums else content


BatchInHour = tuple[int | None, str]
"""An hour, and a batch that has rows in it."""


def _contents(files: Mapping[str, LogFile]) -> dict[BatchInHour, list[Content]]:
    found: dict[BatchInHour, list[Content]] = defaultdict(list)
    for name, file in files.items():
        for batch, content in file.batches.items():
            found[hour_of(name), batch].append(content)
    return found


def _differing(covered: Mapping[str, LogFile], sealed: Mapping[str, Sealed]) -> str | None:
    """The known rows in new files whose content differs, or cannot be compared; None without such rows."""
    contents = _contents(covered)
    for name, each in sealed.items():
        for batch, content in each.known.items():
            right = contents[hour_of(name), batch]
            if content not in right and (not right or content != reduce(Content.plus, right)):
                return f"{name} has rows of {batch} again, which differ from those before"
    return None


def _removed_hours(gone: Mapping[str, LogFile], left: Mapping[str, LogFile]) -> int:
    """How many hours were removed from the beginning of the log.

    Args:
        gone: the covered files that are gone; merged ones have their rows in others.
        left: the files of the log.

    Raises:
        OtherLogError: a file is gone, but its hour or an earlier one is still in the log.
    """
    contents = _contents(left)
    first = min((hour_of(name) or 0 for name in left), default=0)
    removed = set()
    for name, file in sorted(gone.items()):
        for batch, content in file.batches.items():
            there = joined(run for one in contents[hour_of(name), batch] for run in one.runs)
            if joined([*there, *content.runs]) != there:
                removed.add(hour := hour_of(name) or 0)
                if hour >= first:
                    which = "its hour, or an hour before it, is there"
                    raise OtherLogError(f"files: {name}: is gone from the log, but {which}")
    return len(removed)


def _unknown(url: str, sealed: Mapping[str, Sealed]) -> list[RowGroups | UnknownRows]:
    """The tasks that read the rows of some files, without the known ones."""
    tasks: list[RowGroups | UnknownRows] = []
    for part in row_groups(url, Period(), only=list(sealed)):
        files = [
            (path, tuple(group for group in groups if group not in sealed[path].whole))
            for path, groups in part.files
        ]
        places = [sealed[path].left_out.get(group, ()) for path, groups in files for group in groups]
        if places:
            whole = sum(
                len(sealed[path].left_out[group])
                for path, groups in part.files
                for group in groups
                if group in sealed[path].whole
            )
            left = replace(part, files=tuple(files), rows=part.rows - whole)
            tasks.append(UnknownRows(left, places) if any(places) else left)
    return tasks
