"""HTTP messages as bytes: in ordinary framing, and in the many odd ways that are still valid."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final

ONE: Final = "/v1/decisions"
BATCH: Final = "/v1/decisions:batch"
CHECK: Final = "/v1/check"
KEY: Final = "Authorization: Bearer "

METHODS: Final = (
    *("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "MKCOL", "PURGE"),
    *("REPORT", "LOCK", "UNLOCK", "SEARCH", "M-SEARCH", "NOTIFY", "LINK", "ACL", "BIND", "MERGE"),
)
"""The methods that the parser knows, except CONNECT, which is a special case."""

ODD_HEADERS: Final = (
    "X-Empty:",
    "X-Tabs:\t\ta\t b\t",
    "X-Long: " + "a" * 8_000,
    "x-LoWeR: 1",
    "X-Latin: \u00fc\u00ff",
    "!#$%&'*+-.^_`|~09: every character that a name may have",
    "Cookie: a=b; c=d",
    "Accept-Encoding: gzip, br;q=0, *;q=0.1",
    "Accept: text/html",
    "Range: bytes=0-1",
    "If-Modified-Since: yesterday",
    "X-Forwarded-For: 203.0.113.9, unknown, ::1",
    "X-Real-IP: 203.0.113.9",
    "Forwarded: for=203.0.113.9",
    "TE: trailers, deflate",
    "Via: 1.0 fred, 1.1 p.example",
    "Max-Forwards: 0",
    "X-HTTP-Method-Override: DELETE",
    "Content-Type: application/json",
    "Content-Type: text/plain; charset=utf-7",
    "Content-Encoding: gzip",
    "Keep-Alive: timeout=5, max=1000",
    "Upgrade: websocket",
)
"""Fields that change nothing: names and values as RFC 9110 allows them."""


def message(
    method: str,
    target: str | bytes,
    headers: Sequence[str | bytes] = (),
    body: bytes | None = None,
    *,
    version: str = "HTTP/1.1",
    host: bool = True,
    length: str | None = None,
) -> bytes:
    """A request; its Content-Length is the size of its body, unless another is given."""
    lines: list[str | bytes] = [b" ".join([method.encode(), _encoded(target), version.encode()]).rstrip(b" ")]
    if host:
        lines.append("Host: 127.0.0.1")
    lines += headers
    if length is not None or body is not None:
        lines.append(f"Content-Length: {len(body or b'') if length is None else length}")
    return b"\r\n".join([*map(_encoded, lines), b"", body or b""])


def oddly_dressed(chance: Random) -> list[str | bytes]:
    """Some header fields that change nothing."""
    return [chance.choice(ODD_HEADERS) for _ in range(chance.choice((0, 0, 0, 1, 2, 5)))]


def chunked(chance: Random, body: bytes) -> bytes:
    """A body in chunks of any size, with extensions and trailers."""
    parts = []
    while body:
        size = chance.choice((1, 1, 2, 3, 7, 16, 255, len(body)))
        part, body = body[:size], body[size:]
        digits = f"{len(part):x}"
        digits = chance.choice((digits, digits.upper(), digits.zfill(8)))
        extension = chance.choice(("", "", "", ";a", ";a=b", ';a="b c"', ";" + "x" * 500))
        parts.append(f"{digits}{extension}\r\n".encode() + part + b"\r\n")
    trailers = chance.choice((b"", b"", b"X-Sum: 1\r\n", b"X-A:\r\nX-B: \xff\r\n"))
    return b"".join([*parts, b"0\r\n", trailers, b"\r\n"])


def in_pieces(chance: Random, text: bytes, most: int) -> tuple[bytes, ...]:
    """A text, split at random places."""
    cuts = sorted(chance.randrange(1, len(text)) for _ in range(chance.randint(1, most)))
    return tuple(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) if a < b)


def _encoded(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("latin-1")
