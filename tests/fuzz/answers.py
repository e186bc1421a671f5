"""A strict reader of HTTP/1.1 responses: anything that a server must not send is a fault."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_STATUS: Final = re.compile(rb"HTTP/1\.1 ([1-5][0-9]{2}) [\t -~\x80-\xff]*")
_FIELD: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*?)[ \t]*")
_LENGTH: Final = re.compile(rb"0|[1-9][0-9]*")
PROBLEM: Final = b"application/problem+json"


class Fault(AssertionError):
    """The server sent something that it must not send."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def is_shed(self) -> bool:
        """Whether a busy node refused the request by load shedding, and charged nothing."""
        if self.status == 503:
            overloaded = b'"urn:quotagate:overloaded"' in self.body
            return overloaded and self.headers.get(b"retry-after") in {b"1", b"2", b"3"}
        if self.status != 429 or not self.body:
            return False
        decision = self.json()
        return (decision.get("source"), decision.get("applied")) == ("local", 0)

    def check(self, method: str) -> None:
        """Check the rules for every answer."""
        if self.status >= 500 and not self.is_shed:
            raise Fault(f"{self.status} {self.body[:500]!r}")
        if self.status == 429 or (self.status == 403 and b"x-throttle-ms" in self.headers):
            return  # a decision, not an error
        if self.status >= 400:
            if self.headers.get(b"content-type") != PROBLEM:
                raise Fault(f"{self.status} is no problem+json: {self.headers} {self.body[:500]!r}")
            if method != "HEAD" and self.json()["status"] != self.status:
                raise Fault(f"{self.status} says another status: {self.body[:500]!r}")


class Line:
    """The answers of one connection, in order."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._said = bytearray()

    async def next(self, method: str) -> Answer | None:
        """The next answer, to a request of this method; None if the connection ends before it begins.

        Raises:
            Fault: the bytes are no answer, or end within one.
        """
        while True:
            found = _first(self._said, method)
            if found is not None:
                answer, size = found
                del self._said[:size]
                if answer.status >= 200:
                    return answer
                if answer.status != 100:
                    raise Fault(f"nobody asked for {answer.status}")
                continue
            more = await self._reader.read(1 << 18)
            if not more:
                if self._said:
                    raise Fault(f"the connection ended within an answer: {bytes(self._said[:500])!r}")
                return None
            self._said += more

    def left_over(self) -> bytes:
        """The bytes that were read beyond the answers."""
        return bytes(self._said)


def _first(said: bytearray, method: str) -> tuple[Answer, int] | None:
    """The first answer in these bytes, and its size; None while it is incomplete."""
    end = said.find(b"\r\n\r\n")
    if end < 0:
        if len(said) > 65_536:
            raise Fault(f"a head without an end: {bytes(said[:200])!r}")
        return None
    first, *lines = bytes(said[:end]).split(b"\r\n")
    status_line = _STATUS.fullmatch(first)
    if status_line is None:
        raise Fault(f"no status line: {first[:200]!r}")
    headers: dict[bytes, bytes] = {}
    for line in lines:
        named = _FIELD.fullmatch(line)
        if named is None:
            raise Fault(f"no header field: {line[:200]!r}")
        name = named[1].lower()
        if name in headers:
            raise Fault(f"{name!r} is duplicated")
        headers[name] = named[2]
    status, start = int(status_line[1]), end + 4
    length, coding = headers.get(b"content-length"), headers.get(b"transfer-encoding")
    if length is not None and (coding is not None or not _LENGTH.fullmatch(length)):
        raise Fault(f"an odd length: {headers}")
    if status < 200 or status in (204, 304) or method == "HEAD":
        if (status < 200 or status == 204) and (length or coding):
            raise Fault(f"{status} has no body: {headers}")
        return Answer(status, headers, b""), start
    if length is None:
        raise Fault(f"an answer without a length: {headers}")
    stop = start + int(length)
    return (Answer(status, headers, bytes(said[start:stop])), stop) if len(said) >= stop else None
