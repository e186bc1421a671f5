"""A folder, or a prefix in an object store, by its URL: where it is, and its name without its secrets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

import pyarrow as pa
from pyarrow import fs

SCHEMES: Final = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
ESCAPED: Final = "in a user name, password or option special characters must be escaped, such as / by %2F"

_SECRET: Final = re.compile("secret|key|token|pass|sig", re.IGNORECASE)
"""Names of options whose values are secret: ``client_secret``, ``sig``."""

_DELIMITERS: Final = re.compile("[:/?#@&=]")


class NoPlace(ValueError):
    """A URL that no filesystem takes."""


class Place:
    """Where files lie. Nothing is touched before the first use, so one that is away is no error yet.

    Args:
        url: a URL that ``pyarrow.fs.FileSystem.from_uri`` takes, or a plain path.

    Attributes:
        name: what to call it, without the password that a URL may hold.

    Raises:
        NoPlace: the URL is none.
    """

    def __init__(self, url: str | Path) -> None:
        try:
            parts = urlsplit(str(url))
        except ValueError:  # whose text would tell the password
            raise NoPlace(f"is no URL; {ESCAPED}") from None
        if parts.scheme and parts.scheme not in SCHEMES:
            raise NoPlace(
                f"must be a path, or begin with one of {', '.join(f'{each}://' for each in SCHEMES)}"
            )
        self.name = _named(parts) if parts.scheme else str(url)
        self._url = str(url) if parts.scheme else None
        self._untold = _secrets(str(url)) if parts.scheme else set()
        self._opened: tuple[fs.FileSystem, str] | None = (
            None if parts.scheme else (fs.LocalFileSystem(), str(Path(url).resolve()))
        )

    def open(self) -> tuple[fs.FileSystem, str]:
        """The filesystem, and the path in it.

        Raises:
            NoPlace: the URL can never work.
            OSError: an object store that is asked for its region is away.
        """
        if self._opened is None:
            try:
                filesystem, root = fs.FileSystem.from_uri(self._url)
            except (pa.ArrowException, UnicodeError) as error:
                hint = f"; {ESCAPED}" if str(self._url) in str(error) else ""
                raise NoPlace(f"{self.told(error)}{hint}") from None
            self._opened = filesystem, root.rstrip("/")
        return self._opened

    def told(self, error: Exception) -> str:
        """What an error says, in one line and without what the URL keeps secret."""
        text = " ".join(str(error).replace(self._url or self.name, self.name).split())
        if any(secret in text for secret in self._untold):
            return "what it says holds a part of the URL's user name or password, and is not shown"
        return text


def _named(parts: SplitResult) -> str:
    """A URL without user name, password and options."""
    if "@" in parts.path + parts.query + parts.fragment:  # a password that has a / may end there
        return f"{parts.scheme}://..."
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _secrets(url: str) -> set[str]:
    """What of a URL is told to nobody, and each part of it, as filesystems may show it in parts."""
    rest = url.partition(":")[2].lstrip("/")
    user = rest.rpartition("@")[0]
    found = [user] if ":" in user else []
    options = (option.partition("=") for option in rest.partition("?")[2].split("&"))
    found += [value for name, _, value in options if _SECRET.search(name)]
    parts = {part for each in found for part in _DELIMITERS.split(each)}
    return ({*found, *parts, *map(unquote, parts)}) - {""}
