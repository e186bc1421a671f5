"""Removes whole hours of the decision log: expired ones, and the oldest if the log is too large."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pyarrow import fs

from workers.decision_log.flush import UNREADABLE
from workers.decision_log.folder import Folder
from workers.decision_log.schema import HOUR_MS, partition


class Bounded(NamedTuple):
    """The result of removing hours to keep the log within its limit in bytes.

    Attributes:
        hours: how many hours were removed; unreadable batches do not count.
        removed: in bytes.
        left: the log's bytes afterwards; above the limit if the part that must stay is that large.
    """

    hours: int
    removed: int
    left: int


class _Part(NamedTuple):
    """A part that is removed as a whole: an hour, or one unreadable batch."""

    until_ms: int
    hour: int | None
    files: list[fs.FileInfo]

    @property
    def size(self) -> int:
        return sum(file.size or 0 for file in self.files)


def retain(folder: Folder, now_ms: int, kept_ms: int) -> int:
    """Remove the hours that ended, and were last written to, more than ``kept_ms`` ago; return how many.

    Both conditions must hold: otherwise a replay of old traffic, or a store with a wrong clock, would lose
    new rows.

    Raises:
        OSError: a file cannot be removed; the next call continues.
    """
    before_ms = now_ms - kept_ms
    removed = 0
    for hour, files in sorted(folder.hours().items()):
        if hour + HOUR_MS <= before_ms and _written_ms(files) <= before_ms:
            _remove(folder, hour, files)
            removed += 1
    for file in folder.files(UNREADABLE):
        if file.mtime and _written_ms([file]) <= before_ms:
            folder.remove(file.path)
    return removed


def bound(folder: Folder, now_ms: int, most: int) -> Bounded:
    """Remove the oldest hours until the log has at most ``most`` bytes, but never the hour being written.

    The current hour, later hours, the hour last written to, and all hours after a kept hour stay. So, as
    after `retain`, only the beginning of the log is missing.

    Raises:
        OSError: a file cannot be removed; the next call continues.
    """
    parts = sorted(_parts(folder), key=lambda part: part.until_ms)
    left = sum(part.size for part in parts)
    whole = [part for part in parts if part.hour is not None]
    written_last = max(whole, key=lambda part: (_written_ms(part.files), part.until_ms), default=None)
    hours = removed = 0
    for part in parts:
        if left <= most or part is written_last or part.until_ms > now_ms:
            break
        if part.hour is None:
            folder.remove(part.files[0].path)
        else:
            _remove(folder, part.hour, part.files)
            hours += 1
        left -= part.size
        removed += part.size
    return Bounded(hours, removed, left)


def _parts(folder: Folder) -> Iterator[_Part]:
    for hour, files in folder.hours().items():
        yield _Part(hour + HOUR_MS, hour, files)
    for file in folder.files(UNREADABLE):
        yield _Part(round(_written_ms([file])), None, [file])


def _written_ms(files: Iterable[fs.FileInfo]) -> float:
    """The newest time at which one of the files was written, in milliseconds."""
    return max((file.mtime.timestamp() * 1000 for file in files if file.mtime), default=0.0)


def _remove(folder: Folder, hour: int, files: Iterable[fs.FileInfo]) -> None:
    """Remove an hour, oldest rows first, so that a reader meanwhile misses only a beginning."""
    for file in files:
        folder.remove(file.path)
    folder.leave(partition(hour))
