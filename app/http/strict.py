"""JSON of the admin routes: strict reading (media type, size, no duplicated keys), and writing."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final, NoReturn, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from app.admission.gathering.slices import completed
from app.domain.quota_value import pointer
from app.http.faults import faults_in
from app.http.problems import MAX_ERRORS, FieldError, ProblemError, unprocessable
from app.http.wire import MAX_BODY, has_lone_surrogate, require_few_values

JSON: Final = "application/json"
MERGE_PATCH: Final = "application/merge-patch+json"
TAKE: Final = "quotagate.take"
"""The key in a scope of the function that counts bytes of a body, or raises a ``ProblemError``."""
LARGE: Final = 4 * 1024
"""Larger bodies, in bytes, are read in a thread, where they do not delay decisions."""
MAX_VALUES: Final = 128 * 1024
"""The most values in a body, by ``require_few_values``: one for each 8 bytes of the largest body."""
MARKS: Final = b",[{\\"
"""The marks to count: escapes also take time here."""
MAX_KEYS: Final = 1_000
"""The most keys in an object. All objects here have few; each route names all that are unknown."""
MAX_DIGITS: Final = 400
"""A longer integer is outside every range, and slow to convert."""

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")


async def read_json(request: Request, *types: str, of: Callable[[Any], T]) -> T:
    """Return a body of one of these media types.

    Args:
        of: converts the JSON for the route, perhaps in a thread; may raise a ``ProblemError``.

    Raises:
        ProblemError: 415 for another type, 413 for a body that is too large, 400 if it is not JSON
            (RFC 8259), 422 for a duplicated key in an object; 503 if too many bodies are waiting.
    """
    return await _read(request, types, lambda body: of(parse(body)))


async def read_struct(request: Request, type_: type[S], of: Callable[[S], T]) -> T:
    """Return a JSON body that has the type of a Struct; otherwise as ``read_json``.

    Args:
        of: converts the Struct, as in ``read_json``; may raise a ``ProblemError`` for faults that the type
            does not exclude.
    """
    return await _read(request, (JSON,), lambda body: of(_struct(body, type_)))


async def _read(request: Request, types: Sequence[str], of: Callable[[bytes], T]) -> T:
    sent = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if sent not in types:
        raise ProblemError(415, f"The body must be sent as Content-Type: {' or '.join(types)}.")
    body = await read_body(request)
    if len(body) < LARGE:
        return of(body)
    found = await asyncio.to_thread(_made, body, of)
    if isinstance(found, ProblemError):
        raise found
    return found


def _made(body: bytes, of: Callable[[bytes], T]) -> T | ProblemError:
    """Return the result of ``of`` for a body, or the problem with it.

    Freeing a large document takes milliseconds, too, so the problem must not keep it.
    """
    try:
        return of(body)
    except ProblemError as problem:
        problem.__context__ = None
        return problem.with_traceback(None)


def _struct(body: bytes, type_: type[S]) -> S:
    """Return a body as a Struct.

    Raises:
        ProblemError: as ``parse``; 422 that names the faults by the types of the Struct.
    """
    document = parse(body)
    if faults := completed(faults_in(body, type_)):
        raise unprocessable(*faults)
    return msgspec.convert(document, type_)


def parse(body: bytes) -> Any:
    """Parse JSON (RFC 8259): UTF-8, no NaN, no lone surrogates; a number too large for a double is infinite.

    Raises:
        ProblemError: 400 for anything else, 413 for too many values, 422 for a duplicated key in an object or
            too many of them.
    """
    require_few_values(body, MAX_VALUES, MARKS)
    if not body.strip():
        raise ProblemError(400, "The body is empty: send JSON.")
    duplicating: list[_Duplicating] = []
    try:
        text = body.decode()
        hook = partial(_object, duplicating)
        document = json.loads(text, object_pairs_hook=hook, parse_int=_integer, parse_constant=_no_number)
    except RecursionError:
        raise ProblemError(400, "The body is nested too deeply.") from None
    except UnicodeDecodeError as error:
        raise ProblemError(400, f"The body is not UTF-8: byte {error.start} is wrong.") from None
    except ValueError as error:
        raise ProblemError(400, f"The body is not JSON: {error}.") from None
    if has_lone_surrogate(text):
        raise ProblemError(400, "The body is not JSON: a string holds a lone surrogate.")
    if duplicating:
        raise unprocessable(*islice(_duplicates(document), MAX_ERRORS))
    return document


def answer(document: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer in JSON; the document may hold Structs."""
    return Response(msgspec.json.encode(document), status, headers, JSON)


class _Duplicating(dict[str, Any]):
    """A JSON object with duplicated keys."""

    duplicated: list[str]


def _object(duplicating: list[_Duplicating], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; adds it to ``duplicating`` if it has duplicated keys.

    Raises:
        ProblemError: 422 for too many keys.
    """
    if len(pairs) > MAX_KEYS:
        raise unprocessable(FieldError("", f"has an object with more than {MAX_KEYS:,} keys"))
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    found = _Duplicating(made)
    found.duplicated = [key for key, times in Counter(key for key, _ in pairs).items() if times > 1]
    duplicating.append(found)
    return found


async def read_body(request: Request) -> bytes:
    """Return the body as it was sent.

    Raises:
        ProblemError: 413 for a body that is too large, 400 for one that ended early, 503 if too many bodies
            are waiting.
    """
    length = request.headers.get("content-length", "")
    take: Callable[[int], None] = request.scope.get(TAKE, _uncounted)
    body = bytearray()
    if not length.isdecimal() or int(length) <= MAX_BODY:
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY:
                    break
                take(len(chunk))
            else:
                return bytes(body)
        except ClientDisconnect:
            raise ProblemError(400, "The body ended early.") from None
    raise ProblemError(413, f"The body is larger than {MAX_BODY:,} bytes.", headers={"Connection": "close"})


_Path = tuple["_Path", str | int] | None
"""The path to a value: the path of its container, and its key or index there."""


def _duplicates(document: Any) -> Iterator[FieldError]:
    """Yield an error for each duplicated key, without recursion: a body may be nested deeply."""
    left: list[tuple[_Path, Any]] = [(None, document)]
    while left:
        path, value = left.pop()
        if isinstance(value, _Duplicating):
            for key in value.duplicated:
                yield FieldError(pointer(*_steps(path), key), "is duplicated")
        if isinstance(value, dict):
            left += [((path, key), inner) for key, inner in value.items() if isinstance(inner, dict | list)]
        else:
            left += [((path, at), inner) for at, inner in enumerate(value) if isinstance(inner, dict | list)]


def _steps(path: _Path) -> list[str | int]:
    steps: list[str | int] = []
    while path is not None:
        path, step = path
        steps.append(step)
    return steps[::-1]


def _uncounted(size: int) -> None:
    """Count nothing: there is no ``Front`` around the route."""


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
