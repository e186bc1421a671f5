"""The routes of one entity's quotas: read, replace, patch and remove, with ETags against lost updates."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import unquote

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.catalog.catalog import Catalog, Conditions, QuotaSet, Written
from app.domain.entity import Entity, EntityError
from app.domain.ladder import Rules
from app.http import quotas_alter, quotas_effective, quotas_list
from app.http import quotas_schema as schema
from app.http.access import Access
from app.http.problems import FieldError, Problem, unprocessable
from app.http.query import Query
from app.http.quotas_effective import LimitNow
from app.http.quotas_wire import absent, conditions_of, document_of, etag, origin_of, refusals, stale
from app.http.strict import JSON, MERGE_PATCH, answer, read_json

PATH: Final = "/v1/quotas/{entity:path}"
"""A path convertor, for an escaped slash in a name stands unescaped in what Starlette matches."""
METHODS: Final = "DELETE, GET, PATCH, PUT"
COMMON_RULES: Final = Rules()


def router(
    catalog: Catalog,
    access: Access,
    rules: Rules = COMMON_RULES,
    limit_now: LimitNow = lambda quota, _ask: quota.limit,
    *,
    timed: bool = False,
) -> APIRouter:
    """Every route of quotas; access is judged before anything else of a request is looked at.

    Args:
        limit_now: gives a limit as it is for an ask this moment, after the throttle factor.
        timed: under the caller's clock, where questions may say when they are asked.
    """
    routes = APIRouter(tags=["Quotas"], default_response_class=Response, route_class=_OneOfFour)

    @routes.get(PATH, **schema.GET)
    async def get_quotas(request: Request) -> Response:
        access.require(request.scope, "read")
        entity, conditions = _entity(request.scope), conditions_of(request)
        async with refusals():
            found = await catalog.get(entity)
        if found is None:
            raise absent(f"no quotas are set on {entity}")
        if not Conditions(match=conditions.match).hold(found.version):
            raise stale(f"{entity} is at version {found.version}")
        if not conditions.hold(found.version):
            return Response(status_code=304, headers={"ETag": etag(found.version)})
        return _shown(found, 200)

    @routes.put(PATH, **schema.PUT)
    async def put_quotas(request: Request) -> Response:
        access.require(request.scope, "write")
        values = await read_json(request, JSON)
        entity = _entity(request.scope)
        async with refusals():
            written = await catalog.put(
                entity, _object(values), origin_of(request, access), conditions_of(request)
            )
        return _answer(written)

    @routes.patch(PATH, **schema.PATCH)
    async def patch_quotas(request: Request) -> Response:
        access.require(request.scope, "write")
        patch = await read_json(request, MERGE_PATCH, JSON)
        entity = _entity(request.scope)
        async with refusals():
            written = await catalog.patch(
                entity, _object(patch), origin_of(request, access), conditions_of(request)
            )
        return _answer(written)

    @routes.delete(PATH, **schema.DELETE)
    async def delete_quotas(request: Request) -> Response:
        access.require(request.scope, "write")
        entity = _entity(request.scope)
        async with refusals():
            written = await catalog.delete(entity, origin_of(request, access), conditions_of(request))
        return _answer(written)

    routes.include_router(quotas_list.router(catalog, access))
    routes.include_router(quotas_alter.router(catalog, access))
    routes.include_router(quotas_effective.router(catalog, access, rules, limit_now, timed=timed))
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
    Query.of(scope).check()
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


def _answer(written: Written) -> Response:
    if written.after is None:
        return Response(status_code=204)
    return _shown(written.after, 201 if written.before is None else 200)


def _shown(found: QuotaSet, status: int) -> Response:
    headers = {"ETag": etag(found.version)}
    if status == 201:
        headers["Location"] = f"/v1/quotas/{found.entity}"
    return answer(document_of(found), status, headers)
