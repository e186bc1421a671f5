"""Strict reading of queries: every parameter must be known, valid, and given once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final, TypeVar
from urllib.parse import unquote_to_bytes

from app.domain.quota_value import pointer
from app.http.problems import FieldError, unprocessable

T = TypeVar("T")

_BAD_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_INTEGER: Final = re.compile("0|[1-9][0-9]{0,18}")


class Parameters:
    """The query parameters of a request, and their errors.

    >>> query = Parameters(b"limit=5&entity=user%3Da", "limit", "entity")
    >>> query.integer("limit", 1, 1000), query.one("entity", str.upper), query.one("cursor", str.upper)
    (5, 'USER=A', None)
    """

    def __init__(self, query: bytes, *known: str) -> None:
        """Read the query of a request to a route that has these parameters."""
        self._errors: list[FieldError] = []
        self._sent: list[tuple[str, str]] = []
        use = f": use {', '.join(known)}" if known else ", as every parameter here"
        for name, value in parameters(query, self._errors):
            if name in known:
                self._sent.append((name, value))
            else:
                self.wrong(name, f"is unknown{use}")

    def texts(self, name: str) -> list[str]:
        """Return all values of a parameter that may be repeated."""
        return [text for known, text in self._sent if known == name]

    def one(self, name: str, read: Callable[[str], T], *, blank: bool = False) -> T | None:
        """Return the value of a parameter that may be given once; None without it, or if it is invalid.

        Args:
            read: parses the value; raises ``ValueError`` that names the valid values.
            blank: an empty value counts as absent, since some clients send None so.
        """
        texts = self.texts(name)
        if len(texts) > 1:
            self.wrong(name, "is duplicated")
        elif texts and (texts[0] or not blank):
            try:
                return read(texts[0])
            except ValueError as error:
                self.wrong(name, str(error))
        return None

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Return an integer in a range."""

        def read(text: str) -> int:
            if not _INTEGER.fullmatch(text) or not low <= int(text) <= high:
                raise ValueError(f"must be an integer from {low} to {high}")
            return int(text)

        return self.one(name, read)

    def flag(self, name: str) -> bool:
        """Return the value of a flag, which is false by default."""

        def read(text: str) -> bool:
            if text not in ("true", "false"):
                raise ValueError("must be true or false")
            return text == "true"

        return bool(self.one(name, read))

    def wrong(self, name: str, message: str) -> None:
        """Record an error of a parameter."""
        self._errors.append(FieldError(pointer(name), message))

    def check(self) -> None:
        """Refuse the request if its query has errors.

        Raises:
            ProblemError: 422 that names each of them.
        """
        if self._errors:
            raise unprocessable(*self._errors)


def parameters(query: bytes, errors: list[FieldError]) -> Iterator[tuple[str, str]]:
    """Yield names and values, decoded once; adds undecodable ones to ``errors``."""
    for part in filter(None, query.decode("latin-1").replace("+", " ").split("&")):
        spelled, _, text = part.partition("=")
        try:
            yield _unescaped(spelled), _unescaped(text)
        except ValueError:
            errors.append(FieldError(pointer(spelled), "must be percent-encoded UTF-8"))


def _unescaped(text: str) -> str:
    if _BAD_ESCAPE.search(text):
        raise ValueError("a percent sign is written %25")
    return unquote_to_bytes(text.encode("latin-1")).decode()
