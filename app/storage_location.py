"""A place for files: a folder or an object-store prefix, named by a URL that may hold a password."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from pyarrow import fs

from app.redaction import url_without_secrets

SCHEMES: Final = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
BEGINNINGS: Final = f"must be a path, or begin with one of {', '.join(f'{each}://' for each in SCHEMES)}"
ESCAPED: Final = "special characters in a user name, password or option must be escaped, such as / by %2F"

_SECRET: Final = re.compile("secret|key|token|pass|sig", re.IGNORECASE)
"""Names of options whose values are secret, such as ``client_secret`` and ``sig``."""

_DELIMITERS: Final = re.compile("[:/?#@&=]")


class InvalidLocationError(ValueError):
    """No filesystem accepts the URL."""


class StorageLocation:
    """A folder or an object-store prefix. It is opened at first use, so an unreachable store is no error yet.

    Args:
        url: a URL that ``pyarrow.fs.FileSystem.from_uri`` accepts, or a plain path.

    Attributes:
        name: the URL for logs and messages, without user name, password and options.

    Raises:
        InvalidLocationError: it is not a valid URL, or has an unknown scheme.
    """

    def __init__(self, url: str | Path) -> None:
        try:
            parts = urlsplit(str(url))
        except ValueError:  # its text would show the password
            raise InvalidLocationError(f"is not a valid URL; {ESCAPED}") from None
        if parts.scheme and parts.scheme not in SCHEMES:
            raise InvalidLocationError(BEGINNINGS)
        self.name = url_without_secrets(str(url)) if parts.scheme else str(url)
        self._url = str(url) if parts.scheme else None
        self._secrets = _secrets(str(url)) if parts.scheme else set()
        self._folder = None if parts.scheme else str(Path(url).resolve())
        self._opened: tuple[fs.FileSystem, str] | None = None

    def open(self) -> tuple[fs.FileSystem, str]:
        """Return the filesystem and the path in it.

        Raises:
            InvalidLocationError: the URL can never work.
            OSError: the object store, which is asked for its region, cannot be reached.
        """
        if self._opened is None:
            import pyarrow as pa  # the settings know the schemes without it
            from pyarrow import fs

            if self._folder is not None:
                self._opened = fs.LocalFileSystem(), self._folder
                return self._opened
            try:
                filesystem, root = fs.FileSystem.from_uri(self._url)
            except (pa.ArrowException, UnicodeError) as error:
                hint = f"; {ESCAPED}" if str(self._url) in str(error) else ""
                raise InvalidLocationError(f"{self.redact(error)}{hint}") from None
            self._opened = filesystem, root.rstrip("/")
        return self._opened

    def redact(self, error: Exception) -> str:
        """Return an error's text on one line, without the URL's secrets."""
        text = " ".join(str(error).replace(self._url or self.name, self.name).split())
        if any(secret in text for secret in self._secrets):
            return "the error is not shown: it holds a part of the URL's user name or password"
        return text


def _secrets(url: str) -> set[str]:
    """The secrets of a URL, and the parts of each secret, as filesystems may show a part alone."""
    rest = url.partition(":")[2].lstrip("/")
    user = rest.rpartition("@")[0]
    secrets = [user] if ":" in user else []
    options = (option.partition("=") for option in rest.partition("?")[2].split("&"))
    secrets += [value for name, _, value in options if _SECRET.search(name)]
    parts = {part for each in secrets for part in _DELIMITERS.split(each)}
    return ({*secrets, *parts, *map(unquote, parts)}) - {""}
