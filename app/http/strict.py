"""JSON of the admin routes: strict reading (media type, size, no duplicated keys), and writing."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from app.domain.quota_value import pointer
from app.http.problems import FieldError, ProblemError, unprocessable
from app.http.wire import MAX_BODY, has_lone_surrogate

JSON: Final = "application/json"
MERGE_PATCH: Final = "application/merge-patch+json"
LARGE: Final = 32 * 1024
MAX_DIGITS: Final = 400
"""A longer integer is outside every range, and slow to convert."""


async def read_json(request: Request, *types: str) -> Any:
    """Return the body, as JSON of one of these media types.

    Raises:
        ProblemError: 415 for another type, 413 for a body that is too large, 400 for what is not JSON
            (RFC 8259), 422 for a duplicated key in an object.
    """
    sent = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if sent not in types:
        raise ProblemError(415, f"The body must be sent as Content-Type: {' or '.join(types)}.")
    body = await read_body(request)
    # Parsing a large one here would delay decisions.
    return parse(body) if len(body) < LARGE else await asyncio.to_thread(parse, body)


def parse(body: bytes) -> Any:
    """Parse JSON (RFC 8259): UTF-8, no NaN, no lone surrogates; a number too large for a double is infinite.

    Raises:
        ProblemError: 400 for anything else, 422 for a duplicated key in an object.
    """
    if not body.strip():
        raise ProblemError(400, "The body is empty: send JSON.")
    try:
        text = body.decode()
        document = json.loads(text, object_pairs_hook=_Object, parse_int=_integer, parse_constant=_no_number)
    except RecursionError:
        raise ProblemError(400, "The body is nested too deeply.") from None
    except UnicodeDecodeError as error:
        raise ProblemError(400, f"The body is not UTF-8: byte {error.start} is wrong.") from None
    except ValueError as error:
        raise ProblemError(400, f"The body is not JSON: {error}.") from None
    if has_lone_surrogate(text):
        raise ProblemError(400, "The body is not JSON: a string holds a lone surrogate.")
    repeated = [
        FieldError(pointer(*path, key), "is duplicated")
        for path, value in _walk(document)
        if isinstance(value, _Object)
        for key in value.repeated
    ]
    if repeated:
        raise unprocessable(*repeated)
    return document


def answer(document: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer in JSON; the document may hold Structs."""
    return Response(json.dumps(msgspec.to_builtins(document), separators=(",", ":")), status, headers, JSON)


class _Object(dict[str, Any]):
    """A JSON object that remembers its duplicated keys."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.repeated: list[str] = []
        if len(self) < len(pairs):
            self.repeated = [key for key, times in Counter(key for key, _ in pairs).items() if times > 1]


async def read_body(request: Request) -> bytes:
    """Return the body as it was sent.

    Raises:
        ProblemError: 413 for a body that is too large, 400 for one that ended early.
    """
    length = request.headers.get("content-length", "")
    body = bytearray()
    if not length.isdecimal() or int(length) <= MAX_BODY:
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY:
                    break
            else:
                return bytes(body)
        except ClientDisconnect:
            raise ProblemError(400, "The body ended early.") from None
    raise ProblemError(413, f"The body is larger than {MAX_BODY:,} bytes.", headers={"Connection": "close"})


def _walk(document: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield every value with its path, without recursion: a body may be nested deeply."""
    left: list[tuple[tuple[str | int, ...], Any]] = [((), document)]
    while left:
        path, value = left.pop()
        yield path, value
        if isinstance(value, dict):
            left += [((*path, key), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            left += [((*path, place), inner) for place, inner in enumerate(value)]


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
