"""The files of a foreign history: a file, a folder, or a pattern of them, on any filesystem of pyarrow."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Final, TypeVar
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import fs

from app.storage_location import InvalidLocationError, StorageLocation
from workers.jobs.errors import JobError
from workers.jobs.files import READERS, location_of

BEGINNING: Final = 256
"""The number of bytes that are read to recognize a file's format."""

PARQUET: Final = b"PAR1"
GZIP: Final = b"\x1f\x8b"
UTF8_MARK: Final = b"\xef\xbb\xbf"
UTF16_MARKS: Final = (b"\xff\xfe", b"\xfe\xff")

GONE: Final = "there is no such file or folder"
HIDDEN: Final = (".", "_")
"""Files and folders with such a beginning are not part of a folder's data, unless they name a column."""

PATTERN: Final = re.compile(r"[*?\[{]")
ABSENT: Final = "__HIVE_DEFAULT_PARTITION__"
"""The value in a folder's name that is no value."""

ALTERNATIVES: Final = re.compile(r"\{([^{}]*)\}")
SIGNS: Final = re.compile(r"\[(?P<other>[!^]?)(?P<among>[^\]]+)\]|\\(?P<escaped>.)|.", re.DOTALL)
"""One sign of a pattern."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HistoryFile:
    """A file.

    Attributes:
        url: the history's URL, which leads to the filesystem.
        path: the path in that filesystem.
        name: for people.
        size: in bytes.
        partitions: the values of columns that are in the names of folders, such as ``user=alice``.
    """

    url: str
    path: str
    name: str
    size: int
    partitions: Mapping[str, str | None]

    def open(self) -> fs.FileSystem:
        """The filesystem."""
        return _filesystem(self.url)

    def beginning(self) -> bytes:
        """The first bytes, without leading blanks, decompressed if the file's name says so.

        Raises:
            JobError: the file cannot be read.
        """
        try:
            with self.open().open_input_stream(self.path, compression=None) as stream:
                found = bytes(stream.read(BEGINNING))
            if self.path.endswith(".gz") and found.startswith(GZIP):
                with self.open().open_input_stream(self.path, compression="gzip") as stream:
                    found = bytes(stream.read(BEGINNING))
        except (OSError, pa.ArrowException) as error:
            raise self.unreadable(error) from None
        return found.removeprefix(UTF8_MARK).lstrip()

    def unreadable(self, error: Exception) -> JobError:
        """The error for people, of a file that cannot be read."""
        why = _why(error, location_of(self.url))
        damaged = isinstance(error, (pa.ArrowException, ValueError)) or type(error) is OSError
        local = isinstance(self.open(), fs.LocalFileSystem)
        return JobError(f"{self.name}: {'is damaged: it cannot be read' if damaged and local else why}")


class HistoryFiles:
    """The files of a URL.

    Attributes:
        name: the URL for people, without its secrets.
        files: the files, by their paths.

    Raises:
        JobError: no file was found, or the filesystem does not answer; the message names the URL.
    """

    def __init__(self, url: str) -> None:
        location = location_of(url)
        self.name = location.name
        scheme = url.partition("://")[0] if "://" in url else "file"
        shown = "" if scheme == "file" else f"{scheme}://"
        try:
            filesystem, path = location.open()
            base, found = _listed(filesystem, path)
        except (InvalidLocationError, OSError, pa.ArrowException) as error:
            raise JobError(f"{self.name}: {_why(error, location)}") from None
        self.files = [
            HistoryFile(url, file.path, f"{shown}{file.path}", file.size, _partitions(file.path, base))
            for file in sorted(found, key=lambda file: str(file.path))
        ]
        if not self.files:
            raise JobError(f"{self.name}: the folder has no files")

    def each(self, read: Callable[[HistoryFile], T]) -> Iterator[tuple[HistoryFile, T]]:
        """Yield every file with the result of a function, which runs in threads."""
        with ThreadPoolExecutor(READERS) as pool:
            yield from zip(self.files, pool.map(read, self.files), strict=True)


@lru_cache(maxsize=1)
def _filesystem(url: str) -> fs.FileSystem:
    """The filesystem of a history: an object store is asked for its region only once."""
    return location_of(url).open()[0]


def _listed(filesystem: fs.FileSystem, path: str) -> tuple[str, list[fs.FileInfo]]:
    """The folder above all columns in names of folders, and the files.

    Raises:
        FileNotFoundError: there is no such file or folder.
    """
    about = filesystem.get_file_info(path)
    if about.type == fs.FileType.File:  # a file of exactly this name is no pattern
        return path.rpartition("/")[0], [about]
    if about.type == fs.FileType.Directory:
        return path, _below(filesystem, path)
    steps = path.split("/")
    base = "/".join(takewhile(lambda step: not PATTERN.search(step), steps))
    if base == path:
        raise FileNotFoundError(path)
    matching = re.compile(_expression("/".join(steps[base.count("/") + 1 :] if base else steps)))
    matched = [
        file for file in _below(filesystem, base) if matching.match(file.path[len(base) :].lstrip("/"))
    ]
    if not matched:
        raise FileNotFoundError(path)
    return base, matched


def _below(filesystem: fs.FileSystem, folder: str) -> list[fs.FileInfo]:
    """The files in a folder and its folders that are not hidden."""
    entries = filesystem.get_file_info(fs.FileSelector(folder, recursive=True))
    return [
        file
        for file in entries
        if file.type == fs.FileType.File
        and not any(
            step.startswith(HIDDEN) and "=" not in step for step in file.path[len(folder) :].split("/")
        )
    ]


def _expression(pattern: str) -> str:
    r"""The regular expression for a pattern of paths, and for everything in a folder that matches.

    ``*`` and ``?`` match no slash, ``[ab]`` and ``[^ab]`` one character, ``{a,b}`` one of the texts.

    >>> bool(re.match(_expression("day-*/{a,b}?.json"), "day-1/b2.json"))
    True
    >>> bool(re.match(_expression("*.json"), "day-1/b2.json"))
    False
    """
    if braces := ALTERNATIVES.search(pattern):
        begin, end = pattern[: braces.start()], pattern[braces.end() :]
        return "|".join(_expression(f"{begin}{one}{end}") for one in braces[1].split(","))
    return rf"(?:{SIGNS.sub(_sign, pattern)})(?:/.*)?\Z"


def _sign(sign: re.Match[str]) -> str:
    if sign["among"]:
        return f"[{'^' if sign['other'] else ''}{sign['among'].replace('[', chr(92) + '[')}]"
    return {"*": "[^/]*", "?": "[^/]"}.get(sign[0]) or re.escape(sign["escaped"] or sign[0])


def _partitions(path: str, base: str) -> dict[str, str | None]:
    """The columns in the names of the folders between a base and a file.

    >>> _partitions("/uses/day=1/user=a%2Fb/part.parquet", "/uses")
    {'day': '1', 'user': 'a/b'}
    """
    steps = [step.partition("=") for step in path[len(base) :].split("/")[:-1] if "=" in step]
    return {unquote(name): None if value == ABSENT else unquote(value) for name, _, value in steps}


def _why(error: Exception, location: StorageLocation) -> str:
    """The cause of an error, for people."""
    if isinstance(error, FileNotFoundError):
        return GONE
    if isinstance(error, PermissionError):
        return "may not be read: permission denied"
    return location.redact(error)
