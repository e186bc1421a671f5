"""The routes of one entity's quotas: read, replace, patch and remove, with ETags against lost updates."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, Literal
from urllib.parse import unquote

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.catalog.catalog import Absent, Catalog, Conditions, QuotaSet, Stale, Written
from app.catalog.port import CatalogAway
from app.catalog.sql import Origin
from app.domain.entity import Entity, EntityError
from app.domain.quota_value import ValueErrors, bound
from app.http import quotas_schema as schema
from app.http.access import Access
from app.http.problems import FieldError, Problem, unprocessable
from app.http.strict import JSON, MERGE_PATCH, read_json

PATH: Final = "/v1/quotas/{entity:path}"
"""A path convertor, for an escaped slash in a name stands unescaped in what Starlette matches."""
METHODS: Final = "DELETE, GET, PATCH, PUT"
WHO: Final = "admin"
"""There is one admin key."""

_TAG: Final = re.compile(r'(W/)?"([!\x23-\x7e\x80-\xff]*)"')
_VERSION: Final = re.compile("[1-9][0-9]{0,18}")


def router(catalog: Catalog, access: Access) -> APIRouter:
    """The routes; access is judged before anything else of a request is looked at."""
    routes = APIRouter(tags=["Quotas"], default_response_class=Response, route_class=_OneOfFour)

    @routes.get(PATH, **schema.GET)
    async def get_quotas(request: Request) -> Response:
        access.require(request.scope, "read")
        entity, conditions = _entity(request.scope), _conditions(request)
        async with _refusals():
            found = await catalog.get(entity)
        if found is None:
            raise _absent(f"no quotas are set on {entity}")
        if not Conditions(match=conditions.match).hold(found.version):
            raise _stale(f"{entity} is at version {found.version}")
        if not conditions.hold(found.version):
            return Response(status_code=304, headers={"ETag": _etag(found)})
        return _shown(found, 200)

    @routes.put(PATH, **schema.PUT)
    async def put_quotas(request: Request) -> Response:
        access.require(request.scope, "write")
        values = await read_json(request, JSON)
        entity = _entity(request.scope)
        async with _refusals():
            written = await catalog.put(entity, _object(values), _origin(request), _conditions(request))
        return _answer(written)

    @routes.patch(PATH, **schema.PATCH)
    async def patch_quotas(request: Request) -> Response:
        access.require(request.scope, "write")
        patch = await read_json(request, MERGE_PATCH, JSON)
        entity = _entity(request.scope)
        async with _refusals():
            written = await catalog.patch(entity, _object(patch), _origin(request), _conditions(request))
        return _answer(written)

    @routes.delete(PATH, **schema.DELETE)
    async def delete_quotas(request: Request) -> Response:
        access.require(request.scope, "write")
        entity = _entity(request.scope)
        async with _refusals():
            written = await catalog.delete(entity, _origin(request), _conditions(request))
        return _answer(written)

    return routes


class _OneOfFour(APIRoute):
    """A route that knows of its siblings: Starlette's own 405 allows the methods of the first one only."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or say which methods this path takes."""
        if scope["method"] not in (self.methods or ()):
            raise HTTPException(405, headers={"Allow": METHODS})
        await super().handle(scope, receive, send)


def _entity(scope: Scope) -> Entity:
    """The entity of the raw path, decoded once, so that ``user=*`` and ``user=%2A`` are two.

    A client that escapes a whole path segment, as generated ones do, escapes the ``=`` too: such a segment
    is the escaped spelling.
    """
    raw = scope["raw_path"].decode("utf-8", "surrogateescape")
    segments = raw.split("/", 3)
    if len(segments) < 4 or "/" in segments[3]:
        raise Problem(404, "There is nothing at this path; a slash in a name is written %2F.")
    spelled = segments[3] if "=" in segments[3] else unquote(segments[3], errors="surrogateescape")
    try:
        return Entity.parse(spelled)
    except UnicodeEncodeError:
        raise unprocessable(FieldError("/entity", "must be UTF-8")) from None
    except EntityError as error:
        raise unprocessable(FieldError("/entity", str(error))) from None


def _object(body: Any) -> dict[str, object]:
    if isinstance(body, dict):
        return body
    raise unprocessable(FieldError("", "must be an object of quotas by their key"))


def _conditions(request: Request) -> Conditions:
    return Conditions(
        _versions(request, "if-match", weak=False), _versions(request, "if-none-match", weak=True)
    )


def _versions(request: Request, name: str, *, weak: bool) -> frozenset[int] | Literal["*"] | None:
    """The versions that a condition names; what is no ETag in quotes, as ours are, names none.

    If-Match compares strongly: a weak ETag matches nothing there.
    """
    lines = request.headers.getlist(name)
    if not lines:
        return None
    text = ",".join(lines).strip()
    if text == "*":
        return "*"
    tags = (tag for strength, tag in _TAG.findall(text) if weak or not strength)
    return frozenset(int(tag) for tag in tags if _VERSION.fullmatch(tag))


def _origin(request: Request) -> Origin:
    reason = request.headers.get("x-reason", "").strip().encode("latin-1")
    return Origin(WHO, time.time_ns() // 1_000_000, reason.decode("utf-8", "replace") or None)


@asynccontextmanager
async def _refusals() -> AsyncIterator[None]:
    """What the catalog refuses, as problems."""
    try:
        yield
    except ValueErrors as wrong:
        raise unprocessable(*(FieldError(field, message) for field, message in wrong.errors)) from None
    except Absent as absent:
        raise _absent(str(absent)) from None
    except Stale as stale:
        raise _stale(str(stale)) from None
    except CatalogAway as away:
        raise Problem(
            503,
            "The catalog is out of reach; the last quotas read from it stay in force.",
            headers={"Retry-After": "1"},
        ) from away


def _absent(detail: str) -> Problem:
    return Problem(404, f"{detail[0].upper()}{detail[1:]}.")


def _stale(detail: str) -> Problem:
    return Problem(412, f"A condition does not hold: {detail}.")


def _answer(written: Written) -> Response:
    if written.after is None:
        return Response(status_code=204)
    return _shown(written.after, 201 if written.before is None else 200)


def _shown(found: QuotaSet, status: int) -> Response:
    document = {
        "entity": str(found.entity),
        "quotas": dict(found.definitions),
        "bounds": {key: bound(quota) for key, quota in found.quotas.items()},
        "version": found.version,
    }
    headers = {"ETag": _etag(found)}
    if status == 201:
        headers["Location"] = f"/v1/quotas/{found.entity}"
    return Response(json.dumps(document, separators=(",", ":")), status, headers, JSON)


def _etag(found: QuotaSet) -> str:
    return f'"{found.version}"'
