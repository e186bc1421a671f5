"""Where the decision log lies: a folder, or a prefix in an object store, by pyarrow's filesystems."""

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

from app.place import Place
from workers.decision_log.schema import hour_of, partition, readable

ASIDE: Final = "_"
"""Names of files that are being written begin so; Spark and every reader of ours leave such files alone."""

ROWS_OF_A_GROUP: Final = 65_536

_WITH_FOLDERS: Final = ("local", "hdfs")
"""Where a folder must be there before a file in it; object stores know none."""

_REASONS: Final = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.EROFS: "permission",
}


class Folder:
    """A folder of the log. Nothing is touched before the first use, so one that is away is no error yet.

    Args:
        url: a URL that ``pyarrow.fs.FileSystem.from_uri`` takes, or a plain path.

    Attributes:
        name: what to call it in a log, without the password that a URL may hold.
        told: what an error of it says, without that too.

    Raises:
        NoPlace: the URL is none.
    """

    def __init__(self, url: str | Path) -> None:
        self._place = Place(url)
        self.name = self._place.name
        self.told = self._place.told

    def check(self) -> None:
        """Refuse a URL that can never work; where it leads may be away.

        Raises:
            NoPlace: it cannot.
        """
        with contextlib.suppress(OSError):  # an object store that is asked for its region, and is away
            self._place.open()

    @property
    def filesystem(self) -> fs.FileSystem:
        return self._place.open()[0]

    @property
    def root(self) -> str:
        return self._place.open()[1]

    def path(self, *parts: str) -> str:
        """A path within it, as its filesystem takes it."""
        return "/".join((self.root, *parts))

    def files(self, under: str = "") -> list[fs.FileInfo]:
        """Every file in it or in a folder of it, in order of path; none if there is no such folder."""
        where = self.path(under) if under else self.root
        selector = fs.FileSelector(where, allow_not_found=True, recursive=True)
        found = [each for each in self.filesystem.get_file_info(selector) if each.type == fs.FileType.File]
        return sorted(found, key=lambda each: str(each.path))

    def hours(self) -> dict[int, list[fs.FileInfo]]:
        """The files of each hour, those that are being written too."""
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
        """What of a path follows the folder's own."""
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
        """Remove a folder that is empty, and the one around it if it then is; object stores know none."""
        if self.filesystem.type_name == "local":
            with contextlib.suppress(OSError):
                for empty in (self.path(inside), os.path.dirname(self.path(inside))):  # noqa: PTH120
                    os.rmdir(empty)  # noqa: PTH106

    def put(self, inside: str, name: str, content: pa.Table | bytes) -> None:
        """Put rows in place as Parquet, or bytes as they are: whole or not at all."""
        if isinstance(content, bytes):
            with self._put(inside, name) as path:  # noqa: SIM117  likewise
                with self.filesystem.open_output_stream(path) as file:
                    file.write(content)
        else:
            with self.parquet(inside, name, content.schema) as writer:
                writer.write_table(content, ROWS_OF_A_GROUP)

    @contextlib.contextmanager
    def parquet(self, inside: str, name: str, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
        """A file to write rows to, which is in place once this ends without an exception."""
        with self._put(inside, name) as path:  # noqa: SIM117  the writer ends before the file is in place
            with pq.ParquetWriter(path, schema, filesystem=self.filesystem, compression="zstd") as writer:
                yield writer

    @contextlib.contextmanager
    def _put(self, inside: str, name: str) -> Iterator[str]:
        """A path aside to write to; what was written is in place at the end, or gone after an exception."""
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
        """Let a loss of power take nothing that the store is told to forget; object stores do so alone."""
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
