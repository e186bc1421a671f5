"""The folder of the decision log, or its prefix in an object store, through pyarrow's filesystems."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyarrow import fs
from pyarrow import parquet as pq

from app.storage_location import StorageLocation
from workers.decision_log.schema import hour_of, partition, readable

ASIDE: Final = "_"
"""The prefix of files that are being written; Spark and all our readers ignore such files."""

ROWS_OF_A_GROUP: Final = 65_536

_WITH_FOLDERS: Final = ("local", "hdfs")
"""Filesystems in which a folder must exist before its files; object stores have no folders."""

_REASONS: Final = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.EROFS: "permission",
}


class Folder:
    """A folder of the log.

    It is opened at first use, so an unreachable one is no error before that.

    Args:
        url: a URL that ``pyarrow.fs.FileSystem.from_uri`` accepts, or a plain path.

    Attributes:
        name: its name for log lines, without the password that the URL may hold.
        redact: returns the text of an error, also without the password.

    Raises:
        InvalidLocationError: the URL is invalid.
    """

    def __init__(self, url: str | Path) -> None:
        self._place = StorageLocation(url)
        self.name = self._place.name
        self.redact = self._place.redact

    def check(self) -> None:
        """Refuse a URL that can never work; the place that it names may be unreachable now.

        Raises:
            InvalidLocationError: the URL can never work.
        """
        with contextlib.suppress(OSError):  # an object store that cannot be asked for its region now
            self._place.open()

    @property
    def filesystem(self) -> fs.FileSystem:
        return self._place.open()[0]

    @property
    def root(self) -> str:
        return self._place.open()[1]

    def path(self, *parts: str) -> str:
        """A path within the folder, as its filesystem expects it."""
        return "/".join((self.root, *parts))

    def files(self, under: str = "") -> list[fs.FileInfo]:
        """All files in it and in its subfolders, sorted by path; none if the folder does not exist."""
        where = self.path(under) if under else self.root
        selector = fs.FileSelector(where, allow_not_found=True, recursive=True)
        found = [each for each in self.filesystem.get_file_info(selector) if each.type == fs.FileType.File]
        return sorted(found, key=lambda each: str(each.path))

    def hours(self) -> dict[int, list[fs.FileInfo]]:
        """The files of each hour, including those that are being written."""
        hours: dict[int, list[fs.FileInfo]] = {}
        for file in self.files():
            inside, _, _ = self.within(file.path).rpartition("/")
            hour = hour_of(inside)
            if hour is not None and inside == partition(hour):
                hours.setdefault(hour, []).append(file)
        return hours

    def rows(self) -> list[fs.FileInfo]:
        """The files that hold rows."""
        files = [file for found in self.hours().values() for file in found if readable(file.base_name)]
        return sorted(files, key=lambda file: str(file.path))

    def within(self, path: str) -> str:
        """A path relative to the folder."""
        return path.removeprefix(self.root).lstrip("/")

    def read(self, path: str) -> bytes:
        """The bytes of a file."""
        with self.filesystem.open_input_stream(path) as file:
            return bytes(file.read())

    def remove(self, path: str) -> None:
        """Remove a file, unless it is gone already."""
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.delete_file(path)

    def leave(self, inside: str) -> None:
        """Remove an empty folder, and its parent if that is then empty; object stores have no folders."""
        if self.filesystem.type_name == "local":
            with contextlib.suppress(OSError):
                for empty in (self.path(inside), os.path.dirname(self.path(inside))):  # noqa: PTH120
                    os.rmdir(empty)  # noqa: PTH106

    def put(self, inside: str, name: str, content: pa.Table | bytes) -> None:
        """Write rows as Parquet, or bytes unchanged; the file appears complete or not at all."""
        if isinstance(content, bytes):
            with self._put(inside, name) as path:  # noqa: SIM117  likewise
                with self.filesystem.open_output_stream(path) as file:
                    file.write(content)
        else:
            with self.parquet(inside, name, content.schema) as writer:
                writer.write_table(content, ROWS_OF_A_GROUP)

    @contextlib.contextmanager
    def parquet(self, inside: str, name: str, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
        """A Parquet file to write rows to, which appears once the block ends without an exception."""
        with self._put(inside, name) as path:  # noqa: SIM117  the writer ends before the file is in place
            with pq.ParquetWriter(path, schema, filesystem=self.filesystem, compression="zstd") as writer:
                yield writer

    @contextlib.contextmanager
    def _put(self, inside: str, name: str) -> Iterator[str]:
        """A temporary path to write to; at the end the file is renamed, or after an exception removed."""
        filesystem, folder = self.filesystem, self.path(inside)
        draft = f"{folder}/{ASIDE}{name}"
        if filesystem.type_name in _WITH_FOLDERS:
            filesystem.create_dir(folder, recursive=True)
        try:
            yield draft
            self._sync(draft)
            filesystem.move(draft, f"{folder}/{name}")
            for kept in (folder, os.path.dirname(folder), self.root):  # noqa: PTH120  not always a local path
                self._sync(kept)
        except BaseException:
            with contextlib.suppress(OSError, pa.ArrowException):
                filesystem.delete_file(draft)
            raise

    def _sync(self, path: str) -> None:
        """Sync to disk, so that a power loss takes nothing acknowledged; object stores need no sync."""
        if self.filesystem.type_name != "local":
            return
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def reason(error: Exception) -> str:
    """Why nothing could be written, in one word: ``full``, ``permission``, ``away`` or ``unexpected``."""
    if isinstance(error, OSError):
        return _REASONS.get(error.errno or 0, "away")
    return "unexpected"
